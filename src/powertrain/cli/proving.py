"""`powertrain ablate` and `powertrain tune`."""

from __future__ import annotations

from collections.abc import Sequence


def ablate(words: Sequence[str], *, techniques: Sequence[str], budget: str, study: str | None, as_json: bool) -> None:
    raise NotImplementedError


def tune(words: Sequence[str], *, budget: str, study: str | None, as_json: bool) -> None:
    raise NotImplementedError
