"""Studies that were written before they had kinds: step times, a ratio and losses of two or more arms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from powertrain.records import WrongUse
from powertrain.report.chart import Axis, Line, Plot, Point, Row, Rows
from powertrain.report.figures import duration
from powertrain.report.page import Block, Code, Figure, Missing, Number, Page, Section, Table, facts
from powertrain.report.svg import is_number

COLOURS = ("blue", "orange", "green", "red", "purple", "sky")
MOST_CURVES = 6


def page(study: Mapping[str, Any], folder: str, made: str) -> Page:
    """Raises WrongUse for an object that is no study at all."""
    if not isinstance(study.get("arms"), Mapping) or "what" not in study:
        raise WrongUse(f"{folder}/evidence.json says neither its kind nor its arms, so it is no study of powertrain")
    try:
        ratio = study.get("step_time_b_over_a") or study.get("speedup")
        numbers = tuple(_numbers(study, ratio))
        return Page("study", study.get("study") or folder, study["what"], _verdict(study, ratio), "open", numbers, (
            "The study was written in an older form: single steps instead of paired windows, and no A/A control, so the noise "
            "of the machine is not known.",), (
            Section("Step times", (_step_times(study),)), Section("Losses", tuple(_losses(study))),
            Section("How it was measured", tuple(_method(study)))), made)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WrongUse(f"{folder}/evidence.json is no study as any version wrote them ({type(error).__name__}: {error})"
                       ) from None


def _verdict(study: Mapping[str, Any], ratio: Mapping[str, Any] | None) -> str:
    if ratio is not None and "speedup" in study:
        return f"{ratio['ratio']:.3g} times as fast ({ratio['low']:.3g} to {ratio['high']:.3g}): {study['what']}."
    if ratio is not None:
        return (f"A step of B takes {ratio['ratio']:.3g} times as long as one of A ({ratio['low']:.3g} to {ratio['high']:.3g})"
                f": B is {' '.join(study['b'])}, A is {' '.join(study['a'])}.")
    largest = study.get("largest_difference")
    if isinstance(largest, Mapping):
        return "Largest difference of a loss: " + ", ".join(f"{name} {value:.3g}" for name, value in largest.items()) + "."
    return f"{study['what']}."


def _numbers(study: Mapping[str, Any], ratio: Mapping[str, Any] | None) -> Iterator[Number]:
    if ratio is not None:
        what = "times as fast" if "speedup" in study else "step time of B over A"
        yield Number(f"x {ratio['ratio']:.3g}", what, f"interval {ratio['low']:.3g} to {ratio['high']:.3g}")
    for name, times in (study.get("step_s") or {}).items():
        yield Number(duration(times["median"]), f"median step of {name}", f"{times['steps']} steps")


def _step_times(study: Mapping[str, Any]) -> Figure | Missing:
    times = study.get("step_s")
    if not times:
        return Missing("step times", "The study timed nothing; it compares losses.")
    rows = tuple(Row(name, (), (Point(found["median"], COLOURS[i % len(COLOURS)], found["lowest"], found["highest"]),))
                 for i, (name, found) in enumerate(times.items()))
    least, most = (pick(times.items(), key=lambda item: item[1]["median"]) for pick in (min, max))
    title = (f"The median step takes {duration(least[1]['median'])} with {least[0]} and "
             f"{duration(most[1]['median'])} with {most[0]}")
    return Figure("step-times", title, (Rows(Axis("seconds of a step", low=0.0), rows),),
                  "Point: median over the steps of all runs of the arm after warm-up. Whisker: lowest and highest step.",
                  title, (Table(("arm", "median (s)", "lowest (s)", "highest (s)", "steps"),
                                tuple((name, found["median"], found["lowest"], found["highest"], found["steps"])
                                      for name, found in times.items())),))


def _losses(study: Mapping[str, Any]) -> Iterator[Block]:
    curves = {name: (runs[0]["losses"], runs[0].get("curves_every_steps") or 1) for name, runs in study["arms"].items()
              if runs and runs[0].get("losses")}
    if not curves:
        yield Missing("losses", "The study holds none.")
        return
    marks = tuple(Line(name, tuple((1.0 + i * every, loss) for i, loss in enumerate(losses)), COLOURS[number % len(COLOURS)])
                  for number, (name, (losses, every)) in enumerate(list(curves.items())[:MOST_CURVES]))
    title = "Loss of the same steps: " + ", ".join(f"{name} ends at {losses[-1]:.4g}" for name, (losses, _) in curves.items())
    yield Figure("losses", title, (Plot(Axis("step"), Axis("loss, nats a token"), marks),),
                 "The first run of each arm, on the same examples.", title,
                 (Table(("arm", "step", "loss"), tuple((name, 1 + i * every, loss) for name, (losses, every) in curves.items()
                                                       for i, loss in enumerate(losses))),))
    yield _difference(curves)


def _difference(curves: Mapping[str, tuple[list[float], int]]) -> Block:
    (first, (base, every)), *others = curves.items()
    found = {name: [(1.0 + i * every, abs(b - a) / abs(a)) for i, (a, b) in enumerate(zip(base, losses, strict=False))
                    if is_number(a) and is_number(b) and a] for name, (losses, own) in others if own == every}
    real = [value for points in found.values() for _, value in points if value]
    if not real:
        return Missing("difference of the losses", f"No loss differs from {first} in the digits that were stored."
                       if found else "There is nothing to compare with.")
    floor = min(real) / 3
    title = f"The losses differ from {first} by at most {max(real):.2g} of their value"
    marks = tuple(Line(name, tuple((step, value or floor) for step, value in points), COLOURS[(i + 1) % len(COLOURS)])
                  for i, (name, points) in enumerate(found.items()))
    return Figure("parity", title, (Plot(Axis("step"), Axis("relative difference of the loss", log=True), marks, height=170),),
                  f"Per step, as a share of {first}'s loss; equal losses are drawn at the foot ({floor:.1g}).", title,
                  (Table(("arm", "step", "relative difference"),
                         tuple((name, round(step), value) for name, points in found.items() for step, value in points)),))


def _method(study: Mapping[str, Any]) -> Iterator[Block]:
    machine = study.get("machine") or {}
    yield facts("Method", (("what", study["what"]), ("date", study.get("date")), ("recipe", study.get("recipe")),
                           ("warm-up steps left out", study.get("warm_up_steps")),
                           *((f"machine: {key}", value) for key, value in machine.items())))
    lines = [f"{name}: {' '.join(runs[0]['words'])}" for name, runs in study["arms"].items() if runs and runs[0].get("words")]
    if lines:
        yield Code("\n".join(lines), "What each arm was started with")
