"""The live line: step, loss, speed, memory and time left, from the run's events alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from powertrain.records.events import Evaluated, Event, Folder, Note, Resume, RunWarning, Sample, Saved, Start, Step
from powertrain.report.figures import count, duration, memory

RECENT_STEPS = 50            # the speed shown is that of the last steps, so that a slow start does not linger


@dataclass
class Live:
    """Takes events and gives the live line. `memory_bytes` returns the memory that the process uses now."""

    memory_bytes: Callable[[], int]
    total_steps: int = 0
    flops_per_token: float | None = None
    peak_flops_per_s: float | None = None
    saved_step: int | None = None
    steps: list[Step] = field(default_factory=list)

    def take(self, event: Event) -> None:
        if isinstance(event, Start):
            self.total_steps = event.total_steps
            if event.estimate:
                self.flops_per_token = event.estimate["flops_per_token"]
                self.peak_flops_per_s = event.estimate["peak_flops_per_s"]
        elif isinstance(event, Step):
            self.steps = [*self.steps[-RECENT_STEPS + 1:], event]
        elif isinstance(event, Saved):
            self.saved_step = event.step

    def line(self) -> str:
        if not self.steps:
            return "first step ..."
        last, seconds = self.steps[-1], sum(step.seconds for step in self.steps)
        tokens_per_s = sum(step.real_tokens for step in self.steps) / seconds
        left_s = (self.total_steps - last.step) * seconds / len(self.steps)
        recent_loss = sum(step.loss for step in self.steps[-10:]) / len(self.steps[-10:])
        parts = [f"step {last.step:,}/{self.total_steps:,}", f"loss {recent_loss:.3f}", f"{count(tokens_per_s)} tokens/s"]
        if self.flops_per_token and self.peak_flops_per_s:
            parts.append(f"{tokens_per_s * self.flops_per_token / self.peak_flops_per_s:.0%} of the limit")
        parts += [memory(self.memory_bytes()), f"{duration(left_s)} left",
                  "not saved yet" if self.saved_step is None else f"saved at {self.saved_step:,}"]
        return " | ".join(parts)


def said(event: Event) -> str | None:
    """Return what a person is told of an event beside the live line; None for the kinds that only the line shows."""
    if isinstance(event, RunWarning):
        return f"warning: {event.sentence}"
    if isinstance(event, Note):
        return f"({event.sentence})"
    if isinstance(event, Folder):
        return f"Files     {event.path}/; Ctrl-C stops and saves; powertrain train --resume {event.path} continues"
    if isinstance(event, Resume):
        return f"going on after step {event.step:,}"
    if isinstance(event, Evaluated):
        bits = f", {event.bits_per_byte:.3f} bits per byte" if event.bits_per_byte is not None else ""
        return f"step {event.step:,}: held-out loss {event.loss:.4f}{bits} ({event.tokens:,} tokens)"
    if isinstance(event, Sample):
        return "\n".join(f"    {line}" for line in printable(event.text).splitlines())
    return None


def printable(text: str) -> str:
    """Return model output without the control characters that could steer a terminal."""
    return "".join(c if c == "\n" or c == "\t" or c.isprintable() else "?" for c in text)
