"""Keys that the trainer does not have: they do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import TRAINERS
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.rules.offload_that_is_none import KEY as OFFLOAD
from powertrain.audit.rules.removed_names import REMOVED
from powertrain.audit.subject import Subject
from powertrain.records.findings import Expected, Finding

STRICT = (*TRAINERS, "powertrain")               # they raise


class UnknownKeys(Rule):
    name = "unknown_keys"
    rests_on = "features: section 5, weakness 1 (a knob that is accepted and ignored)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        said_elsewhere = {OFFLOAD, *(REMOVED if subject.framework in TRAINERS else ())}
        found = {key: setting for key, setting in subject.unknown.items() if key.rpartition(".")[2] not in said_elsewhere
                 and not (setting.value is None and subject.script is None and subject.framework not in STRICT)}
        if not found:
            return
        raises = subject.framework in STRICT
        does = "the trainer raises on an argument that it does not know" if raises else \
            "read by nothing, so the run is another than the file says"
        yield cls.found("critical" if raises else "moderate", "keys that the trainer does not have",
                        f"{', '.join(key.removeprefix('training.') for key in found)}: {does}", *found.values(),
                        expected=Expected("what was meant, once it is spelled as the trainer knows it", "none"),
                        cure="Take them out, or use the trainer's own name for what is meant")
