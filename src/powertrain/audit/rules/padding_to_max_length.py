"""Every example padded to the longest that is allowed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.reckoning import at_most
from powertrain.audit.resolved import number
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

WORTH = 0.02                 # of the slots


class PaddingToMaxLength(Rule):
    name = "padding_to_max_length"
    rests_on = "technique: packing; features: F10 (a collator pads to the longest of the batch unless it is told otherwise)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.value("data.padding") != "max_length" or subject.on("training.packing"):
            return
        longest, data = number(subject, "training.max_length"), where.data
        share = 1 - data.block / longest if data and longest and data.kind != "blocks" and data.block < longest else None
        if (data is not None and data.kind == "blocks") or (share is not None and share < WORTH):
            return                           # all have that length anyway
        here = f": here {share:.0%} of the slots, for examples of {data.block} tokens on average" if share and data else ""
        yield cls.found("moderate", "every example is padded to max_length", "A slot of padding costs as much as a token and "
                        "teaches nothing" + here, subject.settings["data.padding"], subject.settings.get("training.max_length"),
                        expected=at_most(share, "the share of padding") if share else UNMEASURED,
                        cure=Cure("Let the collator pad to the longest of each batch, or pack",
                                  set_to(subject, "data.padding", True) if _sees_a_batch(subject) else (),
                                  ("techniques.packing=on",)))


def _sees_a_batch(subject: Subject) -> bool:
    """Whether what pads has a batch before it; rows that are tokenised by themselves have no longest one."""
    script, line = subject.script, subject.settings["data.padding"].place.line
    if script is None:
        return True
    collating = {script.words(keyword.value) for call in ast.walk(script.tree) if isinstance(call, ast.Call)
                 for keyword in call.keywords if keyword.arg in ("collate_fn", "data_collator")}
    return any(node.lineno <= line <= (node.end_lineno or line) for name, node in script.functions.items() if name in collating)
