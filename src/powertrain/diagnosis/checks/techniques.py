"""Checks of the techniques: pins against the plan, parts that are not installed, and models that another library computes."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain import planner
from powertrain.diagnosis.situation import Situation
from powertrain.records import Proposal
from powertrain.records.findings import Expected, Finding, finding, rule
from powertrain.records.plan import Why


@rule("technique: each one's own answer")
def pins(where: Situation) -> Iterator[Finding]:
    """The recipe pins a technique against the plan's own choice, or pins one that cannot run here."""
    prepared = where.prepared
    for error in where.refused_pins:
        yield finding("critical", "a technique is pinned on that cannot run here", str(error), error.keys[0],
                      cure="remove the pin; `powertrain train` refuses this recipe", words=error.cure)
    for step in prepared.plan.steps:
        if step.against is not None:
            yield finding("moderate", f"{step.technique.name} is pinned on, and the plan would leave it off",
                          step.against.because, f"techniques.{step.technique.name}="
                          f"{prepared.recipe.techniques[step.technique.name]}", cure="remove the pin",
                          words=(f"techniques.{step.technique.name}=off",))
    for name, pin in prepared.recipe.techniques.items():
        if pin == "off" and isinstance(answer := planner.ask_anew(name, prepared.facts, prepared.recipe), Proposal):
            fast, slow = answer.claim.step_time
            # a step that takes 0.8 to 0.9 of the time is 1.1 to 1.25 times as fast
            expected = Expected(f"{1 / slow:.2f} to {1 / fast:.2f} times as fast", answer.claim.basis, (1 / slow, 1 / fast))
            yield finding("moderate" if slow < 1 else "low", f"{name} is pinned off, and the plan would turn it on",
                          answer.because, f"techniques.{name}=off", cure="remove the pin", words=(f"techniques.{name}=on",),
                          expected=expected)


@rule("fact: the installed software")
def software(where: Situation) -> Iterator[Finding]:
    """A technique is off because a part that it needs is not installed."""
    missing = where.prepared.facts.software.missing
    for refusal in where.prepared.plan.refused:
        if refusal.why is Why.PART_MISSING:
            yield finding("low", f"{refusal.technique} is off because {refusal.part} is missing", refusal.because,
                          f"{refusal.part}: {missing.get(refusal.part, 'missing')}", cure=f"install {refusal.part}",
                          expected=Expected(f"the plan considers {refusal.technique} again", "none"))


@rule("fact: the model's config.json")
def provider(where: Situation) -> Iterator[Finding]:
    """Another library computes the model, so most techniques cannot act on it."""
    prepared = where.prepared
    if prepared.facts.model.provider == "native":
        return
    idle = [refusal.technique for refusal in prepared.plan.refused if refusal.why is Why.OTHER_PROVIDER]
    native = prepared.material.providers.get("native", "")       # why the native decoder cannot compute it; None: it can
    yield finding("moderate" if native is None else "low", f"{prepared.facts.model.provider} computes the model",
                  f"{len(idle)} techniques act on the native decoder only: {', '.join(idle)}",
                  str(prepared.resolved.origin("model.provider")) if native is None else str(native),
                  cure="let the native decoder compute the model" if native is None else
                       "no change: the native decoder cannot express this model",
                  words=("model.provider=native",) if native is None else ())
