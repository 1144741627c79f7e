"""Counts and seconds as the sentences of symptoms write them, and the numbers that several symptoms share."""

from __future__ import annotations

IDLE_LOAD = 0.75             # of a machine when a session began: above it, another process was at work
LEAST_STEPS = 20             # of a run: a curve of fewer has no shape that could be judged


def several(number: int, noun: str) -> str:
    """Return "1 step" or "2 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def seconds(value: float) -> str:
    """Return seconds with their unit, milliseconds below one second."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
