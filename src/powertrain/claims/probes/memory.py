"""Probes of memory: activations, adapters, attention, 4-bit weights, rules of thumb, and when the peak is reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from powertrain.claims.probes.probe import Context, Measured, Training, apart, exactly, one_of, open_training, quiet
from powertrain.evidence.clock import CannotRun
from powertrain.facts.model import model_facts
from powertrain.models.config import make_config
from powertrain.models.kernels.quantised import QuantisedLinear
from powertrain.recipe import resolve_words
from powertrain.records import ModelFacts
from powertrain.records.evidence import Arm
from powertrain.run.prepare import prepare
from powertrain.shapes import DTYPE_BYTES
from powertrain.training.ledger import MemoryLedger, measured_step_bytes, standing_bytes

# ------------------------------------------------------------------------------------------------ known_models
# The models of the source documents, as shapes: what can be counted of them needs no weights.

SHAPES: Mapping[str, Mapping[str, Any]] = {  # from the config.json that each is published with
    "llama-3.1-8b": {"vocabulary": 128256, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336,
                     "context": 131072, "tied_head": False},
    "phi-3-mini": {"vocabulary": 32064, "layers": 32, "width": 3072, "heads": 32, "kv_heads": 32, "mlp_width": 8192,
                   "context": 4096, "tied_head": False},
    "tinyllama-1.1b": {"vocabulary": 32000, "layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "mlp_width": 5632,
                       "context": 2048, "tied_head": False},
}


def known_facts(name: str) -> ModelFacts:
    """Return the facts of a model of SHAPES; all are Llamas in shape. Raises WrongUse for another name."""
    config, _ = make_config("llama", **SHAPES[one_of("model", name, tuple(SHAPES))])
    return model_facts(config)


# ------------------------------------------------------------------------------------------------ memory_trace
# The peak of every step from the first: when it is as high as it ever gets.

CLOSE = 0.02                                 # to the highest peak, as a share of it


def memory_trace(context: Context, *, words: Sequence[str], steps: int = 8) -> Measured:
    """Return the first step whose peak is within 2 % of the highest of all. Detail: the peaks."""
    peaks = apart(_step_peaks, words, context.cache, steps)
    return Measured(exactly(float(stands_from(peaks))), "steps", "the first step", f"step {steps}", {"peak_bytes": peaks})


def stands_from(peaks: Sequence[int]) -> int:
    """Return the first step, from 1, whose peak is close to the highest."""
    return next(step for step, peak in enumerate(peaks, 1) if peak >= max(peaks) * (1 - CLOSE))


def _step_peaks(words: Sequence[str], cache: Path, steps: int) -> list[int]:
    training = open_training(words, cache, warm_up=0)
    return [step_peak(training)[1] for _ in range(steps)]


def step_peak(training: Training) -> tuple[int, int]:
    """Return the bytes that one more step takes besides weights and optimizer, and the bytes with both."""
    standing = standing_bytes(training.setup.model, training.state.optimizer)
    with MemoryLedger(training.setup.device, standing=0) as ledger:
        training.advance(1)
    return ledger.peak_bytes, standing + ledger.peak_bytes


# ------------------------------------------------------------------------------------------------ activations
# What a step takes over the weights and the optimizer's states: activations, and the few gradients of adapters.

def activations(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Measured:
    """Return the activation bytes of arm b over those of arm a, in the same step of both."""
    found = [apart(_activation_bytes, [*words, *arm], context.cache) for arm in (a, b)]
    names = (" ".join(a) or "as it is", " ".join(b) or "as it is")
    return Measured(exactly(found[1] / found[0]), "times the memory", *names, {"bytes": dict(zip(names, found, strict=True))})


def _activation_bytes(words: Sequence[str], cache: Path) -> int:
    return step_peak(open_training(words, cache))[0]


# ------------------------------------------------------------------------------------------------ adapter_rank
# What a smaller rank saves: the real peak of a step, and the bytes of the adapters themselves.

FP32_BYTES = 4


def adapter_rank(context: Context, *, words: Sequence[str], a: int = 64, b: int = 16) -> Measured:
    """Return the peak of a step with rank b over the peak with rank a.

    Detail: `adapter_ratio`, the same of the adapters' bytes, and `adapter_share`, the adapters with their gradients and
    moments over arm a's peak.
    """
    (peak_a, adapter_a), (peak_b, adapter_b) = (apart(_adapter_bytes, [*words, f"lora.r={rank}"], context.cache)
                                                for rank in (a, b))
    return Measured(exactly(peak_b / peak_a), "times the memory", f"rank {a}", f"rank {b}",
                    {"peak_bytes": {f"rank {a}": peak_a, f"rank {b}": peak_b}, "adapter_ratio": adapter_b / adapter_a,
                     "adapter_bytes": {f"rank {a}": adapter_a, f"rank {b}": adapter_b},
                     "adapter_share": 4 * adapter_a / peak_a})       # weight, gradient and two moments


def _adapter_bytes(words: Sequence[str], cache: Path) -> tuple[int, int]:
    """Return the peak of a step, and the bytes of the adapters."""
    training = open_training(words, cache, warm_up=1)
    peak = measured_step_bytes(training.setup, training.state)["allocated"]
    return peak, FP32_BYTES * training.prepared.facts.model.adapter_parameters


# ------------------------------------------------------------------------------------------------ memory_rule
# A rule of thumb for the memory of training, "model size x precision + batch x sequence x hidden", against the real peak.

def memory_rule(context: Context, *, words: Sequence[str]) -> Measured:
    """Return the error of the rule in % of the allocated peak of a step. Detail: Powertrain's own prediction too."""
    prepared = prepare(resolve_words(words), context.cache, quiet)
    model, data = prepared.facts.model, prepared.facts.data
    found = context.arena.probe(Arm("memory rule", tuple(words)))
    if found.allocated_bytes is None:
        raise CannotRun(f"the memory of a step could not be counted: {found.error or 'no ledger'}")
    rule = model.parameters * DTYPE_BYTES[model.frozen_dtype] + data.train_batch_size * data.block * model.width
    ours = prepared.plan.estimate.total_memory_bytes if prepared.plan.estimate else None
    detail = {"rule_bytes": rule, "measured_bytes": found.allocated_bytes, "powertrain_bytes": ours,
              "powertrain_error": None if ours is None else _percent_off(ours, found.allocated_bytes)}
    return Measured(exactly(_percent_off(rule, found.allocated_bytes)), "% off", "the rule", "the allocated peak", detail)


def _percent_off(said: float, measured: float) -> float:
    return 100 * abs(said - measured) / measured


# ------------------------------------------------------------------------------------------------ four_bit_bytes
# What 4 bits save of a model's weights: bits per weight as bitsandbytes packs them here, times the model's shape.

PACKED_EDGE = 1024                                  # of the matrix that is packed: its shape changes nothing but the last block
SIXTEEN_BIT_BYTES = 2


def four_bit_bytes(context: Context, *, model: str, double: bool = False, kind: str = "nf4") -> Measured:
    """Return how many times fewer bytes the model takes than with all weights in 16 bits.

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
    """Return the bytes per weight of a packed matrix with its scales, counted on a real matrix."""
    linear = torch.nn.Linear(PACKED_EDGE, PACKED_EDGE, bias=False)
    return QuantisedLinear(linear, [PACKED_EDGE], kind, double).memory_bytes / PACKED_EDGE**2


def weight_bytes(model: ModelFacts, packed_bytes: float) -> tuple[float, float]:
    """Return the bytes with all weights in 16 bits, and with the blocks' matrices packed."""
    others = SIXTEEN_BIT_BYTES * (model.parameters - model.matmul_parameters)
    return float(SIXTEEN_BIT_BYTES * model.parameters), others + packed_bytes * model.matmul_parameters
