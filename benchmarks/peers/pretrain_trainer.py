"""transformers' Trainer, pre-training a model from a config on blocks of tokens in a file. For the peer's interpreter.

    python pretrain_trainer.py '{"model": FOLDER, "blocks": FILE.npy, "batch": ..., ...}'

Weights are those of the folder, so that both sides begin alike; blocks is (steps, batch, block + 1) of token ids, in order.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, SequentialSampler
from trainer_steps import plain_settings, step_by_step
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

ARMS: dict[str, dict[str, Any]] = {"default": {}, "bf16": {"bf16": True}, "compiled": {"bf16": True, "torch_compile": True}}


class Blocks(Dataset):  # type: ignore[type-arg]
    """The model shifts the labels itself: an example is a block and the token after it."""

    def __init__(self, file: str) -> None:
        steps = np.load(file, mmap_mode="r")
        self.blocks = steps.reshape(-1, steps.shape[-1])

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.blocks[index].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
    settings = plain_settings(options) | ARMS[options["arm"]]
    step_by_step(InOrder(model=model, args=TrainingArguments(output_dir=tempfile.mkdtemp(), **settings),
                         train_dataset=Blocks(options["blocks"])))


if __name__ == "__main__":
    main()
