"""Label smoothing in a trainer whose loss never makes all logits."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import removed
from powertrain.audit.reckoning import at_most
from powertrain.audit.resolved import number
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

KEY = "training.label_smoothing_factor"
FORWARD = 1 / 4              # of a step that has one forward pass more: forward, forward, and backward for two


class LabelSmoothingCost(Rule):
    name = "label_smoothing_cost"
    rests_on = "technique: chunked_cross_entropy; documentation: SFTTrainer (TRL 1.16: an extra forward pass in each step)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.framework == "trl" and number(subject, KEY):
            yield cls.found("moderate", "label smoothing with SFTTrainer", "It needs all logits, which TRL's loss never "
                            "makes: each step runs another forward pass for it, and holds tokens x vocabulary numbers",
                            subject.settings[KEY],
                            expected=at_most(FORWARD, "one forward pass of two beside a backward pass of two forward ones"),
                            risk=Risk("low", "low", "low"), cure=Cure("Leave it out", removed(subject, KEY)))
