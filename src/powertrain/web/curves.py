"""The curves of a run, or of several: thinned to what a screen can show before anything is drawn."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlencode

import numpy as np

from powertrain.records import WrongUse
from powertrain.records.events import Evaluated
from powertrain.report.chart import COLOURS, Axis, Mark, Plot, Points, Series, Stack
from powertrain.report.page import Figure, Missing, Table
from powertrain.report.run_figures import COLOUR_OF
from powertrain.report.words import count
from powertrain.web.log_lines import PARTS
from powertrain.web.series import Series as Written

ACROSS = 900                 # columns of pixels of the widest drawing: each shows the least and the greatest of its steps
BESIDE = 450                 # of one that stands beside others
FURTHEST = 1e15              # of a range that can be asked for
MOST_BINS = 60               # of the picture of where the time goes
MOST_ROWS = 40               # of the numbers below a curve
SMOOTHED = {"none": 0, "some": 40, "much": 10}           # over a share of the steps: one in so many
X = {"step": "step", "tokens": "trained tokens", "time": "time in steps"}
PART_NAMES = {"data": "data wait"}


@dataclass(frozen=True)
class View:
    """What a reader has chosen to see. The address of a page says it."""

    x: str = "step"
    log: bool = False
    smooth: str = "some"
    low: float | None = None
    high: float | None = None
    chart: str = ""                          # the one that is shown large

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "View":
        """Read what can be read; the rest is as if it had not been said."""
        low, high = (_number(query.get(name, "")) for name in ("from", "to"))
        if low is not None and high is not None and not low < high:
            low = high = None
        x, smooth = query.get("x", ""), query.get("smooth", "")
        return cls(x if x in X else "step", query.get("log") == "yes", smooth if smooth in SMOOTHED else "some", low, high,
                   query.get("chart", "")[:40])

    def query(self, **changes: object) -> str:
        """Return the end of the address of this view, changed."""
        new = replace(self, **changes)       # type: ignore[arg-type]
        values = {"x": new.x if new.x != "step" else "", "log": "yes" if new.log else "", "smooth": "" if new.smooth == "some"
                  else new.smooth, "from": _said(new.low), "to": _said(new.high), "chart": new.chart}
        return "?" + urlencode({name: value for name, value in values.items() if value})

    def choices(self) -> list[tuple[str, list[tuple[str, str, bool]]]]:
        """Return what a reader may choose, each with its address, and whether it is chosen."""
        return [("Across", [(words, self.query(x=x, low=None, high=None), x == self.x) for x, words in X.items()]),
                ("Scale", [("linear", self.query(log=False), not self.log), ("logarithmic", self.query(log=True), self.log)]),
                ("Smoothing", [(name, self.query(smooth=name), name == self.smooth) for name in SMOOTHED])]

    def moved(self, first: float, last: float) -> dict[str, str]:
        """Return the addresses of views that show more, less, or what lies beside, of a run from `first` to `last`."""
        low, high = self.low if self.low is not None else first, self.high if self.high is not None else last
        wide, middle = high - low, (low + high) / 2
        found = {"Zoom in": (middle - wide / 4, middle + wide / 4)}
        if (self.low, self.high) != (None, None):
            found |= {"Zoom out": (middle - wide, middle + wide), "Earlier": (low - wide / 2, high - wide / 2),
                      "Later": (low + wide / 2, high + wide / 2)}
        links = {name: self.query(low=max(first, one), high=min(last, two)) for name, (one, two) in found.items()
                 if max(first, one) < min(last, two)}
        return {**links, **({"All": self.query(low=None, high=None)} if len(found) > 1 else {})}


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < FURTHEST else None      # not for nan either


def _said(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def xs_of(written: Written, x: str) -> np.ndarray:
    """Return where each step lies on the x axis."""
    if x == "step":
        return written["step"]
    total: np.ndarray = np.cumsum(written["tokens" if x == "tokens" else "seconds"])
    return total


def values_at(written: Written, x: str, at: float) -> str:
    """Return the numbers of the step nearest to a place of the x axis, in words; "" where there is none."""
    xs = xs_of(written, x)
    if not len(xs):
        return ""
    right = min(int(np.searchsorted(xs, at)), len(xs) - 1)
    row = right - 1 if right and at - xs[right - 1] < xs[right] - at else right
    seconds = float(written["seconds"][row])
    speed = f"{count(float(written['real_tokens'][row]) / seconds)} tokens/s, " if seconds else ""
    return (f"step {written['step'][row]:,.0f}: loss {written['loss'][row]:.4f}, {speed}gradient norm "
            f"{written['grad_norm'][row]:.3g}, learning rate {written['learning_rate'][row]:.3g}, {seconds:.3g} s")


def asked_place(query: Mapping[str, str]) -> float:
    """Return the place of the x axis that a request asks about. Raises WrongUse."""
    if (at := _number(query.get("at", ""))) is None:
        raise WrongUse("a place on a curve is a number, such as at=100")
    return at


def thinned(xs: np.ndarray, ys: np.ndarray, low: float, high: float, across: int = ACROSS) -> Points:
    """Return the points between `low` and `high`. Where columns have many, those with the least and the greatest value.

    A value that is not finite is kept as a gap.
    """
    inside = np.flatnonzero((xs >= low) & (xs <= high))
    if len(inside) > 4 * across and high > low:
        column = ((xs[inside] - low) / (high - low) * across).astype(np.int64)
        values = ys[inside]
        begins = np.flatnonzero(np.diff(column, prepend=column[0] - 1))
        finite = np.isfinite(values)
        keep = [begins, np.flatnonzero(~finite)]
        for worst, reduce in ((np.inf, np.minimum), (-np.inf, np.maximum)):
            filled = np.where(finite, values, worst)
            extreme = np.repeat(reduce.reduceat(filled, begins), np.diff(begins, append=len(values)))
            hits = np.flatnonzero((filled == extreme) & finite)
            keep.append(hits[np.unique(column[hits], return_index=True)[1]])
        inside = inside[np.unique(np.concatenate(keep))]
    return tuple((x, y if np.isfinite(y) else None) for x, y in zip(xs[inside].tolist(), ys[inside].tolist(), strict=True))


def mean_of(ys: np.ndarray, over: int) -> np.ndarray:
    """Return the mean of `over` neighbouring finite values around each place."""
    finite = np.isfinite(ys)
    sums, counts = (np.concatenate([[0.0], np.cumsum(values)]) for values in (np.where(finite, ys, 0.0), finite))
    places = np.arange(len(ys))
    first, last = np.maximum(places - over // 2, 0), np.minimum(places + over // 2 + 1, len(ys))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: np.ndarray = (sums[last] - sums[first]) / (counts[last] - counts[first])
    return found


def charts(written: Written, view: View) -> list[Figure | Missing]:
    """Return the curves of one run."""
    if not len(written.steps):
        return [Missing("the curves", "No step was done yet.")]
    with np.errstate(invalid="ignore", divide="ignore"):
        speed = written["real_tokens"] / written["seconds"]
    found = [_curve("loss", "Loss", "loss, nats a token", written, written["loss"], view, "blue", held_out=True),
             _curve("speed", "Speed", "tokens a second", written, speed, view, "green", low=0.0),
             _curve("gradient", "Gradient norm", "norm before clipping", written, written["grad_norm"], view, "purple"),
             _curve("rate", "Learning rate", "learning rate", written, written["learning_rate"], replace(view, smooth="none"),
                    "orange", low=0.0),
             _parts(written, view)]
    if np.isfinite(written["rewards_margins"]).any():
        found[1:1] = [_curve("accuracy", "Accuracy", "share judged right", written, written["rewards_accuracies"], view, "blue",
                             low=0.0),
                      _curve("margin", "Margin", "reward of the chosen answer over the rejected one", written,
                             written["rewards_margins"], view, "green")]
    if view.chart in {one.key for one in found}:
        return [replace(next(one for one in found if one.key == view.chart), beside=False)]
    return list(found)


def _ends(xs: np.ndarray, view: View) -> tuple[float, float]:
    return (view.low if view.low is not None else float(xs[0])), (view.high if view.high is not None else float(xs[-1]))


def _curve(key: str, title: str, label: str, written: Written, ys: np.ndarray, view: View, colour: str, *,
           low: float | None = None, held_out: bool = False) -> Figure:
    xs = xs_of(written, view.x)
    first, last = _ends(xs, view)
    over = len(xs) // SMOOTHED[view.smooth] | 1 if SMOOTHED[view.smooth] else 0
    across = ACROSS if view.chart else BESIDE
    points = thinned(xs, ys, first, last, across)
    marks: list[Mark] = [Series("each step", points, colour, "faint" if over > 2 else "line")]
    if over > 2:
        marks.append(Series(f"mean of {over:,} steps", thinned(xs, mean_of(ys, over), first, last, across), colour))
    if held_out and (dots := _held_out(written, xs, first, last)):
        marks.append(Series("held out", dots, "red", "circle"))
    values = [value for _, value in points if value is not None]
    log = view.log and bool(values) and min(values) > 0
    rows = [points[round(number * (len(points) - 1) / (MOST_ROWS - 1))] for number in range(MOST_ROWS)] \
        if len(points) > MOST_ROWS else points
    return Figure(key, title, (Plot(Axis(X[view.x] + (", seconds" if view.x == "time" else ""), low=first, high=last), Axis(
        label, log=log, low=None if log else low), tuple(marks), height=200.0),), "", (Table((view.x, label), tuple(rows)),),
        beside=True)


def _held_out(written: Written, xs: np.ndarray, first: float, last: float) -> Points:
    found = [(float(xs[place - 1]) if place else 0.0, event.loss) for event, place in
             zip(written.others, written.places, strict=True) if isinstance(event, Evaluated)]
    return tuple((x, loss if np.isfinite(loss) else None) for x, loss in found if first <= x <= last)


def _parts(written: Written, view: View) -> Figure:
    """Stack the shares of a step's time, over equal pieces of the run."""
    xs, seconds = xs_of(written, view.x), written["seconds"]
    first, last = _ends(xs, view)
    inside = np.flatnonzero((xs >= first) & (xs <= last))
    pieces = [piece for piece in np.array_split(inside, min(MOST_BINS, max(1, len(inside)))) if len(piece)]
    edges = tuple(float(xs[piece[0]]) for piece in pieces) + ((float(xs[pieces[-1][-1]]),) if pieces else ())
    layers, rest = list[tuple[str, str, tuple[float, ...]]](), np.ones(len(pieces))
    for part in PARTS:
        shares = np.array([written[part][piece].sum() / max(seconds[piece].sum(), 1e-12) for piece in pieces])
        rest = rest - shares
        if len(shares) and shares.max() > 0:
            name = PART_NAMES.get(part, part)
            layers.append((name, COLOUR_OF[name], tuple(100 * shares)))
    if len(rest) and rest.max() > 0.005:
        layers.append(("other", "grey", tuple(100 * np.maximum(rest, 0.0))))
    rows = tuple((name, round(float(np.mean(shares)), 2)) for name, _, shares in layers)
    marks = (Stack(edges, tuple(layers)),) if len(edges) > 1 else ()
    return Figure("parts", "Where a step's time goes", (Plot(
        Axis(X[view.x]), Axis("share of the steps, %", low=0.0, high=100.0), marks, height=200.0),),
                  "Evaluations and saves lie between the steps; the report counts them.",
                  (Table(("part", "share of the time, %"), rows),), beside=True)


def over_each_other(runs: Mapping[str, Written], view: View) -> list[Figure | Missing]:
    """Return the loss and the speed of several runs in one drawing each."""
    known = {name: written for name, written in runs.items() if len(written.steps)}
    if not known:
        return [Missing("the curves", "None of these runs has done a step.")]
    figures: list[Figure | Missing] = []
    for key, title, label in (("loss", "Loss", "loss, nats a token"), ("held", "Held-out loss", "loss, nats a token"),
                              ("speed", "Speed", "tokens a second")):
        marks, last = list[Mark](), max(float(xs_of(written, view.x)[-1]) for written in known.values())
        first, last = view.low if view.low is not None else 0.0, view.high if view.high is not None else last
        for number, (name, written) in enumerate(known.items()):
            xs = xs_of(written, view.x)
            colour, shape = COLOURS[number % len(COLOURS)], "line" if number < len(COLOURS) else "dashed"
            with np.errstate(invalid="ignore", divide="ignore"):
                ys = written["real_tokens"] / written["seconds"] if key == "speed" else written["loss"]
            over = len(ys) // SMOOTHED[view.smooth] | 1 if SMOOTHED[view.smooth] else 0
            points = _held_out(written, xs, first, last) if key == "held" else \
                thinned(xs, mean_of(ys, over) if over > 2 else ys, first, last)
            marks.append(Series(name, points, colour, shape))
        says = "" if key == "held" else "Each curve is a mean of neighbouring steps." if SMOOTHED[view.smooth] else "Each step."
        axes = Axis(X[view.x], low=first, high=last), Axis(label, log=view.log)
        if not any(mark.points for mark in marks if isinstance(mark, Series)):
            continue
        figures.append(Figure(key, title, (Plot(*axes, tuple(marks)),), says, ()))
    return figures
