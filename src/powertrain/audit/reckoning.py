"""What audit rules reckon with: bounds by Amdahl's law, what fits the memory, and the shares that cost/ gives."""

from __future__ import annotations

from dataclasses import replace

from powertrain.audit.subject import Circumstances, Subject
from powertrain.cost.fitting import own_bytes, planned_room_bytes, total_bytes
from powertrain.cost.work import forward_flops, recomputed_flops, training_flops
from powertrain.cost.workload import Workload
from powertrain.records import Facts
from powertrain.records.findings import Expected

GIB = 2**30


def at_most(share: float, of_what: str) -> Expected:
    """Return Amdahl's bound of removing a share of the step."""
    times = 1 / (1 - share)
    return Expected(f"at most {times:.2f} times as fast", f"formula: Amdahl, 1 / (1 - {share:.3f}); {of_what}", (1.0, times))


def reckonable(where: Circumstances) -> Facts | None:
    """Return the facts, where memory and work of the subject's model can be reckoned."""
    facts = where.facts
    return facts if facts is not None and facts.model.provider == "native" and facts.model.shapes else None


def as_trained(subject: Subject, facts: Facts) -> Workload:
    """Return one step as the subject takes it: padded passes of its micro-batch, attention without saved scores, all logits."""
    micro = subject.examples_per_pass or 1
    examples = subject.examples_per_step or max(micro, facts.data.train_batch_size)
    return Workload(examples, facts.data.block, micro_batch=micro, dtype=subject.products_dtype or "fp32",
                    attention_saves_scores=False, kernel="sdpa", lengths=facts.data.length_quantiles,
                    device=facts.hardware.device, threads=facts.hardware.cores)


def room(subject: Subject, where: Circumstances, *, four_bits: bool = True) -> tuple[int, int] | None:
    """Return (bytes that a step of the subject needs if it keeps all activations, bytes that are free); None if not known.

    Without `four_bits` the frozen weights are taken as bf16.
    """
    facts = reckonable(where)
    if facts is None:
        return None
    model = facts.model if four_bits else replace(facts.model, method="lora", frozen_dtype="bf16", unquantised_dtype="")
    return total_bytes(model, as_trained(subject, facts)) + own_bytes(facts.hardware.device), planned_room_bytes(facts.hardware)


def recomputed_share(facts: Facts) -> float:
    """Return the share of a step's products that checkpointing every block computes a second time."""
    lengths = [facts.data.block]
    again = recomputed_flops(facts.model, lengths, 1)
    return again / (training_flops(facts.model, lengths) + again)


def evaluation_share(facts: Facts, step_tokens: float, every: float) -> float:
    """Return the share of the run's products that go into reading the held-out tokens once each `every` steps."""
    block = facts.data.block
    reading = forward_flops(facts.model, [block]) * facts.data.validation_tokens / block
    return reading / (reading + every * training_flops(facts.model, [block]) * step_tokens / block)


def tokens_per_step(subject: Subject, facts: Facts) -> float | None:
    """Return the tokens of an optimizer step; packed, an example of the batch is a row of max_length tokens."""
    examples, longest = subject.examples_per_step, subject.number("training.max_length")
    if examples is None:
        return None
    return examples * (longest if longest and subject.is_on("training.packing") else facts.data.block)
