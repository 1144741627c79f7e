"""What a kind of study has to say, before the circumstances are added to it."""

from __future__ import annotations

from dataclasses import dataclass

from powertrain.report.page import Number, Section


@dataclass(frozen=True)
class Findings:
    verdict: str                             # one sentence
    tone: str                                # "good", "bad" or "open"
    numbers: tuple[Number, ...]
    cautions: tuple[str, ...]
    sections: tuple[Section, ...]
