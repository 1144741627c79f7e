"""TRL's SFTTrainer, fine-tuning a folder's model on conversations in their order, in a file. For TRL's interpreter.

    python sft_trl.py '{"model": ..., "data": ..., "adapter": ... or null, "arm": ..., "batch": ..., ...}'
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
from trl import SFTConfig, SFTTrainer

ARMS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-checkpointing": {"gradient_checkpointing": False},
    "packed": {"gradient_checkpointing": False, "packing": True},
    "compiled": {"gradient_checkpointing": False, "torch_compile": True},
}


class OrderedTrainer(InOrder, SFTTrainer):  # type: ignore[misc]
    """TRL's trainer, with the examples in their order."""


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    dtype = torch.bfloat16 if options["adapter"] else torch.float32          # TRL's own choices
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype)
    if options["adapter"]:
        model = PeftModel.from_pretrained(model, options["adapter"], is_trainable=True)
    settings = plain_settings(options) | {"max_length": options["max_length"]} | ARMS[options["arm"]]
    step_by_step(OrderedTrainer(model=model, args=SFTConfig(output_dir=tempfile.mkdtemp(), **settings),
                         train_dataset=load_dataset("json", data_files=options["data"], split="train"),
                         processing_class=AutoTokenizer.from_pretrained(options["model"])))


if __name__ == "__main__":
    main()
