"""transformers' own Trainer with and without `remove_unused_columns`: seconds of a step.

The data has the columns that the model reads and no others, as after tokenising; a small Llama learns from it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from powertrain.claims.probes.probe import REPEATS, Context, Measured, Rounds, by_turns, medians, ratio
from powertrain.claims.probes.process import apart

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
                         "vocab_size": 2048}
WARM_UP = 3                                  # steps of each repeat that are not counted
TOKENS = 128


def measure(context: Context, *, steps: int = 12, repeats: int = REPEATS) -> Measured:
    """remove_unused_columns=False over True: times as fast."""
    rounds = apart(_rounds, context.folder, context.deadline, steps, repeats)
    names = ("remove_unused_columns=True", "remove_unused_columns=False")
    return Measured(ratio(rounds, 0, 1), "times as fast", *names, {"step_s": medians(rounds, names), "steps": steps})


def _rounds(folder: Path, deadline: float, steps: int, repeats: int) -> Rounds:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(SHAPE["vocab_size"], (TOKENS,), generator=drawn) for _ in range(8 * (steps + WARM_UP))]
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]
    return by_turns([lambda flag=flag: _step_s(model, data, folder, steps, flag)  # type: ignore[misc]
                     for flag in (True, False)], deadline, repeats)


def _step_s(model: Any, data: list[dict[str, Any]], folder: Path, steps: int, flag: bool) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps + WARM_UP, per_device_train_batch_size=8, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", remove_unused_columns=flag, dataloader_pin_memory=False)
    Trainer(model, arguments, train_dataset=data, callbacks=[Clock()]).train()
    return (ends[-1] - ends[WARM_UP - 1]) / steps
