"""Probes of whole runs: epochs, start-up, unlike recipes, and how soon a loss is reached."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from powertrain.claims.probes.probe import (
    FEWEST,
    REPEATS,
    Context,
    Measured,
    Rounds,
    Training,
    apart,
    by_turns,
    medians,
    one_of,
    open_training,
    quiet,
    ratio,
    seconds_of,
)
from powertrain.evidence.stats import interval
from powertrain.facts.hardware import read_hardware
from powertrain.recipe import resolve_words
from powertrain.records.event_log import read_events
from powertrain.records.events import End, Evaluated, Saved
from powertrain.run.prepare import build_setup, prepare, schedule_of
from powertrain.run.session import start_run
from powertrain.training.evaluation import evaluate, spread
from powertrain.training.loop import new_state, train
from powertrain.use.sampling import write_sample

# ------------------------------------------------------------------------------------------------ epochs
# Whether an epoch lasts as long as its examples divided by examples a second, as documents add it up.

TENTH = 10


def epochs(context: Context, *, words: Sequence[str], steps: int = 20, probe_steps: int = 10,
           repeats: int = REPEATS) -> Measured:
    """Return the wall time of an epoch with an evaluation, over its examples divided by the examples per second.

    The epoch has `steps` steps, and the speed is that of `probe_steps` steps. The evaluation reads a tenth as many examples
    as the epoch.
    """
    rounds, examples = apart(_epoch_rounds, words, context.cache, context.deadline, steps, probe_steps, repeats)
    names = ("examples over examples a second", "an epoch's wall time")
    value = interval([epoch_s / added_up_s for added_up_s, epoch_s in rounds])
    found = medians(rounds, names)
    return Measured(value, "of the time that was added up", *names,
                    {"seconds": found, "examples_per_s": steps * examples / found[names[0]]})


def _epoch_rounds(words: Sequence[str], cache: Path, deadline: float, steps: int, probe_steps: int,
                  repeats: int) -> tuple[Rounds, int]:
    """Return (seconds added up, seconds of an epoch) of each repeat, and the examples of a step."""
    training = open_training(words, cache)
    rounds = by_turns([lambda: steps * training.step_s(probe_steps),
                       lambda: seconds_of(lambda: _epoch(training, steps), training.setup.device)], deadline, repeats)
    return rounds, training.examples_per_step


def _epoch(training: Training, steps: int) -> None:
    training.advance(steps)
    held_out = spread(training.prepared.material.held_out, max(1, steps * training.examples_per_step // TENTH))
    if len(held_out):
        evaluate(training.setup, held_out, tokens_per_byte=None)


# ------------------------------------------------------------------------------------------------ start_up
# From the recipe to everything that is needed for the first step: with the text tokenised before, and for the first time.

START_NAMES = ("text not tokenised yet", "text tokenised before")


def start_up(context: Context, *, words: Sequence[str], repeats: int = FEWEST) -> Measured:
    """Return how many times sooner the first step may begin with tokenised text."""
    rounds = apart(_start_rounds, words, context.cache, context.folder, context.deadline, repeats)
    return Measured(ratio(rounds, 0, 1), "times as fast", *START_NAMES, {"seconds": medians(rounds, START_NAMES)})


def _start_rounds(words: Sequence[str], cache: Path, folder: Path, deadline: float, repeats: int) -> Rounds:
    read_hardware(cache)                     # the machine's peaks are measured once, and are not the data's matter
    resolved, here = resolve_words(words), torch.device("cpu")

    def fresh() -> Path:
        beside = Path(tempfile.mkdtemp(dir=folder)) / "cache"
        shutil.copytree(cache / "hardware", beside / "hardware")
        return beside

    def seconds(where: Path) -> float:
        return seconds_of(lambda: build_setup(prepare(resolved, where, quiet)), here)

    kept = fresh()
    seconds(kept)
    return by_turns([lambda: seconds(fresh()), lambda: seconds(kept)], deadline, repeats)


# ------------------------------------------------------------------------------------------------ target_loss
# How soon two recipes reach the same loss: in steps, and in epochs.
#
# Both train equally many steps from the same weights, several times with other seeds. The target is the loss that the worse of
# the two has at its end, so both reach it, and the first step at which their smoothed loss is there is what counts.

SMOOTHED = 10                                # steps whose losses are averaged
TARGET_METRICS = ("steps", "epochs")


def target_loss(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str], steps: int = 120,
                repeats: int = FEWEST, metric: str = "steps") -> Measured:
    """Return how many times sooner arm b reaches the loss than arm a, in "steps" or in "epochs" of its data.

    The schedules are the recipes' own, over `steps` steps. Detail: `passes_per_epoch_a` and `_b`, how often an epoch reads
    each token.
    """
    one_of("metric", metric, TARGET_METRICS)
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
    """Return the steps and epochs of both arms for each seed, and how often an epoch of each arm reads a token."""
    curves: list[list[Curve]] = [[], []]

    def run(arm: int) -> float:
        curve, passes = _curve([*(a, b)[arm], f"seed={len(curves[arm])}"], cache, steps)
        curves[arm].append(curve)
        return passes

    rounds = by_turns([lambda: run(0), lambda: run(1)], deadline, repeats)
    return [first_at(one, other) for one, other in zip(*curves, strict=True)], (rounds[0][0], rounds[0][1])


Curve = tuple[list[float], float]            # the loss of each step, and the steps of an epoch


def first_at(one: Curve, other: Curve) -> tuple[Reached, Reached]:
    """Return steps and epochs of each until its smoothed loss reaches the worse of the two final losses."""
    smooth = [smoothed(losses) for losses, _ in (one, other)]
    target = max(curve[-1] for curve in smooth)
    taken = [next(step for step, loss in enumerate(curve, SMOOTHED) if loss <= target) for curve in smooth]
    return (taken[0], taken[0] / one[1]), (taken[1], taken[1] / other[1])


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the running mean of the losses, from the first step that has enough steps before it."""
    return [statistics.fmean(losses[end - SMOOTHED:end]) for end in range(SMOOTHED, len(losses) + 1)]


def _curve(words: Sequence[str], cache: Path, steps: int) -> tuple[Curve, float]:
    """Return the curve of a run of `steps` steps, and how often an epoch of its data reads a token."""
    prepared = prepare(resolve_words([*words, f"max_steps={steps}"]), cache, quiet)
    setup, recipe = build_setup(prepared), prepared.recipe
    state = new_state(setup, recipe.weight_decay)
    losses = [result.loss for result in train(setup, state, schedule_of(recipe, steps), recipe.max_grad_norm)]
    return ([float(loss) for loss in losses], prepared.steps_per_epoch), prepared.facts.data.redundancy


# ------------------------------------------------------------------------------------------------ unlike_runs
# Two recipes that are not the same training (another batch, another length): how fast each goes through its data.
#
# Where the arms are one training, evidence/clock.py compares them step by step. Here the steps differ, so each arm takes steps
# of its own, and what is counted is said: real tokens, examples or steps a second.

UNITS = ("tokens", "examples", "steps")


def unlike_runs(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str], per: str = "tokens",
                steps: int = 8, repeats: int = REPEATS) -> Measured:
    """Return the `per` per second of arm b over arm a. Detail: the share of the text that arm b does not read."""
    one_of("per", per, UNITS)
    rounds, detail = apart(_unlike_rounds, [*words, *a], [*words, *b], context.cache, context.deadline, per, steps, repeats)
    names = (" ".join(a) or "as it is", " ".join(b) or "as it is")
    return Measured(ratio(rounds, 1, 0), "times as fast", *names, {f"{per}_per_s": medians(rounds, names), **detail})


def _unlike_rounds(a: Sequence[str], b: Sequence[str], cache: Path, deadline: float, per: str, steps: int,
                   repeats: int) -> tuple[Rounds, dict[str, Any]]:
    trainings = [open_training(words, cache) for words in (a, b)]
    rounds = by_turns([lambda t=t: _rate(t, per, steps) for t in trainings], deadline, repeats)  # type: ignore[misc]
    return rounds, left_unread(*trainings)


def _rate(training: Training, per: str, steps: int) -> float:
    """Return tokens, examples or steps per second over the next `steps` steps."""
    done = 0

    def take() -> None:
        nonlocal done
        for result in training.steps(steps):
            done += {"tokens": result.real_tokens, "examples": training.examples_per_step, "steps": 1}[per]

    seconds = seconds_of(take, training.setup.device)
    return done / seconds


def left_unread(a: Training, b: Training) -> dict[str, Any]:
    """Return the share of arm a's text that arm b does not read, because its examples are shorter."""
    one, other = a.prepared.facts.data, b.prepared.facts.data
    return {"cut_share": other.cut_examples / other.examples if other.examples else 0.0,
            "tokens_lost_share": 1 - other.train_tokens / one.train_tokens,
            "examples_per_step": {"a": a.examples_per_step, "b": b.examples_per_step}}


# ------------------------------------------------------------------------------------------------ whole_runs
# Two recipes as whole runs, with all that lies between their steps: evaluation, checkpoints, logging.

BETWEEN = ("evaluation", "checkpoint")       # events whose seconds are a share of the run's
Shares = tuple[float, float]


def whole_runs(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str],
               repeats: int = FEWEST) -> Measured:
    """Return the speed of arm b over arm a from the first step to the end. Detail: shares of evaluation and checkpoints."""
    found: tuple[list[tuple[float, Shares]], ...] = ([], [])

    def run(index: int) -> float:
        folder = context.folder / f"run-{index}-{len(found[index])}"
        found[index].append(apart(_whole_run, [*words, *(a, b)[index]], context.cache, folder))
        return found[index][-1][0]

    rounds = by_turns([lambda: run(0), lambda: run(1)], context.deadline, repeats)
    names = (" ".join(a) or "as it is", " ".join(b) or "as it is")
    shares = {f"{what}_share_{arm}": vars(interval([share[i] for _, share in found[index]]))
              for i, what in enumerate(BETWEEN) for index, arm in enumerate("ab")}
    return Measured(ratio(rounds, 0, 1), "times as fast", *names, {"seconds": medians(rounds, names), **shares})


def _whole_run(words: Sequence[str], cache: Path, folder: Path) -> tuple[float, Shares]:
    """Return the seconds of a run, and the shares of evaluation and of checkpoints."""
    prepared = prepare(resolve_words([*words, f"output_dir={json.dumps(str(folder))}"]), cache, quiet)
    start_run(prepared, lambda event: None, write_sample)
    events = read_events(folder / "events.jsonl")
    seconds = next(event.seconds for event in reversed(events) if isinstance(event, End))
    evaluation_s = sum(event.seconds for event in events if isinstance(event, Evaluated))
    return seconds, (evaluation_s / seconds, sum(event.seconds for event in events if isinstance(event, Saved)) / seconds)
