"""The peak of every step from the first: when it is as high as it ever gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powertrain.claims.probes.probe import Context, Measured, exactly
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import Training, open_training
from powertrain.training.ledger import MemoryLedger, standing_bytes

CLOSE = 0.02                                 # to the highest peak, as a share of it


def measure(context: Context, *, words: Sequence[str], steps: int = 8) -> Measured:
    """The first step whose peak is within 2 % of the highest of all: from there on it stands. Detail: the peaks."""
    peaks = apart(_peaks, words, context.cache, steps)
    return Measured(exactly(float(stands_from(peaks))), "steps", "the first step", f"step {steps}", {"peak_bytes": peaks})


def stands_from(peaks: Sequence[int]) -> int:
    """From 1."""
    return next(step for step, peak in enumerate(peaks, 1) if peak >= max(peaks) * (1 - CLOSE))


def _peaks(words: Sequence[str], cache: Path, steps: int) -> list[int]:
    training = open_training(words, cache, warm_up=0)
    return [step_peak(training)[1] for _ in range(steps)]


def step_peak(training: Training) -> tuple[int, int]:
    """Bytes that one more step takes over what stands before it (weights, optimizer), and those with what stands."""
    standing = standing_bytes(training.setup.model, training.state.optimizer)
    with MemoryLedger(training.setup.device, standing=0) as ledger:
        training.advance(1)
    return ledger.peak_bytes, standing + ledger.peak_bytes
