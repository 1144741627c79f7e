"""Activations computed twice because they do not fit."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.reckoning import GIB, room
from powertrain.audit.resolved import is_on, is_unread, seen
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.rules.checkpointing_needless import KEY
from powertrain.audit.subject import Subject
from powertrain.records.findings import Finding


class GoodCheckpointing(Rule):
    name = "good_checkpointing"
    rests_on = "technique: activation_checkpointing"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        found = room(subject, where)
        if found is None or is_unread(subject, KEY) or not is_on(subject, KEY):
            return
        needed, there = found
        if needed > there:
            yield cls.found("good", "checkpointing where it is needed", "Kept, activations and all else would take about "
                            f"{needed / GIB:.1f} GiB, and {there / GIB:.1f} may be counted on", seen(subject, KEY),
                            expected=NO_SPEED, cure="Keep it")
