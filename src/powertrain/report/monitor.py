"""What `powertrain monitor` shows of runs: figures for programs, and views of any width and height for people."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from powertrain.records.events import Evaluated, Event, RunWarning, Saved, Start, Step
from powertrain.records.readings import GpuReading, Readings
from powertrain.records.timeline import last_of
from powertrain.report import curve
from powertrain.report.result import Live, printable, progress_rows, result_rows, sample_rows
from powertrain.report.words import ACCURACY, count, duration, memory

MOST_WARNINGS = 3
MOST_POINTS = 20_000         # of a curve; of more steps, every second or third is drawn
HIGH, LOW = 10, 4            # lines of a curve, at most and at least
ROOM = 16                    # lines of a terminal from which on curves are drawn
WIDE, WIDEST = 76, 116       # columns from which on two and three curves stand side by side
COLOURS = {"running": "green", "finished": "blue", "failed": "red", "killed": "red", "stalled": "yellow"}
# of the table of all runs, each with the width from which on it is shown
COLUMNS = {"run": 0, "state": 0, "step": 0, "loss": 0, "held out": 64, "tokens/s": 64, "left": 76, "memory": 92, "saved": 104,
           "warnings": 116}


@dataclass(frozen=True)
class Seen:
    """A run at one moment. Of a run that has ended, `events` may hold the last steps only."""

    run: str                                 # its folder
    state: str                               # as `runs list` says; also "stalled" and "deleted"
    events: Sequence[Event] = ()
    attention: str = ""                      # what happened, where somebody has to do something
    tokens_per_s_overall: float | None = None
    pid: int | None = None
    readings: Readings = field(default_factory=Readings)
    # bytes that are free, and seconds until they are used up at the rate of the saves so far; None where they will not be
    disk: tuple[int, float | None] | None = None

    @property
    def live(self) -> Live:
        """Return the pace of the last steps."""
        live = Live(lambda: self.readings.process_bytes or 0)
        for event in self.events:
            live.take(event)
        return live


def figures(seen: Seen) -> dict[str, Any]:
    """Return the figures of a run, for --json and the table; None is what is not known."""
    live, saved, held_out = seen.live, last_of(Saved, seen.events), last_of(Evaluated, seen.events)
    steps, training = live.steps, seen.state in ("running", "stalled", "running or killed")
    return {"run": seen.run, "state": seen.state, "training": training, "attention": seen.attention, "began": next((
                event.time for event in seen.events if isinstance(event, Start)), None),
            "step": steps[-1].step if steps else live.start.step, "total_steps": live.start.total_steps,
            "loss": live.recent_loss if steps else None, "held_out_loss": held_out.loss if held_out else None,
            "tokens_per_s": live.tokens_per_s if steps else None, "tokens_per_s_overall": seen.tokens_per_s_overall,
            "peak_share": live.peak_share if steps else None, "left_s": live.left_s if steps and training else None,
            "pid": seen.pid, "saved_step": saved.step if saved else None, "readings": seen.readings,
            "disk_free_bytes": seen.disk[0] if seen.disk else None, "disk_left_s": seen.disk[1] if seen.disk else None,
            "warnings": [printable(event.sentence) for event in seen.events if isinstance(event, RunWarning)]}


# ------------------------------------------------------------------------------------------------ all runs


def overview(runs: Sequence[Seen], width: int, height: int) -> RenderableType:
    """Return a row for each run, those that train first, then the newest; then what asks for attention."""
    ordered = sorted(map(figures, runs), key=lambda run: (not run["training"], -(run["began"] or 0.0)))
    head = Text(f"{sum(run['training'] for run in ordered)} training, {len(ordered)} in all", "bold")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    shown = [number for number, from_width in enumerate(COLUMNS.values()) if width >= from_width]
    for number in shown:
        table.add_column([*COLUMNS][number], no_wrap=True, overflow="ellipsis", justify="left" if number < 2 else "right")
    room = max(1, height - 4)
    for run in ordered[:room]:
        cells = _cells(run, width // 3)
        table.add_row(*(cells[number] for number in shown))
    more = [Text(f"and {len(ordered) - room} more", "dim")] if len(ordered) > room else []
    said = [Text(run["attention"], "yellow") for run in ordered if run["attention"] and run["training"]]
    return Group(head, Text(), table, *more, *said)


def _cells(run: dict[str, Any], name_width: int) -> tuple[RenderableType, ...]:
    def shown(name: str, words: Any) -> str:
        return "" if run[name] is None else str(words(run[name]))

    name = Text(printable(run["run"]).rpartition("/")[2])
    name.truncate(max(12, name_width), overflow="ellipsis")
    size_bytes, warnings = run["readings"].process_bytes, len(run["warnings"])
    return (name, Text(run["state"], COLOURS.get(run["state"].partition(" ")[0], "")),
            f"{run['step']:,}/{run['total_steps']:,}", shown("loss", "{:.4f}".format), shown("held_out_loss", "{:.4f}".format),
            shown("tokens_per_s" if run["training"] else "tokens_per_s_overall", count), shown("left_s", duration),
            "" if size_bytes is None else memory(size_bytes), shown("saved_step", "{:,}".format),
            Text(str(warnings or ""), "yellow"))


# ------------------------------------------------------------------------------------------------ one run


def detail(seen: Seen, width: int, height: int, *, plain: bool) -> RenderableType:
    """Return the view of one run: state, progress, curves, and rows, of which a small terminal cuts the last."""
    run = figures(seen)
    where = f"  process {seen.pid}" if run["training"] and seen.pid else ""
    head = Text.assemble((printable(seen.run), "bold"), "  ", (seen.state, COLOURS.get(seen.state.partition(" ")[0], "")),
                         (where, "dim"))
    full, empty = ("=", "-") if plain else ("━", "─")
    cells = min(width, 120)
    done = min(cells, round(cells * run["step"] / run["total_steps"])) if run["total_steps"] else 0
    lines = [head, Text.assemble((full * done, "green"), (empty * (cells - done), "dim"))]
    lines += [Text(seen.live.line())] if run["training"] else []
    lines += [Text(seen.attention, "yellow")] if seen.attention else []
    rows = [*_warning_rows(run["warnings"]), *(result_rows(seen.events, seen.run, None) or progress_rows(seen.events)),
            *_machine_rows(seen), *sample_rows(seen.events)[:2]]
    if height >= ROOM and seen.live.steps:
        lines += [Text(), *_curves(seen.events, cells, max(LOW, min(HIGH, height - 8 - 2 * len(rows))), plain=plain), Text()]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")        # whole: a command is to be copied
    for row in rows:
        table.add_row(row[0], Text(row[1]))
    return Group(*lines, table)


def _curves(events: Sequence[Event], width: int, height: int, *, plain: bool) -> Iterator[Text]:
    """Yield lines with the curves beside each other, as many as the width has room for."""
    steps = [event for event in events if isinstance(event, Step)]
    steps = steps[::1 + len(steps) // MOST_POINTS]
    held_out = tuple((float(event.step), event.loss) for event in events if isinstance(event, Evaluated))
    panels = [("loss, held out in yellow" if held_out else "loss", {
                  "cyan": tuple((float(step.step), step.loss) for step in steps), "yellow": held_out}),
              ("tokens/s", {"green": tuple((float(step.step), step.real_tokens / (step.seconds or 1e-9)) for step in steps)}),
              ("learning rate", {"magenta": tuple((float(step.step), step.learning_rate) for step in steps)})]
    if any(ACCURACY in step.metrics for step in steps):
        panels[1:1] = [("accuracy, held out in yellow", {
            "cyan": tuple((float(step.step), step.metrics.get(ACCURACY, 0.0)) for step in steps),
            "yellow": tuple((float(event.step), event.metrics.get(ACCURACY, 0.0)) for event in events
                            if isinstance(event, Evaluated))})]
    panels = panels[:1 + (width >= WIDE) + (width >= WIDEST)]
    each = (width + 3) // len(panels) - 3
    for beside in zip(*(curve.draw(*panel, each, height, plain=plain) for panel in panels), strict=True):
        for part in beside:
            part.truncate(each, pad=True)
        yield Text("   ").join(beside)


def _machine_rows(seen: Seen) -> Iterator[tuple[str, str]]:
    """Yield use, temperature and power, as far as they are known, and the disk."""
    now = seen.readings
    if now.cores is not None:
        yield "Machine", f"{now.cores:.1f} cores busy" + _celsius_and_watt(now)
    for number, gpu in enumerate(now.gpus):
        busy = "" if gpu.busy_share is None else f", {gpu.busy_share:.0%} busy"
        used = "" if gpu.used_bytes is None else f", {memory(gpu.used_bytes)} of {memory(gpu.memory_bytes or 0)}"
        slow = f", slowed down by {gpu.slowed_by}" if gpu.slowed_by else ""
        yield f"GPU {number}", f"{printable(gpu.name)}{busy}{used}{_celsius_and_watt(gpu)}{slow}"
    if seen.disk is not None:
        full = f"; full in about {duration(seen.disk[1])} at the rate of the saves so far" if seen.disk[1] is not None else ""
        yield "Disk", f"{memory(seen.disk[0])} free{full}"


def _celsius_and_watt(now: Readings | GpuReading) -> str:
    return (f", {now.temperature_c:.0f} °C" if now.temperature_c is not None else "") + (
        f", {now.power_w:.0f} W" if now.power_w is not None else "")


def _warning_rows(warnings: Sequence[str]) -> Iterator[tuple[str, str]]:
    if warnings:
        yield f"Warning{'s' * (len(warnings) > 1)}", warnings[-1]
        yield from (("", text) for text in reversed(warnings[-MOST_WARNINGS:-1]))
