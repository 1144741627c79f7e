"""The row that says what the time of a run's steps went into."""

from __future__ import annotations

from collections.abc import Sequence

from powertrain.records import timeline
from powertrain.records.events import Event

BETWEEN = ("evaluation", "samples", "checkpoint", timeline.OTHER)        # parts that lie between the steps


def step_time_row(events: Sequence[Event]) -> tuple[str, str]:
    """Shares of the steps' time, by part, from the run's events."""
    parts = {name: seconds for name, seconds in timeline.read(events).parts.items() if name not in BETWEEN}
    total_s = sum(parts.values())
    if not total_s:
        return "Step time", "no step was recorded"
    if timeline.NOT_SPLIT in parts:
        return "Step time", "its parts were not recorded: the run is of an older version"
    return "Step time", ", ".join(f"{name} {seconds / total_s:.1%}" for name, seconds in parts.items())
