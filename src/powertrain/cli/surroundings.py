"""What the command line takes from its surroundings: environment variables, and the process's own memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Token stores and measurements: POWERTRAIN_CACHE, else the user's cache folder."""
    named = os.environ.get("POWERTRAIN_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powertrain"


def resident_bytes() -> int:
    """Memory of this process now; on a GPU what torch has allocated there."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated())
    import psutil

    return int(psutil.Process().memory_info().rss)


def say(text: str) -> None:
    """Progress before a run, on stderr."""
    print(f"... {text}", file=sys.stderr, flush=True)
