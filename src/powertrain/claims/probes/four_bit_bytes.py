"""What 4 bits save of a model's weights: bits per weight as bitsandbytes packs them here, times the model's shape."""

from __future__ import annotations

import torch

from powertrain.claims.probes.known_models import known_facts
from powertrain.claims.probes.probe import Context, Measured, exactly
from powertrain.models.kernels.quantised import QuantisedLinear
from powertrain.records import ModelFacts

EDGE = 1024                                  # of the matrix that is packed: its shape changes nothing but the last block
SIXTEEN_BIT_BYTES = 2


def measure(context: Context, *, model: str, double: bool = False, kind: str = "nf4") -> Measured:
    """How many times fewer bytes the model takes than with all weights in 16 bits.

    Embedding, norms and head stay in 16 bits, as transformers leaves them. Detail: `saved_share` of the whole model, and of
    the matrices that are packed alone. Raises WrongUse without bitsandbytes.
    """
    del context
    packed_bytes = bytes_per_weight(kind, double)
    before, after = weight_bytes(known_facts(model), packed_bytes)
    scales = "with its scales in 8 bits" if double else "with its scales in fp32"
    return Measured(exactly(before / after), "times fewer bytes", "16 bits", f"{kind} {scales}",
                    {"bytes": {"16 bits": before, kind: after}, "bits_per_weight": 8 * packed_bytes,
                     "saved_share": 1 - after / before, "saved_share_of_matrices": 1 - packed_bytes / SIXTEEN_BIT_BYTES})


def bytes_per_weight(kind: str, double: bool) -> float:
    """Of a packed matrix, with its scales, counted on a real one."""
    linear = torch.nn.Linear(EDGE, EDGE, bias=False)
    return QuantisedLinear(linear, [EDGE], kind, double).memory_bytes / EDGE**2


def weight_bytes(model: ModelFacts, packed_bytes: float) -> tuple[float, float]:
    """(all in 16 bits, the blocks' matrices packed)."""
    others = SIXTEEN_BIT_BYTES * (model.parameters - model.matmul_parameters)
    return float(SIXTEEN_BIT_BYTES * model.parameters), others + packed_bytes * model.matmul_parameters
