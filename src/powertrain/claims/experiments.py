"""Experiments: each is carried out once, and its result is read for every claim that it decides."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from powertrain import planner
from powertrain.claims.claim import Claim, Experiment
from powertrain.claims.probes import PROBES, Context, Measured
from powertrain.claims.probes.probe import exactly
from powertrain.evidence.clock import CannotRun, Probe
from powertrain.evidence.parity import compare_losses
from powertrain.evidence.profile import bound
from powertrain.evidence.stats import MARGIN, OutOfTime, interval
from powertrain.records import RunFailed, WrongUse
from powertrain.records.evidence import Arm, ArmRun, Comparison, Interval, Parity, Window

UNTIMED = frozenset({"peak_memory", "loss"})     # metrics for which no window is timed
PROBED_STEPS = 4


@dataclass(frozen=True)
class Bound:
    """Amdahl's bound on the gain or loss of a step."""

    times: float
    acts_on: tuple[str, ...]                 # classes of work


@dataclass(frozen=True)
class Outcome:
    """The result of an experiment. A reasoned experiment has no measurements."""

    experiment: Experiment
    arms: tuple[Arm, ...] = ()
    runs: tuple[ArmRun, ...] = ()
    comparison: Comparison | None = None
    allocated_bytes: tuple[int, int] | None = None   # peak of a step, of A and B
    parity: Parity | None = None
    bound: Bound | None = None
    measured: Measured | None = None         # of a probe
    failed: str | None = None                # why there is no result
    seconds: float = 0.0                     # that it took
    detail: dict[str, Any] = field(default_factory=dict)


def arms_of(experiment: Experiment) -> tuple[Arm, Arm]:
    a, b = (Arm(f"{experiment.name}: {' '.join(words) or 'as planned'}", (*experiment.words, *words))
            for words in (experiment.a, experiment.b))
    return a, b


def carry_out(experiment: Experiment, claims: Sequence[Claim], bench: Context) -> Outcome | None:
    """Return the result for the `claims` that the experiment decides; None where the time ran out."""
    began = time.monotonic()
    try:
        found = _of_arms(experiment, claims, bench) if experiment.kind == "arms" else \
            Outcome(experiment, measured=_measured(experiment, bench) if experiment.kind == "probe" else None)
    except OutOfTime:
        return None
    except (CannotRun, RunFailed, WrongUse) as error:
        found = Outcome(experiment, failed=str(error))
    except Exception as error:               # an experiment that is broken must not end the others
        found = Outcome(experiment, failed=f"{type(error).__name__}: {error}")
    return replace(found, seconds=time.monotonic() - began)


def _measured(experiment: Experiment, bench: Context) -> Measured:
    if experiment.probe not in PROBES:
        raise WrongUse(f"there is no probe {experiment.probe!r} (known: {', '.join(PROBES)})")
    folder = bench.folder / experiment.name
    folder.mkdir(parents=True)
    return PROBES[experiment.probe](replace(bench, folder=folder), **experiment.settings)


def _of_arms(experiment: Experiment, claims: Sequence[Claim], bench: Context) -> Outcome:
    a, b = arms_of(experiment)
    metrics = {claim.metric or "speed" for claim in claims}
    found = Outcome(experiment, (a, b), bound=_bound(experiment, bench) if metrics == {"speed"} else None)
    if found.bound is not None and found.bound.times - 1 < MARGIN and all(claim.claims_gain for claim in claims):
        return found
    if metrics - UNTIMED:
        comparison, *runs = bench.arena.compare(a, b, bench.pace, margin=bench.margin, deadline=bench.deadline)
        found = replace(found, comparison=comparison, runs=tuple(runs))
    if "peak_memory" in metrics:
        of_a, of_b = (_probe(arm, bench).allocated_bytes for arm in (a, b))
        if of_a is None or of_b is None:
            raise CannotRun("the memory of a step cannot be counted on this machine")
        found = replace(found, allocated_bytes=(of_a, of_b))
    if experiment.exactness is not None:
        found = replace(found, parity=_parity(experiment, a, b, bench))
    return replace(found, detail={"losses": [list(_probe(arm, bench).losses) for arm in (a, b)]} if "loss" in metrics else {})


def _bound(experiment: Experiment, bench: Context) -> Bound | None:
    """Return Amdahl's bound from profiles of both arms and the classes of work that the technique acts on."""
    technique = planner.BY_NAME[experiment.technique] if experiment.technique else None
    acts_on: frozenset[str] = getattr(technique, "acts_on", frozenset())
    if not acts_on:
        return None
    a, b = (bench.arena.profile(arm) for arm in arms_of(experiment))
    return Bound(bound(a, b, acts_on), tuple(sorted(acts_on)))


def _probe(arm: Arm, bench: Context) -> Probe:
    found = bench.arena.probe(arm, steps=PROBED_STEPS)
    if found.error is not None:
        raise CannotRun(f"{arm.name}: {found.error}")
    return found


def _parity(experiment: Experiment, a: Arm, b: Arm, bench: Context) -> Parity:
    """Return the parity of both arms in fp32, where rounding hides no difference.

    The arms' own precision is used where the precision differs between them, or where a plan does not run in fp32.
    """
    assert experiment.exactness is not None
    precisions = [name for name, technique in planner.BY_NAME.items() if "precision" in technique.slots]
    differ = any(word.startswith(f"techniques.{name}") for word in (*experiment.a, *experiment.b) for name in precisions)
    own = (None, "bf16")
    for precision, dtype in [own] if differ else [("fp32", "fp32"), own]:
        probes = [bench.arena.probe(arm, steps=PROBED_STEPS, precision=precision) for arm in (a, b)]
        why = next((probe.error for probe in probes if probe.error is not None), None)
        if why is None:
            return compare_losses(experiment.exactness, *probes, dtype=dtype)
    raise CannotRun(f"the losses cannot be compared: {why}")


# ------------------------------------------------------------------------------------------------ reading


def reading(claim: Claim, outcome: Outcome) -> Interval | None:
    """Return the claim's metric as measured; None where it has no value. Raises LookupError for an unknown metric."""
    found = _reading(claim, outcome)
    if found is None or not claim.inverse:
        return found
    return Interval(1 / found.median, 1 / found.high, 1 / found.low)


def _reading(claim: Claim, outcome: Outcome) -> Interval | None:
    if outcome.experiment.value is not None:
        low, high = outcome.experiment.value
        return Interval((low + high) / 2, low, high)
    if outcome.measured is not None:
        found = outcome.measured.detail[claim.metric] if claim.metric else outcome.measured.value
        return found if isinstance(found, Interval) else Interval(**found) if isinstance(found, dict) else exactly(float(found))
    metric, speed = claim.metric or "speed", outcome.comparison.speed if outcome.comparison else None
    if metric == "loss":
        return interval([of_b / of_a for of_a, of_b in zip(*outcome.detail["losses"], strict=True)])
    if metric == "peak_memory":
        assert outcome.allocated_bytes is not None
        return exactly(outcome.allocated_bytes[1] / outcome.allocated_bytes[0])
    if metric == "first_steps" and speed is not None:
        return _first_steps(speed, outcome, claim.steps or 0)
    return speed if metric in ("speed", "first_steps") else \
        interval([OF_WINDOWS[metric](a, b) for a, b in zip(*(run.windows for run in outcome.runs), strict=True)])


def _first_steps(speed: Interval, outcome: Outcome, steps: int) -> Interval:
    """Return the speed over the first `steps` steps, compilation included."""
    assert outcome.comparison is not None
    a_s, owed_s = statistics.median(a.seconds / a.steps for a in outcome.runs[0].windows) * steps, outcome.comparison.compile_s
    return Interval(*(a_s / (owed_s + a_s / times) for times in (speed.median, speed.low, speed.high)))


def _busy(window: Window) -> float:
    return 1 - (window.parts.get("data", 0.0) + window.parts.get("copy", 0.0)) / window.seconds


OF_WINDOWS: Mapping[str, Callable[[Window, Window], float]] = {      # metrics of a pair of windows, one of each arm
    "data_wait": lambda a, _: a.parts.get("data", 0.0) / a.seconds,
    "busy": lambda _, b: _busy(b),
    "busy_ratio": lambda a, b: _busy(b) / _busy(a),
    "steps_per_s": lambda _, b: b.steps / b.seconds,
}
