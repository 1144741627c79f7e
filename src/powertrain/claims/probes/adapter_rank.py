"""What a smaller rank saves: the real peak of a step, and the bytes of the adapters themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powertrain.claims.probes.probe import Context, Measured, exactly
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import open_training
from powertrain.training.ledger import measured_step_bytes

FP32_BYTES = 4


def measure(context: Context, *, words: Sequence[str], a: int = 64, b: int = 16) -> Measured:
    """The peak of a step with rank b over that with rank a. Detail: `adapter_ratio`, the same of the adapters' bytes, and
    `adapter_share`, what they are of arm a's peak with their gradients and moments.
    """
    (peak_a, adapter_a), (peak_b, adapter_b) = (apart(_bytes, [*words, f"lora.r={rank}"], context.cache) for rank in (a, b))
    return Measured(exactly(peak_b / peak_a), "times the memory", f"rank {a}", f"rank {b}",
                    {"peak_bytes": {f"rank {a}": peak_a, f"rank {b}": peak_b}, "adapter_ratio": adapter_b / adapter_a,
                     "adapter_bytes": {f"rank {a}": adapter_a, f"rank {b}": adapter_b},
                     "adapter_share": 4 * adapter_a / peak_a})       # weight, gradient and two moments


def _bytes(words: Sequence[str], cache: Path) -> tuple[int, int]:
    """(peak of a step, adapters)."""
    training = open_training(words, cache, warm_up=1)
    peak = measured_step_bytes(training.setup, training.state)["allocated"]
    return peak, FP32_BYTES * training.prepared.facts.model.adapter_parameters
