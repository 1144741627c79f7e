"""Activation checkpointing in the form that torch advises against."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import TRAINERS, is_on, is_unread
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

ON = "training.activation_checkpointing"
KWARGS = "training.activation_checkpointing_kwargs"
UNSET_MEANS_REENTRANT_BEFORE = (5,)          # transformers


class CheckpointingReentrant(Rule):
    name = "checkpointing_reentrant"
    rests_on = "documentation: torch.utils.checkpoint (use_reentrant=False is recommended)"
    gives_way_to = frozenset({"checkpointing_needless"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.framework not in TRAINERS or is_unread(subject, KWARGS):
            return
        if not is_on(subject, ON):
            return
        given, version = subject.value(KWARGS), where.version("transformers")
        unset = not isinstance(given, dict) or "use_reentrant" not in given
        if isinstance(given, dict) and given.get("use_reentrant") is True:
            key, says = KWARGS, "use_reentrant=True is asked for"
        elif unset and version is not None and version < UNSET_MEANS_REENTRANT_BEFORE and subject.framework == "transformers":
            key, says = ON, f"use_reentrant is not set, and transformers {version[0]} takes True"
        else:
            return
        yield cls.found("low", "reentrant checkpointing", f"{says}: it computes a whole block again where the other form "
                        "stops at the last tensor that is needed, gives adapters no gradient unless the inputs are made to "
                        "require one, and breaks torch.compile", subject.settings[key], expected=UNMEASURED,
                        cure=Cure('Set gradient_checkpointing_kwargs={"use_reentrant": False}'))
