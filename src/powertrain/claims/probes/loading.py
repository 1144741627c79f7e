"""Loading a model through transformers with and without options that a trainer passes: seconds, and memory on the way.

A small Llama is written once and read by turns in one process. What is drawn from the disk's cache is so for both.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    by_turns,
    medians,
    one_of,
    ratio,
    seconds_of,
)
from powertrain.claims.probes.process import apart
from powertrain.records import WrongUse

SHAPE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
                         "vocab_size": 8192}
PEAK, STATUS, RESET = "VmHWM:", Path("/proc/self/status"), Path("/proc/self/clear_refs")
METRICS = ("seconds", "memory")


def measure(context: Context, *, a: Mapping[str, Any], b: Mapping[str, Any], repeats: int = REPEATS,
            metric: str = "seconds") -> Measured:
    """`a` and `b`: options of from_pretrained. "seconds": b over a, times as fast; "memory": b's peak over a's."""
    one_of("metric", metric, METRICS)
    rounds, model_bytes = apart(_rounds, context.folder, context.deadline, a, b, repeats, metric)
    names = (_named(a), _named(b))
    detail = {metric: medians(rounds, names), "model_bytes": model_bytes}
    if metric == "memory":
        return Measured(ratio(rounds, 1, 0), "times the memory", *names, detail)
    return Measured(ratio(rounds, 0, 1), "times as fast", *names, detail)


def _rounds(folder: Path, deadline: float, a: Mapping[str, Any], b: Mapping[str, Any], repeats: int,
            metric: str) -> tuple[Rounds, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model_bytes = sum(value.numel() * value.element_size() for value in model.parameters())
    model.save_pretrained(folder / "model")
    del model

    def load(options: Mapping[str, Any]) -> None:
        loaded = LlamaForCausalLM.from_pretrained(folder / "model", **options)
        sum(value.sum().item() for value in loaded.parameters())     # pages that are only mapped are not loaded yet

    take = _peak_bytes if metric == "memory" else lambda work: seconds_of(work, torch.device("cpu"))
    for options in (a, b):
        load(options)
    return by_turns([lambda o=o: take(lambda: load(o)) for o in (a, b)], deadline, repeats), model_bytes  # type: ignore[misc]


def _named(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "as it is"


def _peak_bytes(work: Callable[[], None]) -> float:
    """What the process's resident memory was at most while `work` ran, above what it was before."""
    gc.collect()
    try:
        RESET.write_text("5")                # Linux, proc(5): the high-water mark becomes what is resident now
    except OSError:
        raise WrongUse(f"the peak of resident memory is read off {STATUS}, which only Linux has") from None
    before = _high_water_bytes()
    work()
    return max(1.0, _high_water_bytes() - before)


def _high_water_bytes() -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(PEAK))
    return 1024.0 * int(line.split()[1])
