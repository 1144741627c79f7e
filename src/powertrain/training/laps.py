"""Where the time of a step goes: data, copy, forward, backward, optimizer. The parts of a step sum to its time.

On a CPU a lap is the host's time. A GPU works behind the host, so there a lap is the time between two events on the
device's own stream: `data` is what the device waited for, not what the host took. Nothing in here makes the host wait;
whoever reads the laps of a GPU does so after it has waited for the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

PARTS = ("data", "copy", "forward", "backward", "optimizer")
Lap = Callable[[str], None]                  # the time since the last lap belongs to this part


class Laps:
    """The stopwatch of one step."""

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def lap(self, part: str) -> None:
        self._marks.append((part, self._now()))

    def parts(self) -> Mapping[str, float]:
        """Return the seconds of each part. Raises RuntimeError on a GPU that has not come to the last lap yet."""
        found = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            found[part] += before.elapsed_time(after) / 1e3 if self._device.type == "cuda" else after - before
        return found

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def no_lap(part: str) -> None:
    """Measure nothing."""
