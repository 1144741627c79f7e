"""A time that a user allows, such as 10m."""

from __future__ import annotations

import re

from powertrain.records import WrongUse

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def budget_s(text: str) -> float:
    """Seconds of "90s", "10m" or "1h"; a bare number is seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(s|m|h|)", text.strip())
    if not found or not float(found[1]):
        raise WrongUse(f"--budget={text} is no time; write it as 90s, 10m or 1h")
    return float(found[1]) * UNITS[found[2]]
