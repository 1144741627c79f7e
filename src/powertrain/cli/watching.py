"""What a person sees of a run while it trains, and of its result; `powertrain monitor`, which sees it from outside."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powertrain.cli import output as screen
from powertrain.cli.options import Alert, Json
from powertrain.cli.streams import OutputGone
from powertrain.records import WrongUse, to_plain
from powertrain.records.event_log import EventReader, counted, read_events, to_line
from powertrain.records.events import Evaluated, Event, Folder, RunWarning, Saved, Start, Step
from powertrain.records.origins import COMMAND_LINE, Origin, Stored
from powertrain.records.timeline import is_finite, last_of
from powertrain.report import plan as plan_report
from powertrain.report import result
from powertrain.report.words import perplexity

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live as RichLive

    from powertrain.launch.alerts import Alert as RunAlert
    from powertrain.report.monitor import Seen
    from powertrain.run.prepare import Prepared

REFRESH_S = 2.0              # of the monitor
TALL = 60                    # lines of its view where no terminal cuts them
MOST_VALUES = 8              # of the command line, in the first line of a run


class Watcher:
    """Shows a run's events as they come: JSON lines, a live line in a terminal, or a plain line every few seconds."""

    def __init__(self, *, as_json: bool, quiet: bool, alert: RunAlert | None = None):
        self.as_json, self.quiet, self.alert = as_json, quiet, alert
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
        if isinstance(event, Folder):
            self.begin_alerts(event.path)
        if self.as_json:
            screen.print_event(event)
            return
        if self.quiet and not isinstance(event, RunWarning):
            return
        if isinstance(event, Step):
            self._step()
        elif (text := result.said(event)) is not None:
            self.console.print(text, style="yellow" if isinstance(event, RunWarning) else None, soft_wrap=True)
        if isinstance(event, Start) and self.live_line is not None:
            self.live_line.start()

    def begin_alerts(self, folder: str) -> None:
        """Start the process that sends alerts of the run in this folder, where somebody wants them."""
        if self.alert is not None:
            from powertrain.launch import alerts

            self.follower = alerts.start(replace(self.alert, run=folder))        # kept: else Python warns that it still runs

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
    """Print how a run ended. Where nobody takes it, the exit code of the command is still the run's."""
    events, gzip_bits = read_events(folder / "events.jsonl"), prepared.material.gzip_bits_per_byte
    with contextlib.suppress(OutputGone):
        if as_json:
            evaluation = last_of(Evaluated, events)
            screen.print_json({"event": "result", "folder": str(folder), "gzip_bits_per_byte": gzip_bits,
                               "perplexity": perplexity(evaluation.loss) if evaluation else None,
                               "evaluation": to_line(evaluation) if evaluation else None})
        else:
            screen.print_rows(result.sample_rows(events))
            screen.print_rows(result.result_rows(events, str(folder), gzip_bits))


def resident_bytes() -> int:
    """Return this process's memory now; on a GPU the memory that torch has allocated there."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated())
    import psutil

    return int(psutil.Process().memory_info().rss)


# ------------------------------------------------------------------------------------------------ from outside


def monitor(run: Annotated[Path | None, typer.Argument(help="Folder of a run (default: all runs).", show_default=False)] = None,
            runs: Annotated[Path, typer.Option(help="Folder with the runs.")] = Path("runs"),
            once: Annotated[bool, typer.Option("--once", help="Print one view and end, as without a terminal.")] = False,
            alert: Alert = None, as_json: Json = False) -> None:
    """Watch running and finished runs.

    With RUN: its curves, speed, memory, temperature, checkpoints, disk and warnings. Ctrl-C ends the view, not the run.
    """
    from powertrain.report.monitor import detail, figures, overview
    from powertrain.run.folder import existing

    out = screen.console()
    plain = "utf" not in out.encoding.lower()
    if alert is not None and (run is None or once or as_json):
        raise WrongUse("--alert needs one run, and a monitor that stays: powertrain monitor RUN --alert ...")
    if run is not None:
        existing(run)
    followed = None if alert is None or run is None else _begin_following(alert, run)
    watched: dict[Path, WatchedRun] = {}

    def look() -> list[Seen]:                # runs come and go
        there = [run] if run is not None else [path.parent for path in sorted(runs.glob("*/recipe.yaml"))]
        return [watched.setdefault(path, WatchedRun(path, keep=run is not None)).look() for path in there]

    def view(width: int, height: int) -> RenderableType:
        return overview(look(), width, height) if run is None else detail(look()[0], width, height, plain=plain)

    if not (seen := look()):
        raise WrongUse(f"there are no runs in {runs}/; `powertrain train` makes a run")
    if as_json:
        for one in seen:
            screen.print_json({"event": "monitor", **to_plain(figures(one), lambda value: None if isinstance(
                value, float) and not is_finite(value) else value)})
    elif once or not out.is_terminal:
        out.print(view(out.width, TALL))
        if followed is not None:
            followed.join()
    else:
        from rich.live import Live as RichLive

        with contextlib.suppress(KeyboardInterrupt), RichLive(console=out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(view(out.width, out.height), refresh=True)
                time.sleep(REFRESH_S)


def _begin_following(alert: str, path: Path) -> threading.Thread:
    """Send alerts of this run as long as this process lives."""
    from powertrain.launch import alerts
    from powertrain.run.folder import RunFolder, is_being_written

    told = replace(alerts.checked(alert), run=str(path), since=time.time())
    found = threading.Thread(target=alerts.follow, args=(told, lambda: is_being_written(RunFolder(path)) is False), daemon=True)
    found.start()
    return found


class WatchedRun:
    """A run that is read again and again. Without `keep`, most steps of a run that has ended are not kept in memory."""

    def __init__(self, path: Path, *, keep: bool = True):
        from powertrain.run.folder import RunFolder

        self.folder, self.keep = RunFolder(path), keep
        self._forget()

    def _forget(self) -> None:
        from powertrain.launch.alerts import Alert, Watch

        self.reader, self.written, self.problem = EventReader(self.folder.events), list[Event](), ""
        self.watch = Watch(Alert("", str(self.folder.path)))
        self.last: tuple[int, Seen] | None = None        # the size of the events when the run had ended, and what they said

    def look(self) -> Seen:
        """Return the run as it is now. A damaged line is passed over, and said."""
        from powertrain.facts.readings import read_machine
        from powertrain.report.monitor import Seen
        from powertrain.run.folder import is_being_written, state_of, trainer_here

        path, file = str(self.folder.path), self.folder.events
        if not self.folder.recipe.is_file():
            self._forget()
            return Seen(path, "deleted", attention="the folder was deleted or moved")
        alive = is_being_written(self.folder)            # asked before reading: what was written until then is read
        size_bytes = file.stat().st_size if file.is_file() else 0
        if self.last is not None and self.last[0] == size_bytes and not alive:
            return self.last[1]
        if size_bytes < self.reader.begin or (self.last is not None and not self.keep):
            self._forget()                   # another run lies there now, or the steps are no longer known
        found, problem = self.reader.read_whole()
        self.written, self.problem = [*self.written, *found], problem or self.problem
        for event in found:
            list(self.watch.take(event))
        events, pid = counted(self.written), trainer_here(self.folder)
        self.watch.alert = replace(self.watch.alert, pid=pid)
        state, steps = state_of(events, written=alive), [event for event in events if isinstance(event, Step)]
        training = state in ("running", "running or killed")
        said = [*(self.watch.silence(time.time()) if training else self.watch.end() if state != "finished" else ())]
        seconds = sum(step.seconds for step in steps)
        seen = Seen(path, "stalled" if training and said else state, events,
                    result.printable("; ".join([self.problem] * bool(self.problem) + [sentence for _, sentence in said])),
                    sum(step.real_tokens for step in steps) / seconds if seconds else None, pid, disk=self._disk(events))
        if training:
            return replace(seen, readings=read_machine(pid)) if pid is not None else seen
        if not self.keep:
            self.written = []
            others = [event for event in events if not isinstance(event, Step)]
            seen = replace(seen, events=[*others, *steps[-result.RECENT_STEPS:]])
        self.last = size_bytes, seen
        return seen

    def _disk(self, events: Sequence[Event]) -> tuple[int, float | None] | None:
        """Return the bytes that are free, and in how long they are used up, if the checkpoints still to come need more."""
        from powertrain.run.folder import stored_recipe

        with contextlib.suppress(OSError, WrongUse):
            free_bytes = shutil.disk_usage(self.folder.path).free
            if len(saved := [event for event in events if isinstance(event, Saved)]) < 2:
                return free_bytes, None
            kept = int(stored_recipe(self.folder).get("save_total_limit", (2,))[0])
            # beside the kept ones and the best, one more exists while it is written
            more = max(0, kept + 2 - sum(1 for _ in self.folder.checkpoints.glob("step-*")))
            every_s = (saved[-1].time - saved[0].time) / (len(saved) - 1)
            return free_bytes, free_bytes / saved[-1].bytes * every_s if more * saved[-1].bytes > free_bytes else None
        return None
