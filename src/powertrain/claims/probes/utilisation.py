"""Busy is not the same as efficient: how busy the device looks while training, and what share of its arithmetic is used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from powertrain.claims.probes.probe import REPEATS, Context, Measured, Rounds, by_turns, one_of, seconds_of
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import Training, open_training
from powertrain.evidence.stats import interval
from powertrain.records import WrongUse
from powertrain.run.session import peak_memory_bytes

METRICS = ("efficiency", "busy")


def measure(context: Context, *, words: Sequence[str], steps: int = 10, repeats: int = REPEATS,
            metric: str = "efficiency") -> Measured:
    """metric "efficiency": the model's FLOPs a second over the GEMM peak that was measured here; "busy": the share of the time
    that the cores worked, or on a GPU that any kernel ran (what nvidia-smi calls utilisation). Detail has both.
    """
    one_of("metric", metric, METRICS)
    flops, peak, examples, memory, rounds = apart(_rounds, words, context.cache, context.deadline, steps, repeats)
    busy = interval([values[1] for values in rounds])
    efficiency = interval([flops / values[0] / peak for values in rounds])
    step_s = statistics.median(values[0] for values in rounds)
    detail = {"busy": vars(busy), "efficiency": vars(efficiency), "steps_per_s": 1 / step_s,
              "examples_per_s": examples / step_s, "flops_per_step": flops, "peak_flops_per_s": peak,
              "peak_gb": memory / 1e9}
    return Measured(efficiency if metric == "efficiency" else busy, "of the time" if metric == "busy" else "of the peak",
                    "busy", "efficient", detail)


def _rounds(words: Sequence[str], cache: Path, deadline: float, steps: int,
            repeats: int) -> tuple[float, float, int, int, Rounds]:
    """(FLOPs of a step, FLOP/s at most, examples of a step, peak memory, seconds of a step with the busy share)."""
    training = open_training(words, cache)
    estimate = training.prepared.plan.estimate
    if estimate is None:
        raise WrongUse("this machine's peak is not measured, so nobody can say what share of it is used; `powertrain facts "
                       "--measure` measures it")
    shares: list[float] = []

    def window() -> float:
        seconds, busy = _window(training, steps)
        shares.append(busy)
        return seconds

    rounds = by_turns([window], deadline, repeats)
    both: Rounds = [(seconds, busy) for (seconds,), busy in zip(rounds, shares, strict=True)]
    memory = peak_memory_bytes(training.setup.device)
    return estimate.flops_per_step, estimate.peak_flops_per_s, training.examples_per_step, memory, both


def _window(training: Training, steps: int) -> tuple[float, float]:
    """(seconds of a step, share of the time that the device looked busy)."""
    device, before = training.setup.device, time.process_time()
    seconds = seconds_of(lambda: training.advance(steps), device)
    if device.type == "cuda":
        return seconds / steps, torch.cuda.utilization(device) / 100     # over about the last second
    return seconds / steps, (time.process_time() - before) / (seconds * torch.get_num_threads())
