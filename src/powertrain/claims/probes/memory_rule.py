"""A rule of thumb for the memory of training, "model size x precision + batch x sequence x hidden", against the real peak."""

from __future__ import annotations

from collections.abc import Sequence

from powertrain.claims.probes.probe import Context, Measured, exactly
from powertrain.claims.probes.training import quiet
from powertrain.evidence.clock import CannotRun
from powertrain.recipe import resolve_words
from powertrain.records.evidence import Arm
from powertrain.run.prepare import prepare
from powertrain.shapes import DTYPE_BYTES


def measure(context: Context, *, words: Sequence[str]) -> Measured:
    """By how much the rule is off, in % of the allocated peak of a step. Detail: this program's own prediction, too."""
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
