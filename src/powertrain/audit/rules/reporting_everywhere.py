"""Every tracker that happens to be installed."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

KEY = "training.report_to"


class ReportingEverywhere(Rule):
    name = "reporting_everywhere"
    rests_on = "documentation: TrainingArguments.report_to (its default was \"all\" before transformers 5)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.value(KEY) in ("all", ["all"]):
            yield cls.found("low", "reported to whatever is installed", "Each tracker that is found is started, some of "
                            "which ask for a login or the network before the first step",
                            subject.settings[KEY], expected=UNMEASURED,
                            cure=Cure("Name the one that you look at", set_to(subject, KEY, "none")))
