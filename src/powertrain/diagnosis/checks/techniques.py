"""Checks of the techniques: pins against the plan, parts that are not installed, and models that another library computes."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain import planner
from powertrain.diagnosis.situation import Situation
from powertrain.diagnosis.wording import told
from powertrain.records import Proposal
from powertrain.records.findings import Finding, rule
from powertrain.records.plan import Why


@rule("technique: each one's own answer")
def pins(where: Situation) -> Iterator[Finding]:
    """The recipe pins a technique against the plan's own choice, or pins one that cannot run here."""
    prepared = where.prepared
    for error in where.refused_pins:
        yield told("pins.impossible", error.keys[0], name=error.technique, because=str(error))
    for step in prepared.plan.steps:
        if step.against is not None:
            name = step.technique.name
            yield told("pins.on", name=name, because=step.against.because, pin=prepared.recipe.techniques[name])
    for name, pin in prepared.recipe.techniques.items():
        if pin == "off" and isinstance(answer := planner.ask_anew(name, prepared.facts, prepared.recipe), Proposal):
            fast, slow = answer.claim.step_time
            # a step that takes 0.8 to 0.9 of the time is 1.1 to 1.25 times as fast
            yield told("pins.off", severity="moderate" if slow < 1 else "low", speed=(1 / slow, 1 / fast), name=name,
                       because=answer.because, low=1 / slow, high=1 / fast, claim_basis=answer.claim.basis)


@rule("fact: the installed software")
def software(where: Situation) -> Iterator[Finding]:
    """A technique is off because a part that it needs is not installed."""
    missing = where.prepared.facts.software.missing
    for refusal in where.prepared.plan.refused:
        if refusal.why is Why.PART_MISSING:
            yield told("software.missing", name=refusal.technique, part=refusal.part, because=refusal.because,
                       found=missing.get(refusal.part, "missing"))


@rule("fact: the model's config.json")
def provider(where: Situation) -> Iterator[Finding]:
    """Another library computes the model, so most techniques cannot act on it."""
    prepared = where.prepared
    if prepared.facts.model.provider == "native":
        return
    idle = [refusal.technique for refusal in prepared.plan.refused if refusal.why is Why.OTHER_PROVIDER]
    native = prepared.material.providers.get("native", "")       # why the native decoder cannot compute it; None: it can
    yield told("provider.by_choice" if native is None else "provider.by_need",
               str(prepared.resolved.origin("model.provider")) if native is None else str(native),
               provider=prepared.facts.model.provider, idle=len(idle), techniques=", ".join(idle))
