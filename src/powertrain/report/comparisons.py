"""What a study's comparisons say, as figures: intervals, paired windows, difference of the losses.

A study is read as evidence.json holds it (records/evidence.py). Its runs lie in the order of its comparisons, two for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.report.chart import Axis, Band, Level, Line, Plot, Point, Row, Rows
from powertrain.report.page import Cell, Figure, Missing, Number, Section, Table
from powertrain.report.svg import is_number

Study = Mapping[str, Any]
TONES = {"faster": "good", "confirmed": "good", "better": "good", "harmful": "bad", "invalid": "bad",
         "smaller than claimed": "open", "no effect": "quiet", "inconclusive": "open", "not applicable here": "quiet"}
COLOURS = {"good": "green", "bad": "red", "open": "orange", "quiet": "grey"}
RATIO = "times as fast (B over A; 1 = the same)"
MOST_CURVES = 6


@dataclass(frozen=True)
class Findings:
    """The content of a study's page, before its method and its general cautions are added."""

    verdict: str                             # one sentence
    tone: str                                # "good", "bad" or "open"
    numbers: tuple[Number, ...]
    cautions: tuple[str, ...]
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Compared:
    comparison: Mapping[str, Any]
    a: Mapping[str, Any] | None              # the runs; None where they were not kept
    b: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        return f"{self.comparison['b']} against {self.comparison['a']}"

    @property
    def ratios(self) -> list[float]:
        """Speed of B over A of each pair of windows, which lie over the same steps."""
        if self.a is None or self.b is None:
            return []
        return [speed_of(second) / speed_of(first) for first, second in zip(self.a["windows"], self.b["windows"], strict=False)
                if speed_of(first) > 0]


def speed_of(window: Mapping[str, Any]) -> float:
    return float(window["real_tokens"] / window["seconds"]) if window["seconds"] else 0.0


def compared(study: Study) -> list[Compared]:
    """Every comparison with its two runs."""
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


def tone_of(verdict: str) -> str:
    return TONES.get(verdict, "open")


def colour_of(verdict: str) -> str:
    return COLOURS[tone_of(verdict)]


def interval_point(speed: Mapping[str, Any] | None, verdict: str) -> tuple[Point, ...]:
    if speed is None:
        return ()
    return (Point(speed["median"], colour_of(verdict), speed["low"], speed["high"]),)


def noise_band(study: Study) -> tuple[Band, ...]:
    floor = study.get("noise_floor")
    if not floor:
        return ()
    return (Band(f"noise: equal arms differ by up to {floor:.1%}", max(1 - floor, 0.0), 1 + floor),)


def noise_words(study: Study) -> str:
    floor = study.get("noise_floor")
    return (f"Grey band: the noise of this machine, from an arm measured against itself (up to {floor:.1%}). "
            if floor else "This study has no A/A control, so the noise of this machine is unknown. ")


def intervals(study: Study, found: Sequence[Compared], key: str, title: str) -> Figure | Missing:
    """Speed of B over A of every comparison, with its interval."""
    if not found:
        return Missing("speed of each comparison", "The study holds no comparison.")
    rows = tuple(Row(one.name, (), interval_point(one.comparison["speed"], one.comparison["verdict"]),
                     one.comparison["verdict"], tone_of(one.comparison["verdict"])) for one in found)
    return Figure(
        key, title, (Rows(Axis(RATIO, log=True), rows, (Level("the same speed", 1.0),), noise_band(study)),),
        "Point: the median of the ratios of paired windows, real tokens per second of B over A. Whisker: the interval that "
        f"holds it with 95% probability, by bootstrap. {noise_words(study)}The scale is logarithmic.",
        title, (comparison_table(found),))


def comparison_table(found: Sequence[Compared]) -> Table:
    columns = ("A", "B", "times as fast", "from", "to", "pairs", "verdict", "tokens/s A", "tokens/s B", "peak memory A (MiB)",
               "peak memory B (MiB)", "slower start of B (s)", "break-even (steps)", "because")
    rows = []
    for one in found:
        comparison, speed = one.comparison, one.comparison["speed"] or {}
        memory = comparison.get("peak_memory_bytes") or (None, None)
        rows.append((comparison["a"], comparison["b"], speed.get("median"), speed.get("low"), speed.get("high"),
                     comparison["pairs"], comparison["verdict"], *comparison["tokens_per_s"],
                     *(size / 2**20 if size else None for size in memory), comparison.get("compile_s"),
                     comparison.get("break_even_steps"), comparison["because"]))
    return Table(columns, tuple(rows), "comparisons")


def paired_windows(study: Study, found: Sequence[Compared]) -> Figure | Missing:
    """Every single measurement behind the intervals."""
    shown = [one for one in found if one.ratios]
    if not shown:
        return Missing("paired windows", "The study holds no windows.")
    rows = tuple(Row(one.name, (), (*(Point(ratio, "blue", label="one pair of windows", shape="ring") for ratio in one.ratios),
                                    *interval_point(one.comparison["speed"], one.comparison["verdict"])))
                 for one in shown)
    pairs = sum(len(one.ratios) for one in shown)
    low, high = min(min(one.ratios) for one in shown), max(max(one.ratios) for one in shown)
    title = f"The {pairs:,} single pairs behind it lie between {low:.3g} and {high:.3g}"
    table = Table(("comparison", "pair", "first step", "steps", "seconds A", "seconds B", "real tokens/s A", "real tokens/s B",
                   "B over A"),
                  tuple((one.name, number + 1, a["first_step"], a["steps"], a["seconds"], b["seconds"], speed_of(a),
                         speed_of(b), speed_of(b) / speed_of(a) if speed_of(a) else None)
                        for one in shown if one.a and one.b
                        for number, (a, b) in enumerate(zip(one.a["windows"], one.b["windows"], strict=False))), "windows")
    return Figure("windows", title, (Rows(Axis(RATIO, log=True), rows, (Level("the same speed", 1.0),), noise_band(study)),),
                  "Ring: one pair of windows, one of each arm over the same optimizer steps, in the order A B B A. Point "
                  "and whisker: median and interval, as above. Warm-up is left out.", title, (table,))


def loss_difference(found: Sequence[Compared]) -> Figure | Missing:
    """How far apart the losses of the two arms are at every step, on a logarithmic scale."""
    having = [one for one in found if one.a and one.b and one.a["losses"] and one.b["losses"]]
    curves = [(one, _differences(one)) for one in having[:MOST_CURVES]]
    if not curves:
        return Missing("difference of the losses", "The study holds no losses of two arms.")
    real = [value for _, points in curves for _, value in points if value]
    if not real:
        title = "Every compared step has the same loss in both arms, to the digits that were stored"
        return Figure("parity", title, (), "Relative difference of the loss of each step; it is zero throughout, so there is "
                      "nothing to draw.", title, (_difference_table(curves),))
    floor = min(real) / 3
    colours = ("blue", "orange", "green", "red", "purple", "sky")
    marks = tuple(Line(one.name, tuple((step, value or floor) if value is not None else (step, None) for step, value in points),
                       colour) for (one, points), colour in zip(curves, colours, strict=False))
    plot = Plot(Axis("step"), Axis("relative difference of the loss", log=True), marks, height=170)
    largest = max(real)
    title = f"The losses of the arms differ by at most {largest:.2g} of their value at any step"
    return Figure("parity", title, (plot,),
                  "Loss of the same step, on the same examples, with B and with A, as a share of A's. Equal losses are drawn "
                  f"at the bottom ({floor:.1g}). If only rounding differs, the curve starts near the precision of the numbers "
                  "and grows slowly; if the mathematics differs, the curve starts higher.", title,
                  (_difference_table(curves),))


Differences = list[tuple[float, float | None]]


def _differences(one: Compared) -> Differences:
    assert one.a is not None
    assert one.b is not None
    every = one.a.get("curves_every_steps") or 1
    if every != (one.b.get("curves_every_steps") or 1):
        return []
    return [(number * every + 1.0, abs(b - a) / abs(a) if is_number(a) and is_number(b) and a else None)
            for number, (a, b) in enumerate(zip(one.a["losses"], one.b["losses"], strict=False))]


def _difference_table(curves: Sequence[tuple[Compared, Differences]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for one, points in curves:
        a, b = (one.a or {})["losses"], (one.b or {})["losses"]
        rows += [(one.name, round(step), a[i], b[i], value) for i, (step, value) in enumerate(points)]
    return Table(("comparison", "step", "loss A", "loss B", "relative difference"), tuple(rows), "loss of each step")


def counted(verdicts: Sequence[str], order: Sequence[str]) -> str:
    """'3 faster, 2 no effect' in this order, others behind."""
    every = [*order, *sorted(set(verdicts) - set(order))]
    return ", ".join(f"{verdicts.count(word)} {word}" for word in every if word in verdicts)


def speed_words(speed: Mapping[str, Any] | None) -> str:
    if speed is None or not math.isfinite(speed["median"]):
        return "no speed"
    return f"{speed['median']:.3g} times as fast ({speed['low']:.3g} to {speed['high']:.3g})"
