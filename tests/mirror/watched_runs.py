"""What a test sees of a run with a mirror: its bytes, its events, and the processes that upload it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from powertrain.records.event_log import read_all_events

Started = Callable[..., tuple[int, str, str]]


def weights(run: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted((run / "model").glob("*.safetensors")))


def happened(run: Path, kind: type[Any]) -> list[Any]:
    return [event for event in read_all_events(run / "events.jsonl") if isinstance(event, kind)]


def uploaders(run: Path) -> list[psutil.Process]:
    """The processes that upload this run."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if "powertrain.mirror.process" not in line or (Path(process.cwd()) / line[-2]).resolve() != run.resolve():
                continue
        except psutil.Error:
            continue
        if process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def until(condition: Callable[[], object], within_s: float = 120.0) -> None:
    ends_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.02)
