"""TRL's DPOTrainer, learning from pairs in their order, in a file. For TRL's interpreter.

    python dpo_trl.py '{"model": ..., "data": ..., "adapter": ... or null, "arm": ..., "batch": ..., ...}'
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from datasets import load_dataset
from peft import PeftModel
from trainer_steps import InOrder, plain_settings, step_by_step
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

ARMS: dict[str, dict[str, Any]] = {
    "default": {},
    "best": {"gradient_checkpointing": False, "precompute_ref_log_probs": True, "bf16": False},
    "best-bf16": {"gradient_checkpointing": False, "precompute_ref_log_probs": True, "bf16": True},
}


class OrderedTrainer(InOrder, DPOTrainer):  # type: ignore[misc]
    """TRL's trainer, with the examples in their order."""


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
    if options["adapter"]:
        model = PeftModel.from_pretrained(model, options["adapter"], is_trainable=True)
    settings = plain_settings(options) | {"max_length": options["max_length"], "beta": 0.1} | ARMS[options["arm"]]
    # the reference's scores are made before the first step; its batches have as many pairs as the training's
    step_by_step(OrderedTrainer(model=model, args=DPOConfig(output_dir=tempfile.mkdtemp(), **settings),
                         train_dataset=load_dataset("json", data_files=options["data"], split="train"),
                         processing_class=AutoTokenizer.from_pretrained(options["model"])))


if __name__ == "__main__":
    main()
