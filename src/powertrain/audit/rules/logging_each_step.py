"""A line of the log for every step."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import interval_steps, run_steps
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

SHORT_RUN = 200              # steps, below which each line is wanted


class LoggingEachStep(Rule):
    name = "logging_each_step"
    rests_on = "features: F16 (reading the loss waits for the device), X11"
    gives_way_to = frozenset({"item_each_step"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        steps = run_steps(subject, where)
        if "training.logging_steps" in subject.settings and interval_steps(subject, "logging", steps) == 1 \
                and (steps or SHORT_RUN + 1) > SHORT_RUN:
            yield cls.found("low", "the loss is read after every step", "A GPU runs ahead of Python until its loss is asked "
                            "for; asked each step, the two take turns", subject.settings["training.logging_steps"],
                            expected=Expected("on a CPU nothing that could be measured (claim 003-14)",
                                              "study: 2026-11-21_claims"),
                            cure=Cure("Log every 10 steps", set_to(subject, "training.logging_steps", 10),
                                      ("logging_steps=10",)))
