"""An effective batch that is not what the comment beside it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from powertrain.audit.resolved import examples_per_step
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Setting, Subject
from powertrain.records.findings import Cure, Evidence, Finding, Place

KEYS = ("training.gradient_accumulation_steps", "training.per_device_train_batch_size")
SAID = re.compile(r"effective batch(?: size)?\D*?(?P<sum>[\d\s=x*×·]+)", re.IGNORECASE)      # noqa: RUF001 - as people write it
NEAR = 2                     # lines around the setting in which a comment is about it


class BatchArithmetic(Rule):
    name = "batch_arithmetic"
    rests_on = "features: F12 (3 x 3 does not keep 8), X7"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        batch = examples_per_step(subject)
        settings = [subject.settings[key] for key in KEYS if key in subject.settings]
        if batch is None or not settings:
            return
        said = next((found for setting in settings for found in _said(subject, setting)), None)
        if said is not None and said[0] != batch:
            yield cls.found("moderate", "the effective batch is another than the comment says", "Examples per pass times "
                            f"accumulation give {batch} a step, and the comment says {said[0]}: losses and learning rates "
                            f"tuned for {said[0]} do not carry over", said[1], *settings, expected=NO_SPEED,
                            cure=Cure(f"Choose two factors of {said[0]}, or correct the comment",
                                      (), (f"train_batch_size={said[0]}",)))


def _said(subject: Subject, setting: Setting) -> Iterator[tuple[int, Evidence]]:
    """The effective batch that comments near a setting speak of."""
    lines = _text(subject, setting).splitlines()
    for index in range(max(0, setting.place.line - 1 - NEAR), min(len(lines), setting.place.line + NEAR)):
        comment = lines[index].partition("#")[2]
        found = SAID.search(comment)
        numbers = re.findall(r"\d+", found["sum"]) if found else []
        if numbers:
            yield int(numbers[-1]), Evidence(f"# {comment.strip()}", Place(setting.place.file, index + 1))


def _text(subject: Subject, setting: Setting) -> str:
    if not setting.place.line:
        return ""
    if subject.script is not None:
        return subject.script.text
    try:
        return Path(setting.place.file).read_text(encoding="utf-8")
    except OSError:
        return ""
