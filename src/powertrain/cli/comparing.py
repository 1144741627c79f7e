"""`powertrain runs compare`."""

from __future__ import annotations

from pathlib import Path


def compare_runs(a: Path, b: Path, *, as_json: bool) -> None:
    raise NotImplementedError
