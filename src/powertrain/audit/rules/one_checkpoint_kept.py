"""A single checkpoint kept."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

KEY = "training.save_total_limit"


class OneCheckpointKept(Rule):
    name = "one_checkpoint_kept"
    rests_on = "fact: a checkpoint that was being written when the machine stopped cannot be resumed from"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.value(KEY) == 1 and not subject.on("training.save_only_model"):
            best = ", unless the best one is another" if subject.on("training.load_best_model_at_end") else ""
            yield cls.found("low", "only the newest checkpoint is kept", "If that one is damaged there is none to go back "
                            f"to{best}. It saves disk, and no time", subject.settings[KEY], expected=NO_SPEED,
                            cure=Cure("Keep two", set_to(subject, KEY, 2), ("save_total_limit=2",)))
