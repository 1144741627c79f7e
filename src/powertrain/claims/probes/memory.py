"""Probes of memory: the peak of a step and the step that reaches it, 4-bit weights, and a rule of thumb."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from powertrain.claims.probes import probe
from powertrain.claims.probes.probe import Context, Measured, Training
from powertrain.evidence.clock import CannotRun
from powertrain.facts.model import model_facts
from powertrain.models.config import make_config
from powertrain.models.kernels.quantised import QuantisedLinear
from powertrain.recipe import resolve_words
from powertrain.records import ModelFacts
from powertrain.records.evidence import Arm
from powertrain.records.phases import nobody
from powertrain.run.prepare import prepare
from powertrain.shapes import DTYPE_BYTES, FP32
from powertrain.training.memory import MemoryLedger, standing_bytes

SHAPES: Mapping[str, Mapping[str, Any]] = {  # of the source documents' models, from their published config.json
    "llama-3.1-8b": {"vocabulary": 128256, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336,
                     "context": 131072, "tied_head": False},
    "phi-3-mini": {"vocabulary": 32064, "layers": 32, "width": 3072, "heads": 32, "kv_heads": 32, "mlp_width": 8192,
                   "context": 4096, "tied_head": False},
}
CLOSE = 0.02                                 # of a peak to the highest peak, as a share of that
PACKED_EDGE = 1024                           # of the matrix that is packed: its shape changes nothing but the last block


def known_facts(name: str) -> ModelFacts:
    """Return the facts of a model of SHAPES; all are Llamas in shape. Raises WrongUse for another name."""
    config, _ = make_config("llama", **SHAPES[probe.one_of("model", name, tuple(SHAPES))])
    return model_facts(config)


def memory_trace(context: Context, *, words: Sequence[str], steps: int = 8) -> Measured:
    """Return the first step whose peak is within 2 % of the highest of all. Detail: the peaks."""
    training = probe.open_training(words, context.cache, warm_up=0)
    peaks = [step_peak(training)[1] for _ in range(steps)]
    return Measured(probe.exactly(float(stands_from(peaks))), "steps", "the first step", f"step {steps}", {"peak_bytes": peaks})


def stands_from(peaks: Sequence[int]) -> int:
    """Return the first step, from 1, whose peak is close to the highest."""
    return next(step for step, peak in enumerate(peaks, 1) if peak >= max(peaks) * (1 - CLOSE))


def step_peak(training: Training) -> tuple[int, int]:
    """Return the bytes that one more step takes besides weights and optimizer, and the bytes with both."""
    standing = standing_bytes(training.setup.model, training.state.optimizer)
    with MemoryLedger(training.setup.device, standing=0) as ledger:
        training.advance(1)
    return ledger.peak_bytes, standing + ledger.peak_bytes


def step_memory(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Measured:
    """Return the peak memory of a step of arm b over that of arm a.

    Detail: `activation_ratio`, the same without weights and optimizer states, so of activations and the adapters' few
    gradients; `adapter_ratio`, of the adapters' weights; and `adapter_share`, the adapters with their gradients and moments
    over arm a's peak.
    """
    one, other = (probe.apart(step_bytes, [*words, *arm], context.cache) for arm in (a, b))
    adapters, names = one["adapters"], (probe.arm_name(a), probe.arm_name(b))
    detail = {"bytes": dict(zip(names, (one, other), strict=True)),
              "activation_ratio": other["activations"] / one["activations"],
              "adapter_ratio": other["adapters"] / adapters if adapters else None,
              "adapter_share": 4 * adapters / one["peak"]}           # weight, gradient and two moments
    return Measured(probe.exactly(other["peak"] / one["peak"]), "times the memory", *names, detail)


def step_bytes(words: Sequence[str], cache: Path) -> dict[str, int]:
    """Return the peak bytes of a step, those besides weights and optimizer states, and those of the adapters' weights."""
    training = probe.open_training(words, cache)
    activations, peak = step_peak(training)
    return {"peak": peak, "activations": activations, "adapters": FP32 * training.prepared.facts.model.adapter_parameters}


def memory_rule(context: Context, *, words: Sequence[str]) -> Measured:
    """Return the error of a rule of thumb in % of the allocated peak of a step: model x precision + batch x sequence x hidden.

    Detail: Powertrain's own prediction too.
    """
    prepared = prepare(resolve_words(words), context.cache, nobody)
    model, data = prepared.facts.model, prepared.facts.data
    found = context.arena.probe(Arm("memory rule", tuple(words)))
    peak = found.allocated_bytes
    if peak is None:
        raise CannotRun(f"the memory of a step could not be counted: {found.error or 'no ledger'}")
    rule = model.parameters * DTYPE_BYTES[model.frozen_dtype] + data.train_batch_size * data.block * model.width
    ours = prepared.plan.estimate.total_memory_bytes if prepared.plan.estimate else None
    error, our_error = (None if said is None else 100 * abs(said - peak) / peak for said in (rule, ours))
    return Measured(probe.exactly(error or 0.0), "% off", "the rule", "the allocated peak", {
        "rule_bytes": rule, "measured_bytes": peak, "powertrain_bytes": ours, "powertrain_error": our_error})


def four_bit_bytes(context: Context, *, model: str) -> Measured:
    """Return how many times fewer bytes the model takes in 4 bits (NF4) than with all weights in 16 bits.

    Bits per weight are counted on a matrix that bitsandbytes packs here, with its scales in fp32. Embedding, norms and head
    stay in 16 bits, as transformers leaves them. Detail: `saved_share` of the whole model, and of the packed matrices alone.
    Raises WrongUse without bitsandbytes.
    """
    del context
    linear, facts, sixteen_bits = torch.nn.Linear(PACKED_EDGE, PACKED_EDGE, bias=False), known_facts(model), DTYPE_BYTES["bf16"]
    packed_bytes = QuantisedLinear(linear, [PACKED_EDGE], "nf4", False).memory_bytes / PACKED_EDGE**2
    before = sixteen_bits * facts.parameters
    after = before - (sixteen_bits - packed_bytes) * facts.matmul_parameters
    return Measured(probe.exactly(before / after), "times fewer bytes", "16 bits", "nf4 with its scales in fp32",
                    {"bytes": {"16 bits": before, "nf4": after}, "bits_per_weight": 8 * packed_bytes,
                     "saved_share": 1 - after / before, "saved_share_of_matrices": 1 - packed_bytes / sixteen_bits})
