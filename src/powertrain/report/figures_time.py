"""Where a run's time went, and how fast it was: parts of the wall time, throughput, padding."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from powertrain.records.events import End, Evaluated, Event, ModelSaved, Note, Resume, RunWarning, Sample, Saved
from powertrain.records.timeline import NOT_SPLIT, OTHER, History, bins, smoothed, spread, steady_speeds, warm_ups
from powertrain.report import chart
from powertrain.report.chart import Axis, Moments, Plot, Point, Row, Rows, Segment, Series, stacked
from powertrain.report.figures import count, duration
from powertrain.report.page import Figure, Missing, Table, several

COLOUR_OF: Mapping[str, str] = {
    "data wait": "orange", "copy": "ink", "forward": "blue", "backward": "sky", "optimizer": "green", NOT_SPLIT: "blue",
    "evaluation": "purple", "samples": "yellow", "checkpoint": "red", OTHER: "grey"}
MARKED: tuple[tuple[type[Event], str], ...] = ((Evaluated, "purple"), (Saved, "red"), (RunWarning, "orange"))
LISTED = (Evaluated, Saved, RunWarning, Resume, Sample, ModelSaved, End)
MOST_BINS = 60
ROLLING_SHARE = 1 / 30


def breakdown(history: History) -> Figure | Missing:
    """The wall time by part, as one bar and over the run. The parts sum to the wall time."""
    if not history.wall_s or not history.steps:
        return Missing("step-time breakdown", "No step was done.")
    parts, wall_s, steps = history.parts, history.wall_s, len(history.steps)
    whole = Row("all of the run", stacked(parts, wall_s / 100, COLOUR_OF, OTHER))
    bar = Rows(Axis("% of the wall time", low=0.0, high=100.0), (whole,))
    table = Table(("part", "seconds", "% of the wall time", "ms a step"),
                  (*((part, seconds, 100 * seconds / wall_s, 1e3 * seconds / steps) for part, seconds in parts.items()),
                   ("all (the wall time)", wall_s, 100.0, 1e3 * wall_s / steps)), "time by part")
    area, over_run = _over_run(history, list(parts))
    largest = max(parts, key=lambda part: parts[part])
    model = sum(parts.get(part, 0.0) for part in ("forward", "backward", "optimizer", NOT_SPLIT))
    title = (f"{model / wall_s:.0%} of the {duration(wall_s)} went into the model and its optimizer; the largest part is "
             f"{largest} ({parts[largest] / wall_s:.0%})")
    return Figure(
        "step-time", title, (bar, area),
        "The parts add up to the wall time, from the start of the first step to the last event. data wait: waiting for the "
        "examples of a step; copy: copying them to the device; forward, backward, optimizer: "
        + ("time between two events on the device's stream, without the work that the host does meanwhile"
           if history.start.device == "cuda" else "time of the computation on the CPU")
        + "; checkpoint: saving, with the final model; other: everything else (logging, freeing memory, waiting). "
          f"Below: the same over the run, in {len(over_run.rows)} groups of steps.",
        (table, over_run), f"A stacked bar and stacked areas of the wall time by part. {title}.")


def _over_run(history: History, parts: list[str]) -> tuple[Plot, Table]:
    groups = bins(len(history.spent), MOST_BINS)
    first = history.steps[0].step
    sums = [{part: sum(spent.get(part, 0.0) for spent in history.spent[low:high]) for part in parts} for low, high in groups]
    totals = [sum(found.values()) or 1.0 for found in sums]
    edges = tuple(float(first + low) for low, _ in groups) + (float(first + groups[-1][1]),)
    layers = tuple((part, COLOUR_OF[part], tuple(100 * found[part] / total for found, total in zip(sums, totals, strict=True)))
                   for part in parts)
    plot = Plot(Axis("step"), Axis("% of the time", low=0.0, high=100.0), (chart.Stack(edges, layers),), "Over the run",
                height=190, legend=False)
    table = Table(("from step", "to step", *(f"{part} (ms a step)" for part in parts)),
                  tuple((first + low, first + high - 1, *(1e3 * found[part] / (high - low) for part in parts))
                        for (low, high), found in zip(groups, sums, strict=True)), "time by part over the run")
    return plot, table


def throughput(history: History) -> Figure | Missing:
    """Tokens per second of each step, with what happened beside it."""
    found = steady_speeds(history)
    if not found:
        return Missing("throughput", "No step has a time.")
    speeds, xs = history.speeds, [step.step for step in history.steps]
    low, middle, high = spread(found)
    over = max(5, round(len(speeds) * ROLLING_SHARE)) | 1
    warm = warm_ups(history)
    happened = [(kind.kind, colour, tuple(float(one.after_step) for one in history.of(kind))) for kind, colour in MARKED]
    happened.append(("continued", "green", tuple(float(step) for step in history.sessions[1:])))
    marks: tuple[chart.Mark, ...] = (
        chart.Band("10 to 90% of the steps", low, high, "blue"),
        *(chart.Span("warm-up", xs[places[0]] - 0.5, xs[places[-1]] + 0.5) for places in warm),
        Series("each step", tuple(zip(xs, speeds, strict=True)), "blue", "faint"),
        Series(f"median of {over} steps", tuple(zip(xs, smoothed(speeds, over, statistics.median), strict=True)), "blue"),
        chart.Level(f"median {count(middle)}", middle),
        *(Moments(kind, at, colour) for kind, colour, at in happened if at))
    plot = Plot(Axis("step"), Axis("real tokens per second", low=0.0), marks)
    warm_count = sum(map(len, warm))
    together = sum(step.real_tokens for step in history.steps) / sum(step.seconds for step in history.steps)
    title = (f"{count(middle)} tokens/s in the median step, {count(together)} over all steps together"
             if len(found) > 1 else f"{count(middle)} tokens/s in the one step that counts")
    table = Table(("step", "ends at (s)", "seconds", "real tokens", "real tokens/s", "warm-up"),
                  tuple((step.step, round(end, 4), step.seconds, step.real_tokens, speed,
                         "yes" if any(place in places for places in warm) else "no")
                        for place, (step, end, speed) in enumerate(zip(history.steps, history.ends_s, speeds, strict=True))),
                  "speed of each step")
    events = Table(("after step", "at (s)", "what", "seconds", "said"),
                   tuple((one.after_step, round(one.at_s, 4), one.event.kind, getattr(one.event, "seconds", None),
                          _said(one.event)) for one in history.happened if isinstance(one.event, LISTED)),
                   "what happened beside the steps")
    return Figure(
        "throughput", title, (plot,),
        "Real tokens (no padding) per second of each step, without evaluations and checkpoints. "
        + (f"Warm-up ({several(warm_count, 'step')}: the first of a session until one reaches 80% of the "
           "median speed) is drawn, and is not in the median or the band" if warm_count else "No step was left out as warm-up")
        + ". Upright marks: what happened after that step.", (table, events),
        f"Tokens per second over the steps. {title}.")


def _said(event: Event) -> str:
    return event.sentence if isinstance(event, (RunWarning, Note)) else event.message if isinstance(event, End) else ""


def tokens(history: History) -> Figure | Missing:
    """What was computed on: trained, read without being trained, padding."""
    steps = history.steps
    if not steps:
        return Missing("padding", "No step was done.")
    trained, real = sum(step.tokens for step in steps), sum(step.real_tokens for step in steps)
    if steps[0].padding_tokens is None:
        return Missing("padding", "The run was written before steps recorded their padding.")
    padding = sum(step.padding_tokens or 0 for step in steps)
    computed = real + padding
    shares = {"trained": trained, "read, not trained": real - trained, "padding": padding}
    bar = stacked(shares, computed / 100, {"trained": "green", "read, not trained": "sky", "padding": "grey"}, "padding")
    seconds = sum(step.seconds for step in steps)
    title = (f"{padding / computed:.1%} of the computed tokens were padding" if padding else "No token was padding") + (
        f"; {trained / computed:.0%} were trained" if trained != computed else ", and every token was trained")
    table = Table(("tokens", "number", "% of the computed", "per second of training"),
                  tuple((name, number, 100 * number / computed, number / seconds if seconds else None)
                        for name, number in shares.items()), "tokens of all steps")
    return Figure("tokens", title, (Rows(Axis("% of the computed tokens", low=0.0, high=100.0),
                                         (Row("all steps", bar),)),),
                  "Counted in each step. Trained: tokens that count in the loss. Read, not trained: prompts and templates. "
                  "Padding: empty slots that make documents equally long. Tokens per second count trained and read tokens.",
                  (table,))


def prediction(history: History, estimate: Mapping[str, Any] | None) -> Figure | Missing:
    """The plan's expectation beside the measured speed."""
    found = steady_speeds(history)
    if not estimate or not found:
        return Missing("expected against measured speed", "The plan expected no speed, because a fact it needs was unknown."
                       if not estimate else "No step has a time.")
    slow, fast = (estimate["tokens_per_step"] / seconds for seconds in reversed(estimate["step_s"]))
    ceiling = estimate["tokens_per_step"] / estimate["floor_s"]
    low, middle, high = spread(found)
    verdict = "inside" if slow <= middle <= fast else "faster than expected" if middle > fast else "slower than expected"
    row = Row("tokens per second", (Segment(slow, fast, "grey", "expected", thin=True),),
              (Point(middle, "blue", low, high, "measured, median and 10 to 90%"),
               Point(ceiling, "red", label=f"ceiling: {estimate['bound_by']} at the measured peak", shape="bar")), verdict,
              "good" if verdict == "inside" else "open")
    table = Table(("", "low", "median", "high"), (("expected (tokens/s)", slow, None, fast),
                                                  ("measured (tokens/s)", low, middle, high),
                                                  ("ceiling (tokens/s)", None, ceiling, None)))
    title = {"inside": f"The measured {count(middle)} tokens/s lie inside the plan's {count(slow)} to {count(fast)}",
             }.get(verdict, f"At {count(middle)} tokens/s the run was {verdict}: the plan said {count(slow)} to {count(fast)}")
    return Figure("prediction", title, (Rows(Axis("real tokens per second", log=True), (row,)),),
                  f"Expected before the first step; its basis: {estimate.get('basis', 'not said')}. The ceiling is what "
                  f"{estimate['bound_by']} alone allows at the peak measured on this machine.", (table,))
