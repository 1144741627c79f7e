"""What the commands share: the cache folder, this process's memory, progress lines, and times such as 10m."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from powertrain.records import WrongUse

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def cache_folder() -> Path:
    """Return the folder of token stores and measurements: POWERTRAIN_CACHE, or the user's cache folder."""
    named = os.environ.get("POWERTRAIN_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powertrain"


def resident_bytes() -> int:
    """Return this process's memory now; on a GPU the memory that torch has allocated there."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated())
    import psutil

    return int(psutil.Process().memory_info().rss)


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    print(f"... {text}", file=sys.stderr, flush=True)


def budget_s(text: str) -> float:
    """Return the seconds of "90s", "10m" or "1h"; a bare number is seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(s|m|h|)", text.strip())
    if not found or not float(found[1]):
        raise WrongUse(f"--budget={text} is not a time; use for example 90s, 10m or 1h")
    return float(found[1]) * UNITS[found[2]]
