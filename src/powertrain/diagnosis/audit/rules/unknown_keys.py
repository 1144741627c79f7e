"""Keys that the trainer does not have: they do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.audit.rules.base import Circumstances, Rule
from powertrain.diagnosis.audit.rules.offload_that_is_none import KEY as OFFLOAD
from powertrain.diagnosis.audit.rules.removed_names import REMOVED
from powertrain.diagnosis.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

STRICT = ("trl", "transformers", "powertrain")               # they raise


class UnknownKeys(Rule):
    name = "unknown_keys"
    rests_on = "features: section 5, weakness 1 (a knob that is accepted and ignored)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        found = {key: setting for key, setting in subject.unknown.items()
                 if key.rpartition(".")[2] != OFFLOAD and (key.rpartition(".")[2] not in REMOVED or subject.script is None)}
        if not found:
            return
        names = ", ".join(key.removeprefix("training.") for key in found)
        raises = subject.framework in STRICT
        yield cls.found("critical" if raises else "moderate", "keys that the trainer does not have", f"{names}: " + (
            "the trainer raises on an argument that it does not know" if raises else "read by nothing, so the run is another "
            "than the file says"), *found.values(), expected=Expected("what was meant, once it is spelled as the trainer "
                                                                      "knows it",
                                                             "none"),
            cure=Cure("Take them out, or use the trainer's own name for what is meant"))
