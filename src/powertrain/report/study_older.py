"""The page of studies that were written before studies had kinds: step times, a ratio and losses of two or more arms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from powertrain.records import WrongUse
from powertrain.report.chart import Axis, Line, Plot
from powertrain.report.figures import duration
from powertrain.report.page import Block, Code, Figure, Missing, Number, Page, Section, Table, facts
from powertrain.report.svg import is_number

COLOURS = ("blue", "orange", "green", "red", "purple", "sky")


def page(study: Mapping[str, Any], folder: str, made: str) -> Page:
    """Return the page. Raises WrongUse for an object that is no study."""
    if not isinstance(study.get("arms"), Mapping) or "what" not in study:
        raise WrongUse(f"{folder}/evidence.json has neither a kind nor arms, so it is no study of powertrain")
    try:
        ratio, times = study.get("step_time_b_over_a") or study.get("speedup"), study.get("step_s") or {}
        steps: Block = Table(("arm", "median (s)", "lowest (s)", "highest (s)", "steps"), tuple(
            (name, found["median"], found["lowest"], found["highest"], found["steps"]) for name, found in times.items()),
            "Seconds of a step, of all runs of the arm after warm-up") if times else \
            Missing("step times", "The study timed nothing; it compares losses.")
        return Page("study", study.get("study") or folder, study["what"], _verdict(study, ratio), "open",
                    tuple(_numbers(study, ratio)), (
            "The study has an older form: single steps instead of paired windows, and no A/A control, so the noise of the "
            "machine is not known.",), (
            Section("Step times", (steps,)), Section("Losses", tuple(_losses(study))),
            Section("How it was measured", tuple(_method(study)))), made)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WrongUse(f"{folder}/evidence.json is no study of any version ({type(error).__name__}: {error})") from None


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


def _losses(study: Mapping[str, Any]) -> Iterator[Block]:
    curves = {name: (runs[0]["losses"], runs[0].get("curves_every_steps") or 1) for name, runs in study["arms"].items()
              if runs and runs[0].get("losses")}
    if not curves:
        yield Missing("losses", "The study holds none.")
        return
    marks = tuple(Line(name, tuple((1.0 + i * every, loss) for i, loss in enumerate(losses)), COLOURS[number % len(COLOURS)])
                  for number, (name, (losses, every)) in enumerate(list(curves.items())[:len(COLOURS)]))
    title = "Loss of the same steps: " + ", ".join(f"{name} ends at {losses[-1]:.4g}" for name, (losses, _) in curves.items())
    yield Figure("losses", title, (Plot(Axis("step"), Axis("loss, nats a token"), marks),),
                 "The first run of each arm, on the same examples.", title,
                 (Table(("arm", "step", "loss"), tuple((name, 1 + i * every, loss) for name, (losses, every) in curves.items()
                                                       for i, loss in enumerate(losses))),))
    (first, (base, base_every)), *others = curves.items()
    apart = [(name, max((abs(b - a) / abs(a) for a, b in zip(base, losses, strict=False)
                         if is_number(a) and is_number(b) and a), default=None))
             for name, (losses, every) in others if every == base_every]
    if apart:
        yield Table(("arm", "largest relative difference"), tuple(apart), f"Losses against those of {first}")


def _method(study: Mapping[str, Any]) -> Iterator[Block]:
    yield facts("Method", (("what", study["what"]), ("date", study.get("date")), ("recipe", study.get("recipe")),
                           ("warm-up steps left out", study.get("warm_up_steps")),
                           *((f"machine: {key}", value) for key, value in (study.get("machine") or {}).items())))
    lines = [f"{name}: {' '.join(runs[0]['words'])}" for name, runs in study["arms"].items() if runs and runs[0].get("words")]
    if lines:
        yield Code("\n".join(lines), "What each arm was started with")
