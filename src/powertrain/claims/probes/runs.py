"""Probes of whole runs: epochs, start-up, evaluation and checkpoints between steps, and how soon a loss is reached."""

import itertools
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from powertrain.claims.probes import probe
from powertrain.claims.probes.probe import Context, Measured
from powertrain.evidence.stats import FEWEST, by_turns, interval
from powertrain.facts.hardware import read_hardware
from powertrain.facts.measure import seconds_of
from powertrain.recipe import resolve_words
from powertrain.records.event_log import read_events
from powertrain.records.events import End, Evaluated, Saved
from powertrain.records.phases import nobody
from powertrain.run.prepare import build_setup, prepare, schedule_of
from powertrain.run.session import start_run
from powertrain.training.loop import evaluate, spread, train
from powertrain.use.generation import write_sample

TENTH = 10
SMOOTHED = 10                                # steps whose losses are averaged


def epochs(context: Context, *, words: Sequence[str], steps: int = 20, probe_steps: int = 10) -> Measured:
    """Return the wall time of an epoch with an evaluation, over its examples divided by the examples per second.

    The epoch has `steps` steps, and the speed is that of `probe_steps` steps. The evaluation reads a tenth as many examples
    as the epoch.
    """
    training = probe.open_training(words, context.cache)
    examples = steps * training.setup.train_batch_size
    held_out = spread(training.prepared.material.held_out, max(1, examples // TENTH))

    def epoch() -> None:
        training.advance(steps)
        if len(held_out):
            evaluate(training.setup, held_out, tokens_per_byte=None)

    added, wall = "examples over examples a second", "an epoch's wall time"
    rounds = by_turns({added: lambda: steps * training.step_s(probe_steps),
                       wall: lambda: seconds_of(epoch, training.setup.device.type)}, context.deadline)
    return Measured(probe.ratio(rounds, wall, added), "of the time that was added up", added, wall,
                    {"seconds": probe.medians(rounds), "examples_per_s": examples / probe.medians(rounds)[added]})


def start_up(context: Context, *, words: Sequence[str]) -> Measured:
    """Return how many times sooner a run is ready for its first step where its text was tokenised before."""
    read_hardware(context.cache)             # measured once; the time of measuring does not depend on the data
    resolved = resolve_words(words)

    def fresh() -> Path:
        beside = Path(tempfile.mkdtemp(dir=context.folder)) / "cache"
        shutil.copytree(context.cache / "hardware", beside / "hardware")
        return beside

    def seconds(where: Path) -> float:
        return seconds_of(lambda: build_setup(prepare(resolved, where, nobody)), "cpu")

    kept = fresh()
    seconds(kept)
    arms = {"text not tokenised yet": lambda: seconds(fresh()), "text tokenised before": lambda: seconds(kept)}
    return probe.faster(by_turns(arms, context.deadline, FEWEST))


# ------------------------------------------------------------------------------------------------ target_loss
# Both recipes train equally many steps from the same weights, several times with other seeds. The target is the higher of the
# two final losses, so both reach it. The result is the first step whose smoothed loss is at the target.

Curve = tuple[list[float], float]            # the loss of each step, and the steps of an epoch
Reached = tuple[float, float]                # steps and epochs until the target


def target_loss(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str],
                steps: int = 120) -> Measured:
    """Return how many times fewer steps arm b takes to the loss than arm a.

    The schedules are the recipes' own, over `steps` steps. Detail: the same in epochs of the arms' data, and
    `passes_per_epoch_a` and `_b`, how often an epoch reads each token.
    """
    names = probe.arm_name(a), probe.arm_name(b)

    def run(arm: Sequence[str], seeds: Iterator[int]) -> tuple[Curve, float]:
        return _curve([*words, *arm, f"seed={next(seeds)}"], context.cache, steps)

    arms = {name: partial(run, arm, itertools.count()) for name, arm in zip(names, (a, b), strict=True)}
    of_a, of_b = by_turns(arms, context.deadline, FEWEST).values()
    reached = [first_at(one, other) for (one, _), (other, _) in zip(of_a, of_b, strict=True)]
    times = [interval([one[unit] / other[unit] for one, other in reached]) for unit in (0, 1)]
    until = [{name: statistics.median(arms[i][unit] for arms in reached) for i, name in enumerate(names)} for unit in (0, 1)]
    return Measured(times[0], "times as fast", *names, {
        "steps": until[0], "epochs": until[1], "times_fewer_steps": vars(times[0]), "times_fewer_epochs": vars(times[1]),
        "seeds": len(reached), "passes_per_epoch_a": of_a[0][1], "passes_per_epoch_b": of_b[0][1]})


def first_at(one: Curve, other: Curve) -> tuple[Reached, Reached]:
    """Return steps and epochs of each until its smoothed loss reaches the higher of the two final losses."""
    smooth = [smoothed(losses) for losses, _ in (one, other)]
    target = max(curve[-1] for curve in smooth)
    taken = [next(step for step, loss in enumerate(curve, SMOOTHED) if loss <= target) for curve in smooth]
    return (taken[0], taken[0] / one[1]), (taken[1], taken[1] / other[1])


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the running mean of the losses, from the first step that has enough steps before it."""
    return [statistics.fmean(losses[end - SMOOTHED:end]) for end in range(SMOOTHED, len(losses) + 1)]


def _curve(words: Sequence[str], cache: Path, steps: int) -> tuple[Curve, float]:
    """Return the curve of a run of `steps` steps, and how often an epoch of its data reads a token."""
    training = probe.open_training([*words, f"max_steps={steps}"], cache, warm_up=0)
    prepared, schedule = training.prepared, schedule_of(training.prepared.recipe, steps)
    results = train(training.setup, training.state, schedule, prepared.recipe.max_grad_norm)
    losses = [float(loss) for loss in [result.loss for result in results]]       # read after the run, which then never waits
    return (losses, prepared.steps_per_epoch), prepared.facts.data.redundancy


# ------------------------------------------------------------------------------------------------ whole_runs

def whole_runs(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Measured:
    """Return the speed of whole runs of arm b over those of arm a, with evaluation, checkpoints and logging between steps.

    Detail: the shares of evaluation and of checkpoints in the time of both arms' runs.
    """
    def run(arm: Sequence[str]) -> dict[str, float]:
        return probe.apart(whole_run, [*words, *arm], context.cache, Path(tempfile.mkdtemp(dir=context.folder)) / "run")

    found = by_turns({probe.arm_name(arm): partial(run, arm) for arm in (a, b)}, context.deadline, FEWEST)
    shares = {f"{kind}_share_{letter}": vars(interval([seconds[kind] / seconds["run"] for seconds in runs]))
              for letter, runs in zip("ab", found.values(), strict=True) for kind in ("evaluation", "checkpoint")}
    return probe.faster({name: [seconds["run"] for seconds in runs] for name, runs in found.items()}, "seconds", **shares)


def whole_run(words: Sequence[str], cache: Path, folder: Path) -> dict[str, float]:
    """Return the seconds of a run, and those of its evaluations and checkpoints."""
    prepared = prepare(resolve_words([*words, f"output_dir={json.dumps(str(folder))}"]), cache, nobody)
    start_run(prepared, lambda event: None, write_sample)
    events = read_events(folder / "events.jsonl")
    return {"run": next(event.seconds for event in reversed(events) if isinstance(event, End)),
            "evaluation": sum(event.seconds for event in events if isinstance(event, Evaluated)),
            "checkpoint": sum(event.seconds for event in events if isinstance(event, Saved))}
