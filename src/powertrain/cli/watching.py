"""What a person sees of a run while it trains, and of its result."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.cli import output as screen
from powertrain.records.event_log import read_events, to_line
from powertrain.records.events import Evaluated, Event, RunWarning, Start, Step
from powertrain.records.origins import COMMAND_LINE, Origin, Stored
from powertrain.records.timeline import last_of
from powertrain.report import plan as plan_report
from powertrain.report import result
from powertrain.report.words import perplexity

if TYPE_CHECKING:
    from rich.live import Live as RichLive

    from powertrain.run.prepare import Prepared

MOST_VALUES = 8              # of the command line, in the first line of a run


class Watcher:
    """Shows a run's events as they come: JSON lines, a live line in a terminal, or a plain line every few seconds."""

    def __init__(self, *, as_json: bool, quiet: bool):
        self.as_json, self.quiet = as_json, quiet
        self.live = result.Live(resident_bytes)
        self.next_line_s = 0.0               # when a plain line is due, where no terminal redraws one
        self.console = screen.console(stderr=True)
        self.live_line: RichLive | None = None

    def __enter__(self) -> Watcher:
        if self.console.is_terminal and not self.quiet and not self.as_json:
            from rich.live import Live as RichLive

            self.live_line = RichLive(console=self.console, transient=True, refresh_per_second=4)
        return self

    def __exit__(self, *error: object) -> None:
        if self.live_line is not None:
            self.live_line.stop()

    def introduce(self, prepared: Prepared, stored: Stored | None = None) -> None:
        """Print the beginning of a run. `stored` is the recipe of a run that continues."""
        if self.quiet or self.as_json:
            return
        resolved = prepared.resolved
        remarks = [*resolved.notes, *prepared.recipe.corrections, *prepared.material.said]
        screen.print_rows(plan_report.overview_rows(
            prepared.recipe.model_dump(), prepared.facts, prepared.plan, prepared.total_steps, asked=_asked(prepared, stored),
            remarks=remarks), stderr=True)

    def take(self, event: Event) -> None:
        self.live.take(event)
        if self.as_json:
            screen.print_json(to_line(event))
            return
        if self.quiet and not isinstance(event, RunWarning):
            return
        if isinstance(event, Step):
            self._step()
        elif (text := result.said(event)) is not None:
            self.console.print(text, style="yellow" if isinstance(event, RunWarning) else None, soft_wrap=True)
        if isinstance(event, Start) and self.live_line is not None:
            self.live_line.start()

    def _step(self) -> None:
        if self.live_line is not None:
            self.live_line.update(self.live.line())
        elif (now_s := time.monotonic()) >= self.next_line_s:
            self.next_line_s = now_s + screen.PLAIN_LINE_EVERY_S
            self.console.print(self.live.line(), soft_wrap=True)


def _asked(prepared: Prepared, stored: Stored | None) -> str:
    """Return the recipe's name with the values of the command line; of a run that continues, also what changes now."""
    from powertrain.recipe import flat

    resolved = prepared.resolved
    now = {key: value for key, value in flat(resolved.recipe.model_dump()) if resolved.origin(key) == COMMAND_LINE}
    if stored is None:
        return _with_values(resolved.origins.values(), now)
    first = {key: value for key, (value, origin) in stored.items() if origin == COMMAND_LINE}
    return _with_values([origin for _, origin in stored.values()], first) + (f"; now {_listed(now)}" if now else "")


def _with_values(origins: Iterable[Origin], values: Mapping[str, Any]) -> str:
    name = next((origin.name for origin in origins if origin.kind in ("recipe", "file")), "")
    return " with ".join(part for part in (name, _listed(values)) if part)


def _listed(values: Mapping[str, Any]) -> str:
    from powertrain.recipe import quoted

    shown = [f"{key}={quoted(value)}" for key, value in values.items()]
    return ", ".join(shown if len(shown) <= MOST_VALUES else [*shown[:MOST_VALUES], f"and {len(shown) - MOST_VALUES} more"])


def print_result(folder: Path, prepared: Prepared, *, as_json: bool) -> None:
    events = read_events(folder / "events.jsonl")
    gzip_bits = prepared.material.gzip_bits_per_byte
    if as_json:
        evaluation = last_of(Evaluated, events)
        screen.print_json({"event": "result", "folder": str(folder), "gzip_bits_per_byte": gzip_bits,
                           "perplexity": perplexity(evaluation.loss) if evaluation else None,
                           "evaluation": to_line(evaluation) if evaluation else None})
        return
    screen.print_rows(result.sample_rows(events))
    screen.print_rows(result.result_rows(events, str(folder), gzip_bits))


def resident_bytes() -> int:
    """Return this process's memory now; on a GPU the memory that torch has allocated there."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated())
    import psutil

    return int(psutil.Process().memory_info().rss)
