"""Experiments: each is carried out once, and its result is read for every claim that it decides."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from powertrain import planner
from powertrain.claims.claim import Claim, Experiment
from powertrain.claims.probes import PROBES, Context, Measured
from powertrain.claims.probes.probe import OutOfTime
from powertrain.evidence.clock import CannotRun, Pace, Probe
from powertrain.evidence.parity import compare_losses
from powertrain.evidence.profile import Profile, bound
from powertrain.evidence.stats import MARGIN, interval
from powertrain.records import RunFailed, WrongUse
from powertrain.records.evidence import Arm, ArmRun, Comparison, Interval, Parity, Window

PACE = Pace(window_s=0.5, pairs=6, most_pairs=12, warm_up_s=5.0)
UNTIMED = frozenset({"peak_memory", "loss"})     # metrics for which no window is timed
PROBED_STEPS = 4


class Measures(Protocol):
    """The measurements that an experiment asks of an arena."""

    def compare(self, a: Arm, b: Arm, pace: Pace = ..., *, margin: float = ..., deadline: float | None = ...
                ) -> tuple[Comparison, ArmRun, ArmRun]: ...

    def probe(self, arm: Arm, *, steps: int = ..., precision: str | None = ..., seed: int | None = ...) -> Probe: ...

    def profile(self, arm: Arm, *, steps: int = ...) -> Profile: ...


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
    failed: str | None = None                # why there is nothing else
    seconds: float = 0.0                     # that it took
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """The means with which experiments are carried out."""

    arena: Measures
    cache: Path
    scratch: Path                            # emptied by whoever made it
    deadline: float                          # by time.monotonic()
    margin: float = MARGIN
    pace: Pace = PACE


def arms_of(experiment: Experiment) -> tuple[Arm, Arm]:
    def arm(words: tuple[str, ...]) -> Arm:
        return Arm(f"{experiment.name}: {' '.join(words) or 'as planned'}", (*experiment.words, *words))

    return arm(experiment.a), arm(experiment.b)


def carry_out(experiment: Experiment, claims: Sequence[Claim], bench: Bench) -> Outcome | None:
    """Return the result for the `claims` that the experiment decides; None where the time ran out."""
    began = time.monotonic()
    try:
        found = _BY_KIND[experiment.kind](experiment, claims, bench)
    except OutOfTime:
        return None
    except (CannotRun, RunFailed, WrongUse) as error:
        found = Outcome(experiment, failed=str(error))
    except Exception as error:               # one experiment that is broken must not take the others with it
        found = Outcome(experiment, failed=f"{type(error).__name__}: {error}")
    return Outcome(**{**vars(found), "seconds": time.monotonic() - began})


def _of_arms(experiment: Experiment, claims: Sequence[Claim], bench: Bench) -> Outcome:
    a, b = arms_of(experiment)
    metrics = {claim.metric or "speed" for claim in claims}
    limit = _bound(experiment, a, b, bench) if experiment.technique and metrics == {"speed"} else None
    if limit is not None and limit.times - 1 < MARGIN and all(_is_gain(claim) for claim in claims):
        return Outcome(experiment, (a, b), bound=limit)
    comparison: Comparison | None = None
    runs: tuple[ArmRun, ...] = ()
    if metrics - UNTIMED:
        comparison, *both = bench.arena.compare(a, b, bench.pace, margin=bench.margin, deadline=bench.deadline)
        runs = tuple(both)
    allocated = _allocated(a, b, bench) if "peak_memory" in metrics else None
    parity = _parity(experiment, a, b, bench) if experiment.exactness is not None else None
    losses = _losses(a, b, bench) if "loss" in metrics else {}
    return Outcome(experiment, (a, b), runs, comparison, allocated, parity, limit, detail=losses)


def _is_gain(claim: Claim) -> bool:
    return not claim.inverse and (claim.range is None or claim.range[0] > 1)


def _bound(experiment: Experiment, a: Arm, b: Arm, bench: Bench) -> Bound | None:
    """Return Amdahl's bound from profiles of both arms and the classes of work that the technique acts on."""
    assert experiment.technique is not None
    technique = planner.BY_NAME[experiment.technique]
    acts_on: frozenset[str] = getattr(technique, "acts_on", frozenset())
    if not acts_on:
        return None
    times = bound(bench.arena.profile(a), bench.arena.profile(b), acts_on)
    return Bound(times, tuple(sorted(acts_on)))


def _probe(arm: Arm, bench: Bench, precision: str | None = None) -> Probe:
    found = bench.arena.probe(arm, steps=PROBED_STEPS, precision=precision)
    if found.error is not None:
        raise CannotRun(f"{arm.name}: {found.error}")
    return found


def _allocated(a: Arm, b: Arm, bench: Bench) -> tuple[int, int]:
    counts = [_probe(arm, bench).allocated_bytes for arm in (a, b)]
    if None in counts:
        raise CannotRun("the memory of a step cannot be counted on this machine")
    return counts[0] or 0, counts[1] or 0


def _parity(experiment: Experiment, a: Arm, b: Arm, bench: Bench) -> Parity:
    """Return the parity of both arms in fp32, where rounding hides no difference.

    The arms' own precision is used where the precision differs between them, or where a plan does not run in fp32.
    """
    assert experiment.exactness is not None
    own = (None, "bf16")
    for precision, dtype in [own] if _differs_in_precision(experiment) else [("fp32", "fp32"), own]:
        probes = [bench.arena.probe(arm, steps=PROBED_STEPS, precision=precision) for arm in (a, b)]
        why = next((probe.error for probe in probes if probe.error is not None), None)
        if why is None:
            return compare_losses(experiment.exactness, *probes, dtype=dtype)
    raise CannotRun(f"the losses cannot be compared: {why}")


def _differs_in_precision(experiment: Experiment) -> bool:
    names = [name for name, technique in planner.BY_NAME.items() if "precision" in technique.slots]
    return any(word.startswith(f"techniques.{name}") for word in (*experiment.a, *experiment.b) for name in names)


def _losses(a: Arm, b: Arm, bench: Bench) -> dict[str, Any]:
    return {"losses": [list(_probe(arm, bench).losses) for arm in (a, b)]}


def _of_probe(experiment: Experiment, claims: Sequence[Claim], bench: Bench) -> Outcome:
    del claims
    if experiment.probe not in PROBES:
        raise WrongUse(f"there is no probe {experiment.probe!r} (known: {', '.join(PROBES)})")
    folder = bench.scratch / experiment.name
    folder.mkdir(parents=True)
    context = Context(cache=bench.cache, deadline=bench.deadline, arena=bench.arena, folder=folder)  # type: ignore[arg-type]
    return Outcome(experiment, measured=PROBES[experiment.probe](context, **experiment.settings))


def _reasoned(experiment: Experiment, claims: Sequence[Claim], bench: Bench) -> Outcome:
    del claims, bench
    return Outcome(experiment)


_BY_KIND: dict[str, Callable[[Experiment, Sequence[Claim], Bench], Outcome]] = {
    "arms": _of_arms, "probe": _of_probe, "reasoned": _reasoned}


# ------------------------------------------------------------------------------------------------ reading


def reading(claim: Claim, outcome: Outcome) -> Interval | None:
    """Return the claim's metric as measured; None where it has no value. Raises LookupError for an unknown metric."""
    kind = outcome.experiment.kind
    found = _of_value(outcome.experiment) if kind == "reasoned" else _of_measured(claim, outcome) if kind == "probe" else \
        READERS[claim.metric or "speed"](claim, outcome)
    if found is None or not claim.inverse:
        return found
    return Interval(1 / found.median, 1 / found.high, 1 / found.low)


def _of_value(experiment: Experiment) -> Interval | None:
    if experiment.value is None:
        return None
    low, high = experiment.value
    return Interval((low + high) / 2, low, high)


def _of_measured(claim: Claim, outcome: Outcome) -> Interval:
    assert outcome.measured is not None
    if claim.metric in ("", "value"):
        return outcome.measured.value
    found = outcome.measured.detail[claim.metric]
    if isinstance(found, Interval):
        return found
    return Interval(**found) if isinstance(found, dict) else Interval(float(found), float(found), float(found))


def _speed(claim: Claim, outcome: Outcome) -> Interval | None:
    del claim
    return outcome.comparison.speed if outcome.comparison else None


def _pairs(outcome: Outcome) -> list[tuple[Window, Window]]:
    a, b = outcome.runs
    return list(zip(a.windows, b.windows, strict=True))


def _peak_memory(claim: Claim, outcome: Outcome) -> Interval:
    del claim
    assert outcome.allocated_bytes is not None
    a, b = outcome.allocated_bytes
    return Interval(b / a, b / a, b / a)


def _first_steps(claim: Claim, outcome: Outcome) -> Interval | None:
    """Return the speed over the first steps, compilation included."""
    if outcome.comparison is None or outcome.comparison.speed is None or claim.steps is None:
        return None
    a_s = statistics.median(a.seconds / a.steps for a, _ in _pairs(outcome)) * claim.steps
    speed, owed_s = outcome.comparison.speed, outcome.comparison.compile_s
    return Interval(*(a_s / (owed_s + a_s / times) for times in (speed.median, speed.low, speed.high)))


def _loss(claim: Claim, outcome: Outcome) -> Interval:
    del claim
    a, b = outcome.detail["losses"]
    return interval([of_b / of_a for of_a, of_b in zip(a, b, strict=True)])


def _waiting(window: Window, parts: Sequence[str]) -> float:
    return sum(window.parts.get(part, 0.0) for part in parts) / window.seconds


def _data_wait(claim: Claim, outcome: Outcome) -> Interval:
    del claim
    return interval([_waiting(a, ("data",)) for a, _ in _pairs(outcome)])


def _busy(claim: Claim, outcome: Outcome) -> Interval:
    del claim
    return interval([1 - _waiting(b, ("data", "copy")) for _, b in _pairs(outcome)])


def _busy_ratio(claim: Claim, outcome: Outcome) -> Interval:
    del claim
    return interval([(1 - _waiting(b, ("data", "copy"))) / (1 - _waiting(a, ("data", "copy"))) for a, b in _pairs(outcome)])


def _steps_per_s(claim: Claim, outcome: Outcome) -> Interval:
    del claim
    return interval([b.steps / b.seconds for _, b in _pairs(outcome)])


READERS: dict[str, Callable[[Claim, Outcome], Interval | None]] = {
    "speed": _speed, "peak_memory": _peak_memory, "first_steps": _first_steps, "loss": _loss,
    "data_wait": _data_wait, "busy": _busy, "busy_ratio": _busy_ratio, "steps_per_s": _steps_per_s}
