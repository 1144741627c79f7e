"""What a person sees of a run: its beginning, its events as they come, its result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.cli import output
from powertrain.cli.environment import resident_bytes
from powertrain.recipe import flat, quoted
from powertrain.records.event_log import read_events, to_line
from powertrain.records.events import Evaluated, Event, RunWarning, Start, Step
from powertrain.records.origins import COMMAND_LINE, Origin, Stored
from powertrain.records.timeline import last_of
from powertrain.report.figures import perplexity
from powertrain.report.plan import overview_rows
from powertrain.report.result import Live, result_rows, said, sample_rows
from powertrain.run.prepare import Prepared

if TYPE_CHECKING:
    from rich.live import Live as RichLive

MOST_VALUES = 8              # of the command line, in the first line of a run


class Watcher:
    """Shows a run's events as they come: JSON lines, a live line in a terminal, or a plain line every few seconds."""

    def __init__(self, *, as_json: bool, quiet: bool):
        self.as_json, self.quiet = as_json, quiet
        self.live, self.next_line_s = Live(resident_bytes), 0.0      # when a plain line is due, where no terminal redraws one
        self.console = output.console(stderr=True)
        self.screen: RichLive | None = None

    def __enter__(self) -> Watcher:
        if self.console.is_terminal and not self.quiet and not self.as_json:
            from rich.live import Live as RichLive

            self.screen = RichLive(console=self.console, transient=True, refresh_per_second=4)
        return self

    def __exit__(self, *error: object) -> None:
        if self.screen is not None:
            self.screen.stop()

    def introduce(self, prepared: Prepared, stored: Stored | None = None) -> None:
        """Print the beginning of a run. `stored` is the recipe of a run that continues."""
        if self.quiet or self.as_json:
            return
        resolved = prepared.resolved
        remarks = [*resolved.notes, *prepared.recipe.corrections, *prepared.material.said]
        output.print_rows(overview_rows(prepared.recipe.model_dump(), prepared.facts, prepared.plan, prepared.total_steps,
                                        asked=_asked(prepared, stored), remarks=remarks), stderr=True)

    def take(self, event: Event) -> None:
        self.live.take(event)
        if self.as_json:
            output.print_json(to_line(event))
        elif not self.quiet or isinstance(event, RunWarning):
            self._show(event)

    def _show(self, event: Event) -> None:
        if isinstance(event, Step):
            self._step()
        elif (text := said(event)) is not None:
            self.console.print(text, style="yellow" if isinstance(event, RunWarning) else None, soft_wrap=True)
        if isinstance(event, Start) and self.screen is not None:
            self.screen.start()

    def _step(self) -> None:
        if self.screen is not None:
            self.screen.update(self.live.line())
        elif (now_s := time.monotonic()) >= self.next_line_s:
            self.next_line_s = now_s + output.PLAIN_LINE_EVERY_S
            self.console.print(self.live.line(), soft_wrap=True)


def _asked(prepared: Prepared, stored: Stored | None) -> str:
    """Return the recipe's name with the values of the command line; of a run that continues, also what changes now."""
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
    shown = [f"{key}={quoted(value)}" for key, value in values.items()]
    return ", ".join(shown if len(shown) <= MOST_VALUES else [*shown[:MOST_VALUES], f"and {len(shown) - MOST_VALUES} more"])


def print_result(folder: Path, prepared: Prepared, *, as_json: bool) -> None:
    events = read_events(folder / "events.jsonl")
    gzip_bits = prepared.material.gzip_bits_per_byte
    if as_json:
        evaluation = last_of(Evaluated, events)
        output.print_json({"event": "result", "folder": str(folder), "gzip_bits_per_byte": gzip_bits,
                           "perplexity": perplexity(evaluation.loss) if evaluation else None,
                           "evaluation": to_line(evaluation) if evaluation else None})
        return
    output.print_rows(sample_rows(events))
    output.print_rows(result_rows(events, str(folder), gzip_bits))
