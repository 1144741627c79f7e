"""Whether a run is long enough to earn back the time that compiling takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from powertrain.cost.estimate import estimate
from powertrain.cost.workload import Workload
from powertrain.records import Facts, UnknownFact

PASS_TOKENS = 4096
# by device, the parts without which torch.compile makes no code there (facts/software.py says what is missing)
COMPILER_PARTS: Mapping[str, tuple[str, ...]] = {"cpu": ("c++ compiler", "python headers"), "cuda": ("triton",)}
WORTH_IT = 2                                 # times its own cost that compiling has to save


@dataclass(frozen=True)
class Bargain:
    pays: bool
    shown: str                               # one clause with the numbers


def bargain(facts: Facts, gain: tuple[float, float], compile_s: float, *, train_time_s: float | None, max_steps: int | None,
            epochs: float) -> Bargain:
    """`gain`: the step's time with compiling over that without, at best and at worst; half way between is expected."""
    length = _length(facts, train_time_s, max_steps, epochs)
    if length is None:
        return Bargain(False, "the speed of this machine is not measured, so nobody can say whether compiling pays")
    steps, step_s = length
    saved_s = steps * step_s * (1 - sum(gain) / 2)
    cost = f"compiling takes about {compile_s:.0f} s and would save about {saved_s:.0f} of {steps * step_s:,.0f} s"
    if saved_s < WORTH_IT * compile_s:
        return Bargain(False, f"{cost}; it has to save {WORTH_IT} times what it costs")
    return Bargain(True, f"{cost}: earned back after step {compile_s / saved_s * steps:,.0f} of {steps:,}")


def _length(facts: Facts, train_time_s: float | None, max_steps: int | None, epochs: float) -> tuple[int, float] | None:
    """(optimizer steps, seconds of one without compiling); None where this machine's speed is not measured."""
    data, peaks = facts.data, facts.hardware.peak_flops_per_s
    fastest = max(peaks, key=lambda dtype: peaks[dtype], default="fp32")
    micro_batch = max(1, min(data.train_batch_size, PASS_TOKENS // data.block))
    workload = Workload(data.train_batch_size, data.block, micro_batch, dtype=fastest)
    try:
        step_s = sum(estimate(facts.model, workload, facts.hardware, 1).step_s) / 2
    except UnknownFact:
        return None
    if train_time_s is not None:
        return max(1, round(train_time_s / step_s)), step_s
    return max_steps or max(1, int(epochs * data.examples / data.train_batch_size)), step_s
