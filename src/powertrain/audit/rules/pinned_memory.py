"""Memory pinned for a GPU that is not there, or not pinned for one that is."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import removed, set_to
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

KEYS = ("training.dataloader_pin_memory", "loader.pin_memory")


class PinnedMemory(Rule):
    name = "pinned_memory"
    rests_on = "technique: loader; features: X8 (it helps copies to a CUDA device, and is Trainer's default)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        device = where.hardware.device if where.hardware else None
        for key in KEYS:
            asked = subject.settings.get(key)
            if asked is None or device is None:
                continue
            if asked.value is True and device != "cuda":
                yield cls.found("low", "pinned memory without a CUDA device", f"It speeds up copies to a GPU; on {device} "
                                "torch warns and pins nothing", asked, expected=Expected("none", "none"),
                                cure=Cure("Leave it out", removed(subject, key)))
            elif asked.value is False and device == "cuda":
                yield cls.found("low", "batches are not pinned", "Copies from pageable memory cannot overlap with computing; "
                                "a batch of token ids is small, so it is little", asked, expected=UNMEASURED,
                                cure=Cure("Pin them", set_to(subject, key, True), ("techniques.loader=on",)))
