"""Optimizers that the trainer no longer has."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

REMOVED = ("adamw_hf", "adamw_apex_fused")
SINCE = (5,)                                 # transformers


class OptimizerRemoved(Rule):
    name = "optimizer_removed"
    rests_on = "documentation: OptimizerNames (transformers 5.23)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        version = where.version("transformers")
        if subject.value("training.optim") in REMOVED and (version is None or version >= SINCE):
            asked = subject.settings["training.optim"]
            yield cls.found("critical", "an optimizer that no longer exists", f"transformers 5 knows no {asked.value!r} and "
                            "raises",
                            asked, expected=Expected("the run starts", "none"),
                            cure=Cure("Use adamw_torch_fused", set_to(subject, "training.optim", "adamw_torch_fused"),
                                      ("techniques.fused_adamw=on",)))
