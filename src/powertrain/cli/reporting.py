"""`powertrain report`."""

from __future__ import annotations

from pathlib import Path


def report(target: Path, *, output: Path | None, as_json: bool) -> None:
    raise NotImplementedError
