"""`powertrain bench`."""

from __future__ import annotations

from collections.abc import Sequence


def bench(words: Sequence[str], *, budget: str, study: str | None, as_json: bool) -> int:
    raise NotImplementedError
