"""How soon two recipes reach the same loss: in steps, and in epochs.

Both train equally many steps from the same weights, several times with other seeds. The target is the loss that the worse of
the two has at its end, so both reach it, and the first step at which their smoothed loss is there is what counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from powertrain.claims.probes.probe import FEWEST, Context, Measured, by_turns, one_of
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import quiet
from powertrain.evidence.stats import interval
from powertrain.recipe import resolve_words
from powertrain.run.prepare import build_setup, prepare, schedule_of
from powertrain.training.loop import new_state, train

SMOOTHED = 10                                # steps whose losses are averaged
METRICS = ("steps", "epochs")


def measure(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str], steps: int = 120,
            repeats: int = FEWEST, metric: str = "steps") -> Measured:
    """metric "steps": how many times sooner arm b is there than arm a; "epochs": the same in epochs of its data.

    The schedules are the recipes' own, over `steps` steps. Detail: `passes_per_epoch_a` and `_b`, how often an epoch reads
    each token.
    """
    one_of("metric", metric, METRICS)
    found, passes = apart(_reached, [*words, *a], [*words, *b], context.cache, context.deadline, steps, repeats)
    in_steps = interval([one / other for (one, _), (other, _) in found])
    in_epochs = interval([one / other for (_, one), (_, other) in found])
    names = (" ".join(a) or "as it is", " ".join(b) or "as it is")
    detail = {
        "steps": {name: statistics.median(arms[i][0] for arms in found) for i, name in enumerate(names)},
        "epochs": {name: statistics.median(arms[i][1] for arms in found) for i, name in enumerate(names)},
        "times_fewer_steps": vars(in_steps), "times_fewer_epochs": vars(in_epochs), "seeds": len(found),
        "passes_per_epoch_a": passes[0], "passes_per_epoch_b": passes[1]}
    return Measured(in_steps if metric == "steps" else in_epochs, "times as fast", *names, detail)


Reached = tuple[float, float]                # steps and epochs until the target


def _reached(a: Sequence[str], b: Sequence[str], cache: Path, deadline: float, steps: int,
             repeats: int) -> tuple[list[tuple[Reached, Reached]], tuple[float, float]]:
    """For each seed what each arm took, and how often an epoch of each reads a token."""
    curves: list[list[Curve]] = [[], []]

    def run(arm: int) -> float:
        curve, passes = _curve([*(a, b)[arm], f"seed={len(curves[arm])}"], cache, steps)
        curves[arm].append(curve)
        return passes

    rounds = by_turns([lambda: run(0), lambda: run(1)], deadline, repeats)
    return [first_at(one, other) for one, other in zip(*curves, strict=True)], (rounds[0][0], rounds[0][1])


Curve = tuple[list[float], float]            # the loss of each step, and the steps of an epoch


def first_at(one: Curve, other: Curve) -> tuple[Reached, Reached]:
    """Steps and epochs of each until its smoothed loss is where the worse of both ends."""
    smooth = [smoothed(losses) for losses, _ in (one, other)]
    target = max(curve[-1] for curve in smooth)
    taken = [next(step for step, loss in enumerate(curve, SMOOTHED) if loss <= target) for curve in smooth]
    return (taken[0], taken[0] / one[1]), (taken[1], taken[1] / other[1])


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last steps' losses, from the first step that has so many behind it."""
    return [statistics.fmean(losses[end - SMOOTHED:end]) for end in range(SMOOTHED, len(losses) + 1)]


def _curve(words: Sequence[str], cache: Path, steps: int) -> tuple[Curve, float]:
    """A whole run of `steps` steps, and how often an epoch of its data reads a token."""
    prepared = prepare(resolve_words([*words, f"max_steps={steps}"]), cache, quiet)
    setup, recipe = build_setup(prepared), prepared.recipe
    state = new_state(setup, recipe.weight_decay)
    losses = [result.loss for result in train(setup, state, schedule_of(recipe, steps), recipe.max_grad_norm)]
    return ([float(loss) for loss in losses], prepared.steps_per_epoch), prepared.facts.data.redundancy
