"""What the run learned: loss over tokens and time, gradient norm and learning rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from powertrain.records.events import Evaluated
from powertrain.records.timeline import History, held_out_trend, smoothed
from powertrain.report.chart import Axis, Level, Moments, Plot, Series
from powertrain.report.figures import count
from powertrain.report.page import Figure, Missing, Table

SMOOTHED_SHARE = 1 / 40      # of the steps: over so many the faint line is smoothed
LEAST_SMOOTHED = 5


def loss(history: History) -> Figure | Missing:
    steps, evaluations = history.steps, history.of(Evaluated)
    if not steps:
        return Missing("loss", "No step was done.")
    tokens = list(itertools.accumulate(step.tokens for step in steps))
    raw = [step.loss for step in steps]
    over = max(LEAST_SMOOTHED, round(len(steps) * SMOOTHED_SHARE)) | 1
    mean = smoothed(raw, over)
    tokens_at = dict(zip((step.step for step in steps), tokens, strict=True))
    held_out = [(tokens_at.get(one.after_step, 0), one.at_s, one.event.loss) for one in evaluations]
    wall_s = history.wall_s
    unit, scale = ("hours", 3600.0) if wall_s > 3 * 3600 else ("minutes", 60.0) if wall_s > 180 else ("seconds", 1.0)
    plots = tuple(_loss_plot(title, axis, xs, raw, mean, evaluated, over) for title, axis, xs, evaluated in (
        ("Over trained tokens", "trained tokens", tokens, [(at, value) for at, _, value in held_out]),
        ("Over time", f"time since the first step began, {unit}", [end / scale for end in history.ends_s],
         [(at / scale, value) for _, at, value in held_out])))
    table = Table(("step", "trained tokens", "time (s)", "training loss (nats/token)", "smoothed"),
                  tuple((step.step, seen, round(end, 4), value, average) for step, seen, end, value, average
                        in zip(steps, tokens, history.ends_s, raw, mean, strict=True)), "training loss")
    evaluated = Table(("step", "trained tokens", "time (s)", "held-out loss (nats/token)", "held-out tokens", "bits per byte"),
                      tuple((one.after_step, seen, round(at, 4), value, one.event.tokens, one.event.bits_per_byte)
                            for one, (seen, at, value) in zip(evaluations, held_out, strict=True)), "held-out loss")
    return Figure(
        "loss", _loss_title(mean, held_out, tokens[-1]), plots,
        f"Faint line: the loss of each step, in nats per trained token. Line: the mean of {over} neighbouring steps. Points: "
        "the loss on held-out text, which is never trained on"
        + (". The last point covers all held-out text, the earlier points cover max_eval_samples of it"
           if len(held_out) > 1 and evaluations[-1].event.final else "")
        + ". Time includes evaluations and checkpoints.", (table, evaluated) if held_out else (table,), beside=True)


def _loss_title(mean: list[float | None], held_out: list[tuple[int, float, float]], tokens: int) -> str:
    if len(held_out) > 1:
        return f"Held-out loss went from {held_out[0][2]:.3f} to {held_out[-1][2]:.3f} over {count(tokens)} trained tokens"
    known = [value for value in mean if value is not None]
    if not known:
        return "No step has a finite loss"
    at_the_end = f"; held out it is {held_out[0][2]:.3f}" if held_out else "; nothing was held out and evaluated"
    return f"Training loss went from {known[0]:.3f} to {known[-1]:.3f} over {count(tokens)} trained tokens{at_the_end}"


def _loss_plot(title: str, axis: str, xs: Sequence[float], raw: list[float], mean: list[float | None],
               evaluated: Sequence[tuple[float, float]], over: int) -> Plot:
    marks = (Series("each step", tuple(zip(xs, raw, strict=True)), "blue", "faint"),
             Series(f"mean of {over} steps", tuple(zip(xs, mean, strict=True)), "blue"),
             *((Series("held out", tuple(evaluated), "red", "circle"),) if evaluated else ()),
             *_gaps(xs, raw))
    return Plot(Axis(axis, low=0.0), Axis("loss, nats a token"), marks, title)


def _gaps(xs: Sequence[float], raw: list[float]) -> tuple[Moments, ...]:
    broken = tuple(float(x) for x, value in zip(xs, raw, strict=True) if value is None or not math.isfinite(value))
    return (Moments("not finite", broken, "orange"),) if broken else ()


def signals(history: History, limit: float | None) -> Figure | Missing:
    """Gradient norm and learning rate. `limit`: the norm above which gradients are scaled down; 0 or None for none."""
    steps = history.steps
    if not steps:
        return Missing("gradient norm and learning rate", "No step was done.")
    numbers = [step.step for step in steps]
    norms = [step.grad_norm for step in steps]
    finite = [norm for norm in norms if norm is not None and math.isfinite(norm)]
    log = bool(finite) and min(finite) > 0 and max(finite) / min(finite) > 30
    norm_plot = Plot(Axis("step"), Axis("gradient norm before clipping", log=log),
                     (Series("each step", tuple(zip(numbers, norms, strict=True)), "purple"),
                      *((Level(f"clipped above {limit:g}", float(limit), "red"),) if limit else ()),
                      *_gaps(numbers, norms)), "Gradient norm", height=170)
    rates = Series("each step", tuple((step.step, step.learning_rate) for step in steps), "green")
    rate_plot = Plot(Axis("step"), Axis("learning rate", low=0.0), (rates,), "Learning rate", height=170)
    clipped = sum(norm > limit for norm in finite) if limit else 0
    title = (f"{clipped:,} of {len(steps):,} steps had a gradient above {limit:g} and were scaled down" if limit and clipped
             else f"No gradient was above {limit:g}, so none was scaled down" if limit else
             f"The gradient norm lay between {min(finite, default=0):.3g} and {max(finite, default=0):.3g}, not clipped")
    table = Table(("step", "gradient norm", "learning rate"),
                  tuple((step.step, step.grad_norm, step.learning_rate) for step in steps))
    return Figure("signals", title, (norm_plot, rate_plot),
                  "The norm of all gradients before clipping, and the learning rate, of each step."
                  + (" The axis of the norm is logarithmic." if log else ""), (table,), beside=True)


def evaluations_say(history: History) -> str:
    """'held-out loss 3.819 at step 120' of the last evaluation, or ''."""
    found = history.of(Evaluated)
    return f"held-out loss {found[-1].event.loss:.4f} at step {found[-1].after_step:,}" if found else ""


def still_falling(history: History) -> str | None:
    """What the evaluations say about stopping where the run stopped; None where they say nothing."""
    if (found := held_out_trend(history)) is None:
        return None
    (best_step, best), (before_step, before), (last_step, last) = found.best, found.all[-2], found.all[-1]
    if found.trend == "risen":
        return (f"The held-out loss was lowest at step {best_step:,} ({best:.4f}) and rose to {last:.4f}: "
                "longer training made the model worse.")
    if found.trend == "falling":
        return (f"The held-out loss was still falling when the run ended ({before:.3f} at step {before_step:,}, "
                f"{last:.3f} at step {last_step:,}): with more steps the model would learn more.")
    return None
