"""The notebook of a study: its measurements so far, and the time that is left.

Arms are measured by an arena (clock.py); the notebook keeps what came out, in order, measures nothing twice, and gives
each comparison its share of the time.
"""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from powertrain import planner
from powertrain.evidence.clock import LEAST_PAIRS, USUAL, Arena, CannotRun, Pace, Probe
from powertrain.evidence.parity import compare_losses
from powertrain.evidence.profile import Profile
from powertrain.evidence.stats import MARGIN, TOO_NOISY, noise_floor
from powertrain.records import Facts, Plan, RunFailed
from powertrain.records.evidence import INVALID, Arm, ArmRun, Comparison, Parity
from powertrain.run.fits import needed_bytes, room_bytes

Say = Callable[[str], None]

SEEDS, LOSSY_STEPS = 3, 20   # of runs that show whether other mathematics learns as well
COARSEST = ("bf16", "fp16", "tf32", "fp32")


@dataclass
class Notebook:
    arena: Arena
    words: tuple[str, ...]                   # of the recipe
    say: Say
    ends_at: float                           # by `now`
    margin: float = MARGIN
    now: Callable[[], float] = time.monotonic
    arms: dict[str, Arm] = field(default_factory=dict)           # what each plan was called, by its steps
    comparisons: list[Comparison] = field(default_factory=list)
    runs: list[ArmRun] = field(default_factory=list)
    noise_floor: float | None = None         # of this machine, once it is measured; it widens the margin
    _found: dict[tuple[str, str], int] = field(default_factory=dict)
    _probes: dict[tuple[Any, ...], Probe] = field(default_factory=dict)
    _took_s: list[float] = field(default_factory=list)           # of comparisons, each

    def left_s(self) -> float:
        return self.ends_at - self.now()

    def reaches(self, leave_s: float = 0.0) -> bool:
        """Return whether there is time for another comparison as long as the shortest so far."""
        return self.left_s() - leave_s > min(self._took_s, default=0.0)

    def share_s(self, weights: Sequence[float]) -> float:
        """Return the seconds for the first of several tasks that share the remaining time by these weights."""
        return max(0.0, self.left_s()) * weights[0] / sum(weights)

    def arm(self, plan: Plan, name: str = "") -> Arm:
        """Return the arm of a plan; the same plan under another name keeps its first name."""
        name = name or " + ".join(plan.names) or "no technique"
        taken = {arm.name for arm in self.arms.values()}
        others = (f"{name} ({number})" for number in itertools.count(2))
        free = next(each for each in itertools.chain([name], others) if each not in taken)
        return self.arms.setdefault(key_of(plan), Arm(free, self.words, planner.to_json(plan)))

    def probe(self, arm: Arm, *, steps: int = 4, precision: str | None = None, seed: int | None = None) -> Probe:
        """Return a probe; the same probe is made once. A process that fails is a probe with an error."""
        asked = (arm.name, steps, precision, seed)
        if asked not in self._probes:
            self._probes[asked] = self.arena.probe(arm, steps=steps, precision=precision, seed=seed)
        return self._probes[asked]

    def profile(self, what: str, *arms: Arm) -> tuple[Profile, ...]:
        """Return the arms' profiles; none, and a word of why, where one of them does not run."""
        self.say(f"profiling {what}")
        try:
            return tuple(self.arena.profile(arm) for arm in arms)
        except CannotRun as error:
            self.say(f"no profile: {error}")
            return ()

    def parity(self, exactness: str, pairs: Sequence[tuple[Plan, Plan]], facts: Facts, seed: int) -> tuple[Parity | None, str]:
        """Return the parity of plans A and B, for the first of the pairs (A, B) that runs, or why none runs.

        Plans of the same precision are compared in fp32, where rounding hides nothing. The last pair is tried as planned too.
        Lossy techniques are compared by their final losses over several seeds, all others by the first steps of one seed.
        """
        why = ""
        steps, seeds = (LOSSY_STEPS, range(seed, seed + SEEDS)) if exactness == "LOSSY" else (4, [None])
        attempts = [(a, b, common_precision(a, b)) for a, b in pairs]
        for a, b, precision in [*attempts, (*pairs[-1], None)]:
            why = why_no_room(a, facts) or why_no_room(b, facts) or ""
            if why:
                continue
            arms = self.arm(a), self.arm(b)
            dtype = precision or min((planner.workload_of(facts, plan).dtype for plan in (a, b)), key=COARSEST.index)
            found = [[self.probe(arm, steps=steps, precision=precision, seed=one) for one in seeds] for arm in arms]
            why = next((probe.error for probes in found for probe in probes if probe.error is not None), "")
            if not why:
                return compare_losses(exactness, *found, dtype=dtype), ""
        return None, why

    def attempt(self, what: str, a: Arm, b: Arm, share_s: float, *, pairs: int | None = None, anew: bool = False
                ) -> tuple[int | None, str]:
        """Return the index of the comparison of B against A, or None where an arm does not run; and the result, or why not.

        It is made in about `share_s`. Without `pairs` there are as many as the time allows, and at least LEAST_PAIRS. What was
        compared before is taken from there, unless it has to be measured `anew`.
        """
        index = None if anew else self._found.get((a.name, b.name))
        try:
            if index is None:
                began = self.now()
                found = self.arena.compare(a, b, pace_for(share_s, pairs), margin=self.margin, deadline=began + share_s)
                index = self._found[a.name, b.name] = self._write(began, *found)
            says = self.comparisons[index].because
        except CannotRun as error:
            says = str(error)
        self.say(f"{what}: {says}")
        return index, says

    def noise(self, name: str, arm: Arm, share_s: float) -> int:
        """Compare the arm with itself to set the noise floor, and return the comparison's index. Raises RunFailed."""
        self.say(f"{name} against itself, for the noise of this machine")
        began = self.now()
        try:
            index = self._write(began, *self.arena.control(arm, pace_for(share_s), began + share_s))
        except CannotRun as error:
            raise RunFailed(str(error)) from None
        control = self.comparisons[index]
        if control.speed is None or control.verdict == INVALID:
            raise RunFailed(f"{name} has no speed: {control.because}")
        self.noise_floor = floor = noise_floor(control)
        self.margin = max(self.margin, floor)
        within = min(self.margin, TOO_NOISY)
        self.say(f"equal plans differ by up to {floor:.1%} here, so differences within {within:.1%} are no effect")
        return index

    def _write(self, began: float, comparison: Comparison, *runs: ArmRun) -> int:
        self._took_s.append(self.now() - began)
        self.comparisons.append(comparison)
        self.runs.extend(runs)
        return len(self.comparisons) - 1


def pace_for(share_s: float, pairs: int | None = None) -> Pace:
    """Return a pace that fits the time, with shorter windows and warm-up where there is little."""
    least, most = (LEAST_PAIRS, USUAL.most_pairs) if pairs is None else (pairs, pairs)
    return Pace(window_s=min(USUAL.window_s, share_s / (4 * LEAST_PAIRS)), pairs=least, most_pairs=most,
                warm_up_s=min(USUAL.warm_up_s, share_s / 4))


def key_of(plan: Plan) -> str:
    """Return a key that is equal for equal plans."""
    steps: list[Mapping[str, Any]] = planner.to_json(plan)["steps"]
    return json.dumps([(step["technique"], step["settings"]) for step in steps], sort_keys=True)


def common_precision(a: Plan, b: Plan) -> str | None:
    """Return "fp32" for plans of the same precision, whose products can then be fp32 in both; None for others."""
    first, second = ([step.technique for step in plan.steps if "precision" in step.technique.slots] for plan in (a, b))
    return "fp32" if first == second else None


def why_no_room(plan: Plan, facts: Facts) -> str | None:
    """Return why a plan does not fit this machine's memory by its prediction; None where it fits."""
    if facts.model.provider != "native":     # what another library computes is not counted
        return None
    needed, room = needed_bytes(facts, plan), room_bytes(facts)
    return None if needed <= room else f"a step would take {needed / 2**30:.1f} GiB, and {room / 2**30:.1f} are free"
