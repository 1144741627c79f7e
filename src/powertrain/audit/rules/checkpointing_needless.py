"""Activations computed twice although there is memory to keep them."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import added, set_to
from powertrain.audit.reckoning import GIB, at_most, reckonable, recomputed_share, room
from powertrain.audit.resolved import is_on, is_unread, seen
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

KEY = "training.activation_checkpointing"
BESIDE = ("training.per_device_train_batch_size", "training.max_length", "training.learning_rate", "training.output_dir")


class CheckpointingNeedless(Rule):
    name = "checkpointing_needless"
    rests_on = "technique: activation_checkpointing; features: X4"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        facts, found = reckonable(where), room(subject, where)
        if facts is None or found is None or is_unread(subject, KEY) or not is_on(subject, KEY):
            return
        needed, there = found
        if needed > there:
            return
        edits = set_to(subject, KEY, False)
        if not edits and KEY not in subject.settings:
            edits = added(subject, BESIDE, "gradient_checkpointing", False)
        yield cls.found("moderate", "activations are computed twice without need", "Kept, they and all else take about "
                        f"{needed / GIB:.2f} GiB, and {there / GIB:.1f} may be counted on here: each block's forward pass "
                        "runs a second time for nothing", seen(subject, KEY),
                        expected=at_most(recomputed_share(facts), "the products that are computed a second time"),
                        risk=Risk("low", "none", "low"),
                        cure=Cure("Turn activation checkpointing off", edits, ("techniques.activation_checkpointing=off",)))
