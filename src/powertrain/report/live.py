"""The live line: where the run is, from its events alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from powertrain.report.figures import count, duration, memory

RECENT_STEPS = 50            # the speed shown is that of the last steps, so that a slow start does not linger


@dataclass
class Live:
    """Takes events, gives one line. `memory_bytes` asks the process for what it uses now."""

    memory_bytes: Callable[[], int]
    total_steps: int = 0
    flops_per_token: float | None = None
    peak_flops_per_s: float | None = None
    saved_step: int | None = None
    steps: list[Mapping[str, Any]] = field(default_factory=list)

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind in ("start", "resume"):
            self.total_steps = event["total_steps"]
            if event["estimate"]:
                self.flops_per_token = event["estimate"]["flops_per_token"]
                self.peak_flops_per_s = event["estimate"]["peak_flops_per_s"]
        elif kind == "step":
            self.steps = [*self.steps[-RECENT_STEPS + 1:], event]
        elif kind == "checkpoint":
            self.saved_step = event["step"]

    def line(self) -> str:
        if not self.steps:
            return "first step ..."
        last, seconds = self.steps[-1], sum(step["seconds"] for step in self.steps)
        tokens_per_s = sum(step["real_tokens"] for step in self.steps) / seconds
        left_s = (self.total_steps - last["step"]) * seconds / len(self.steps)
        recent_loss = sum(step["loss"] for step in self.steps[-10:]) / len(self.steps[-10:])
        parts = [f"step {last['step']:,}/{self.total_steps:,}", f"loss {recent_loss:.3f}", f"{count(tokens_per_s)} tokens/s"]
        if self.flops_per_token and self.peak_flops_per_s:
            parts.append(f"{tokens_per_s * self.flops_per_token / self.peak_flops_per_s:.0%} of the limit")
        parts += [memory(self.memory_bytes()), f"{duration(left_s)} left",
                  "not saved yet" if self.saved_step is None else f"saved at {self.saved_step:,}"]
        return " | ".join(parts)


class Pace:
    """Says when a plain line is due, where no terminal can redraw one."""

    def __init__(self, every_s: float):
        self.every_s, self._last = every_s, float("-inf")

    def due(self) -> bool:
        now = time.monotonic()
        if now - self._last < self.every_s:
            return False
        self._last = now
        return True
