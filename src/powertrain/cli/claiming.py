"""`powertrain claims`."""

from __future__ import annotations

from collections.abc import Sequence


def show_list(*, as_json: bool) -> None:
    raise NotImplementedError


def run(ids: Sequence[str], *, budget: str, study: str | None, as_json: bool) -> None:
    raise NotImplementedError


def report(*, as_json: bool) -> None:
    raise NotImplementedError
