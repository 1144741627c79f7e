"""remove_unused_columns=False for the sake of speed."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import removed
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

KEY = "training.remove_unused_columns"


class ColumnsKept(Rule):
    name = "columns_kept"
    rests_on = "features: F13 (it has nothing to do with speed)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.value(KEY) is False:
            yield cls.found("low", "unused columns are kept", "Columns that the model does not read are carried to the "
                            "collator, which may stumble over them; leaving them out happens once, before training",
                            subject.settings[KEY],
                            expected=Expected("no effect that could be measured (claim 000-06)",
                                              "study: 2026-11-21_claims-2"),
                            cure=Cure("Leave it out, unless a collator of your own needs the columns", removed(subject, KEY)))
