"""What a step takes over the weights and the optimizer's states: activations, and the few gradients of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powertrain.claims.probes.memory_trace import step_peak
from powertrain.claims.probes.probe import Context, Measured, exactly
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import open_training


def measure(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Measured:
    """Arm b over arm a, in the same step of both."""
    found = [apart(_activation_bytes, [*words, *arm], context.cache) for arm in (a, b)]
    names = (" ".join(a) or "as it is", " ".join(b) or "as it is")
    return Measured(exactly(found[1] / found[0]), "times the memory", *names, {"bytes": dict(zip(names, found, strict=True))})


def _activation_bytes(words: Sequence[str], cache: Path) -> int:
    return step_peak(open_training(words, cache))[0]
