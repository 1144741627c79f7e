"""Examples grouped by length where that saves no padding."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import removed
from powertrain.audit.resolved import examples_per_pass, is_on, value
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding, Risk

KEY = "training.train_sampling_strategy"


class LengthGroupingWithoutEffect(Rule):
    name = "length_grouping_without_effect"
    rests_on = "technique: length_grouping; features: X1"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.value(KEY) != "group_by_length":
            return
        data = where.data
        reason, because = next(((reason, key) for holds, reason, key in (
            (is_on(subject, "training.packing"), "packed examples have no padding", "training.packing"),
            (value(subject, "data.padding") == "max_length", "all are padded to max_length", "data.padding"),
            (examples_per_pass(subject) == 1, "a pass has one example, so none is padded",
             "training.per_device_train_batch_size"),
            (data is not None and data.kind == "blocks", "all examples have one length", ""),
        ) if holds), ("", ""))
        if reason:
            yield cls.found("low", "grouping by length changes nothing", "It saves padding where examples of a batch differ; "
                            f"here {reason}. What is left is the scan of all lengths, and an order that is less random",
                            subject.settings[KEY], subject.settings.get(because),
                            expected=Expected("as fast, and a random order", "none"), risk=Risk(),
                            cure=Cure("Leave it out", removed(subject, KEY), ("techniques.length_grouping=off",)))
