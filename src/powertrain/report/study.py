"""What the pages of studies share: charts and tables as studies.yaml describes them, and figures of comparisons.

A study is read as evidence.json holds it (records/evidence.py). Its runs lie in the order of its comparisons, two for each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml
from jinja2 import ChainableUndefined, Environment

from powertrain.records.timeline import is_finite
from powertrain.report.chart import COLOURS, Axis, Band, Level, Plot, Point, Row, Rows, Segment, Series
from powertrain.report.page import TONES, Cell, Figure, Missing, Number, Section, Table
from powertrain.report.words import is_number, pairs, pins_in_words

Study = Mapping[str, Any]
Rowed = Iterable[Mapping[str, Any]]
TONE_COLOURS = {"good": "green", "bad": "red", "open": "orange", "quiet": "grey"}


# ------------------------------------------------------------------------------------------------ charts and tables


@cache
def _described() -> Mapping[str, Mapping[str, Any]]:
    text = (resources.files("powertrain.report") / "studies.yaml").read_text(encoding="utf-8")
    described: Mapping[str, Mapping[str, Any]] = yaml.safe_load(text)
    return described


@cache
def _expressions() -> Environment:
    """Return the language of a table's columns: Jinja's expressions, and filters of our own."""
    environment = Environment(undefined=ChainableUndefined, autoescape=False)
    environment.globals.clear()
    environment.filters |= {
        "mib": lambda size: size / 2**20 if is_number(size) else None,
        "percent": lambda share: 100 * share if is_number(share) else None,
        "share": lambda share: f"{share:.1%}",
        "speeds": lambda times: " to ".join(f"{1 / one:.3g}" for one in sorted(times or (), reverse=True) if one),
        "measured_as": lambda found, unit: f"{found['median']:.4g} ({found['low']:.4g} to {found['high']:.4g}) {unit}"
        if found else "",
        "named_next": lambda others: ", ".join(f"{one['name']} {one['predicted']:.2f}" for one in others or ()),
        "words": lambda words: " ".join(map(str, words)), "yes_no": lambda value: "yes" if value else "no",
        "pairs": lambda settings: pairs(settings or {}), "pins": lambda pins: pins_in_words(pins) or "nothing changed"}
    return environment


def table(name: str, rows: Rowed, title: str = "", **words: str) -> Table:
    """Return the table that studies.yaml describes by `name`; `words` stand in its headings."""
    described = _described()[name]
    cells = [_expressions().compile_expression(str(where)) for where in described["columns"].values()]
    return Table(tuple(heading.format(**words) for heading in described["columns"]),
                 tuple(tuple(cell(row) for cell in cells) for row in rows), title or described.get("title", ""))


def chart(name: str, title: str, rows: Sequence[Row], *tables: Table, study: Study | None = None, key: str = "",
          axis: str = "", log: bool = False) -> Figure | Missing:
    """Return the chart that studies.yaml describes by `name`; without rows, what is missing and why.

    `study`: whose noise is drawn behind the rows.
    """
    described = _described()[name]
    if not rows:
        return Missing(*described["missing"])
    log = log or described.get("log", False)
    level = described.get("level")
    levels = () if level is None else (Level(level, 1.0 if level else 0.0),)
    floor = (study or {}).get("noise_floor")
    bands = (Band(f"noise: equal arms differ by up to {floor:.1%}", max(1 - floor, 0.0), 1 + floor),) if floor else ()
    noise = (f"Grey band: the noise of this machine, from an arm measured against itself (up to {floor:.1%}). " if floor else
             "This study has no A/A control, so the noise of this machine is unknown. ")
    drawing = Rows(Axis(axis or described["axis"], log=log, low=0.0 if described.get("from_zero") else None), tuple(rows),
                   levels, bands, legend=tuple((described.get("legend") or {}).items()))
    caption = described["caption"] if study is None else described["caption"].format(noise=noise)
    return Figure(key or name, title, (drawing,), caption.strip(), tables)


def noise_number(study: Study) -> tuple[Number, ...]:
    floor = study.get("noise_floor")
    return () if floor is None else (Number(f"{floor:.1%}", "noise floor", "how far two equal plans lie apart here"),)


def speed_number(speed: Mapping[str, Any], label: str, of: str) -> Number:
    return Number(f"x {speed['median']:.3g}", label, f"95% interval {speed['low']:.3g} to {speed['high']:.3g}, {of}")


def tone_of(verdict: str) -> str:
    return TONES.get(verdict, "open")


def colour_of(verdict: str) -> str:
    return TONE_COLOURS[tone_of(verdict)]


def interval_point(speed: Mapping[str, Any] | None, colour: str, label: str = "", shape: str = "circle") -> tuple[Point, ...]:
    """Return a median with its interval; nothing where there is none."""
    return () if speed is None else (Point(speed["median"], colour, speed["low"], speed["high"], label, shape),)


def verdict_row(label: str, speed: Mapping[str, Any] | None, verdict: str, segments: tuple[Segment, ...] = ()) -> Row:
    """Return a row with a speed in the colour of its verdict."""
    return Row(label, segments, interval_point(speed, colour_of(verdict)), verdict, tone_of(verdict))


def counted(verdicts: Sequence[str], order: Sequence[str]) -> str:
    """Return '3 faster, 2 no effect': the verdicts of `order` first, then the others."""
    every = [*order, *sorted(set(verdicts) - set(order))]
    return ", ".join(f"{verdicts.count(word)} {word}" for word in every if word in verdicts)


def speed_words(speed: Mapping[str, Any] | None) -> str:
    if speed is None or not is_finite(speed["median"]):
        return "no speed"
    return f"{speed['median']:.3g} times as fast ({speed['low']:.3g} to {speed['high']:.3g})"


# ------------------------------------------------------------------------------------------------ comparisons


@dataclass(frozen=True)
class Compared:
    comparison: Mapping[str, Any]
    a: Mapping[str, Any] | None              # the runs; None where they were not kept
    b: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        return f"{self.comparison['b']} against {self.comparison['a']}"

    @property
    def speed(self) -> Mapping[str, Any] | None:
        speed: Mapping[str, Any] | None = self.comparison["speed"]
        return speed

    @property
    def verdict(self) -> str:
        return str(self.comparison["verdict"])

    @property
    def windows(self) -> list[dict[str, Any]]:
        """Return the pairs of windows over the same steps, each with the speeds of A and B."""
        if self.a is None or self.b is None:
            return []
        return [{"name": self.name, "pair": number, "a": a, "b": b, "speed_a": _speed(a), "speed_b": _speed(b)}
                for number, (a, b) in enumerate(zip(self.a["windows"], self.b["windows"], strict=False), 1)]


def _speed(window: Mapping[str, Any]) -> float:
    return float(window["real_tokens"] / window["seconds"]) if window["seconds"] else 0.0


def compared(study: Study) -> list[Compared]:
    """Return every comparison with its two runs."""
    runs, found, place = study.get("runs") or [], [], 0
    for comparison in study.get("comparisons") or []:
        names = comparison["a"], comparison["b"]
        at = next((i for i in range(place, len(runs) - 1) if (runs[i]["arm"], runs[i + 1]["arm"]) == names), None)
        if at is None:
            found.append(Compared(comparison, None, None))
        else:
            found.append(Compared(comparison, runs[at], runs[at + 1]))
            place = at + 2
    return found


def picked(study: Study, found: Sequence[Compared], name: str) -> Compared | None:
    """Return the comparison whose place the findings hold under `name`."""
    place = study["findings"].get(name)
    return None if place is None else found[place]


def behind(study: Study, found: Sequence[Compared], title: str, *more: Figure | Missing,
           of: str = "The comparisons behind it") -> Section:
    """Return the section with all comparisons and their windows."""
    return Section(of, (intervals(study, found, title), paired_windows(study, found), *more))


def intervals(study: Study, found: Sequence[Compared], title: str) -> Figure | Missing:
    """Plot the speed of B over A of every comparison, with its interval."""
    rows = [verdict_row(one.name, one.speed, one.verdict) for one in found]
    return chart("comparisons", title, rows, table("comparisons", [one.comparison for one in found]), study=study)


def paired_windows(study: Study, found: Sequence[Compared]) -> Figure | Missing:
    """Plot every pair of windows behind the intervals."""
    ratios = [(one, [pair["speed_b"] / pair["speed_a"] for pair in one.windows if pair["speed_a"] > 0]) for one in found]
    shown = [(one, some) for one, some in ratios if some]
    if not shown:
        return Missing("paired windows", "The study holds no windows.")
    rows = [Row(one.name, points=(*(Point(ratio, "blue", label="one pair of windows", shape="ring") for ratio in some),
                                  *interval_point(one.speed, colour_of(one.verdict)))) for one, some in shown]
    every = [ratio for _, some in shown for ratio in some]
    title = f"The {len(every):,} single pairs behind it lie between {min(every):.3g} and {max(every):.3g}"
    return chart("windows", title, rows, table("windows", [pair for one, _ in shown for pair in one.windows]), study=study)


Differences = list[tuple[float, float | None]]


def loss_difference(found: Sequence[Compared]) -> Figure | Missing:
    """Plot the relative difference of the two arms' losses at every step, on a logarithmic scale."""
    curves = [(one.name, one.a["losses"], one.b["losses"], _differences(one.a, one.b)) for one in found
              if one.a and one.b and one.a["losses"] and one.b["losses"]][:len(COLOURS)]
    if not curves:
        return Missing("difference of the losses", "The study holds no losses of two arms.")
    rows: list[tuple[Cell, ...]] = [(name, round(step), a[i], b[i], value) for name, a, b, points in curves
                                    for i, (step, value) in enumerate(points)]
    numbers = Table(("comparison", "step", "loss A", "loss B", "relative difference"), tuple(rows), "loss of each step")
    real = [value for *_, points in curves for _, value in points if value]
    if not real:
        return Figure("parity", "Every compared step has the same loss in both arms, to the digits that were stored", (),
                      "Relative difference of the loss of each step; it is zero throughout, so there is nothing to draw.",
                      (numbers,))
    floor = min(real) / 3
    marks = tuple(Series(name, tuple((step, None if value is None else value or floor) for step, value in points), colour)
                  for (name, _, _, points), colour in zip(curves, COLOURS, strict=False))
    plot = Plot(Axis("step"), Axis("relative difference of the loss", log=True), marks, height=170)
    return Figure("parity", f"The losses of the arms differ by at most {max(real):.2g} of their value at any step", (plot,),
                  "Loss of the same step, on the same examples, with B and with A, as a share of A's. Equal losses are drawn "
                  f"at the bottom ({floor:.1g}). If only rounding differs, the curve starts near the precision of the numbers "
                  "and grows slowly; if the mathematics differs, the curve starts higher.", (numbers,))


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Differences:
    every = a.get("curves_every_steps") or 1
    if every != (b.get("curves_every_steps") or 1):
        return []
    return [(number * every + 1.0, relative(one, other))
            for number, (one, other) in enumerate(zip(a["losses"], b["losses"], strict=False))]


def relative(a: float | None, b: float | None) -> float | None:
    """Return how far `b` is from `a`, as a share of `a`."""
    return abs(b - a) / abs(a) if a and is_finite(a) and is_finite(b) else None
