"""Techniques that the recipe pins against what the plan would do, and those that it asks for and that cannot be."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain import planner
from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records import Proposal
from powertrain.records.findings import Expected, Finding

AGAINST = "pinned by the recipe; the plan would leave it off: "


class Pins(Check):
    name = "pins"
    rests_on = "technique: each one's own answer"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        prepared = where.prepared
        for reason in where.refused_pins:
            yield cls.says("critical", "a technique is pinned on that cannot be here", reason, seen=reason.partition(" ")[0],
                           cure="take the pin out; `powertrain train` refuses it")
        for step in prepared.plan.steps:
            if AGAINST in step.because:
                yield cls.says("moderate", f"{step.technique.name} is pinned on, and the plan would leave it off",
                               step.because.partition(AGAINST)[2], seen=f"techniques.{step.technique.name}="
                               f"{prepared.recipe.techniques[step.technique.name]}", cure="leave it to the plan",
                               words=(f"techniques.{step.technique.name}=off",))
        for name, pin in prepared.recipe.techniques.items():
            if pin == "off" and isinstance(answer := planner.ask_anew(name, prepared.facts, prepared.recipe), Proposal):
                fast, slow = answer.claim.step_time
                # a step that takes 0.8 to 0.9 of the time is 1.1 to 1.25 times as fast
                expected = Expected(f"{1 / slow:.2f} to {1 / fast:.2f} times as fast", answer.claim.basis, (1 / slow, 1 / fast))
                yield cls.says("moderate" if slow < 1 else "low", f"{name} is pinned off, and the plan would turn it on",
                               answer.because, seen=f"techniques.{name}=off", cure="leave it to the plan",
                               words=(f"techniques.{name}=on",), expected=expected)
