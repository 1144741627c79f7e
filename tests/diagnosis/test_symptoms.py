"""Every symptom: there where it was planted, alone, and not where a near miss was."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from made_histories import BEGAN, ESTIMATE, STEP_S, STEPS, Event, events, falling, level, norms, record, start, step

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms import SYMPTOMS, symptoms_of

NAN = {"reason": "failed", "message": "the loss of step 101 is not finite (nan); the checkpoints before it are untouched."}
OOM = {"event": "warning", "step": 100, "message": "step 101 ran out of memory (no room): it is taken again in passes of at "
                                                   "most 500 tokens instead of 1,000, at the same batch of 8; plan.json"}
BAD = {"event": "warning", "about": "update_skipped", "step": 100, "loss": "nan", "grad_norm": "nan",
       "examples": [3, 4], "most": 5}
DISK = {"event": "warning", "step": 100, "message": "step 100 could not be saved: No space left on device; training goes on"}
INF = math.inf


def spiked(*places: int, height: float = 3.0, losses: list[float] | None = None) -> list[float]:
    found = falling() if losses is None else list(losses)
    for place in places:
        found[place] += height
    return found


def diverging(rise: float) -> list[float]:
    """Falls for 120 steps, and rises in the 80 that are left."""
    return [loss + max(0.0, rise * (place - 120) / 80) for place, loss in enumerate(falling())]


def learned_early() -> list[float]:
    return falling(60, rate=8.0) + level(240, 3.0)


def slow(places: range, seconds: float) -> list[float]:
    return [seconds if place in places else STEP_S for place in range(STEPS)]


def memory(allocated_bytes: int) -> list[dict[str, object]]:
    return [{"event": "memory", "step": 2, "allocated_bytes": allocated_bytes, "predicted": ESTIMATE["memory_bytes"]}]


def resumed(lost_steps: int) -> RunRecord:
    """Killed after step 100 + `lost_steps`, and gone on with from the checkpoint of step 100."""
    saved = {"event": "checkpoint", "time": BEGAN + 10, "step": 100, "path": "p", "bytes": 1, "seconds": 0.05}
    whole = events()
    first = [event for event in whole[:-1] if event.get("step", 0) <= 100]
    lost = [step(100 + n, BEGAN + 10 + n / 10, 3.0, 0.5, STEP_S, 1e-3) for n in range(1, lost_steps + 1)]
    resume = start(event="resume", step=100, time=BEGAN + 60)
    rest = [event | {"time": event["time"] + 50} for event in whole[1:] if event.get("step", 0) > 100]
    kept = [*first, saved, resume, *rest[:-1], rest[-1] | {"seconds": 10.1}]
    return record(kept, all_events=[*first, saved, *lost, resume, *rest])


def shared(communication: float = 0.02, waiting: float = 0.02, imbalance: float = 1.02) -> list[Event]:
    """A run of two processes whose steps have these shares."""
    shares = {"communication_share": communication, "waiting_share": waiting, "token_imbalance": imbalance}
    return [event | (shares if event["event"] == "step" else {}) for event in events(processes=2)]


SLOW_PROCESS = {"event": "warning", "about": "straggler", "step": 100, "rank": 1, "host": "node-2", "part": "backward",
                "own_s": 0.09, "usual_s": 0.06}


@dataclass(frozen=True)
class Case:
    there: Callable[[], RunRecord]
    near: Callable[[], RunRecord]


CASES = {
    "stalled": Case(lambda: record(events(ended=False, total_steps=900), being_written=True, silent_s=600),
                    lambda: record(events(ended=False, total_steps=900), being_written=True, silent_s=30)),
    "not_finite": Case(
        lambda: record(events(falling(100), [*norms(97), 5.0, 40.0, 900.0], held_out={}, end=NAN, total_steps=STEPS)),
        lambda: record(events(grad_norms=[INF, INF, *norms(198)]), techniques={"fp16": {}})),
    "bad_steps": Case(lambda: record(events(between=[BAD])), lambda: record(events(between=[OOM]))),
    "out_of_memory": Case(lambda: record(events(between=[OOM]), techniques={"micro_batch": {"examples": 2}}),
                          lambda: record(events(between=[DISK]))),
    "ended_early": Case(lambda: record(events(falling(80), ended=False, total_steps=STEPS)),
                        lambda: record(events(falling(80), ended=False, total_steps=STEPS), being_written=True)),
    "divergence": Case(lambda: record(events(diverging(3.0))), lambda: record(events(diverging(0.1)))),
    "nothing_trained": Case(lambda: record(events(level(STEPS, 5.0), [0.0] * STEPS)),
                            lambda: record(events(grad_norms=[0.0, 0.0, *norms(198)]))),
    "uniform_loss": Case(lambda: record(events(level(STEPS, 7.62))),
                         lambda: record(events(falling(STEPS, last=7.3, rate=40)))),
    "no_progress": Case(lambda: record(events(level(STEPS, 5.0)), recipe={"learning_rate": 1e-5}),
                        lambda: record(events(falling(STEPS, first=5.0, last=4.5)), recipe={"learning_rate": 1e-5})),
    "spikes": Case(lambda: record(events(spiked(*range(150, 156)), [*norms(149), 30.0, *norms(50)])),
                   lambda: record(events(spiked(150, height=0.15)))),
    "skipped_steps": Case(lambda: record(events(grad_norms=[INF if at % 4 == 0 else 0.5 for at in range(STEPS)]),
                                         techniques={"fp16": {}}),
                          lambda: record(events(grad_norms=[INF] * 5 + norms(195)), techniques={"fp16": {}})),
    "vanishing_gradients": Case(
        lambda: record(events(falling(STEPS, 7.6, 5.0), [math.exp(-at / 12) for at in range(STEPS)])),
        lambda: record(events(falling(STEPS, 7.6, 0.1, noise=0.003), [math.exp(-at / 12) for at in range(STEPS)]))),
    "clipped_always": Case(lambda: record(events(grad_norms=norms(usual=3.0))),
                           lambda: record(events(grad_norms=[*norms(100, 3.0), *norms(100, 0.8)]))),
    "overfitting": Case(
        lambda: record(events(held_out={40: 4.6, 80: 4.1, 120: 4.0, 160: 4.3, 200: 4.7})),
        lambda: record(events(falling(rate=12.0), held_out={40: 4.6, 80: 4.1, 120: 4.0, 160: 4.01, 200: 4.01}))),
    "late_plateau": Case(lambda: record(events(learned_early())), lambda: record(events(falling(300, rate=4), held_out={}))),
    "still_falling": Case(
        lambda: record(events(falling(rate=1.0), held_out={50: 6.5, 100: 5.5, 150: 5.0, 200: 4.6})),
        lambda: record(events(falling(rate=1.0), held_out={50: 6.5, 100: 5.5, 150: 5.0, 200: 4.6},
                              end={"reason": "stopped (SIGINT)"}, total_steps=400))),
    "never_evaluated": Case(lambda: record(events(falling(rate=6.0), held_out={})),
                            lambda: record(events(held_out={}, ended=False, total_steps=900), being_written=True)),
    "slow_down": Case(lambda: record(events(seconds=slow(range(120, 200), 0.16))),
                      lambda: record(events(seconds=slow(range(120, 200), 0.11)))),
    "slow_steps": Case(lambda: record(events(seconds=slow(range(10, 200, 25), 0.5))),
                       lambda: record(events(seconds=slow(range(10, 60, 25), 0.5)))),
    "lost_work": Case(lambda: resumed(30), lambda: resumed(0)),
    "memory_over_prediction": Case(lambda: record(events(between=memory(300 << 20))),
                                   lambda: record(events(between=memory(104 << 20)))),
    "unlike_prediction": Case(lambda: record(events(estimate=ESTIMATE | {"step_s": [0.02, 0.05]})),
                              lambda: record(events(estimate=ESTIMATE | {"step_s": [0.02, 0.095]}))),
    "communication": Case(lambda: record(shared(communication=0.31)), lambda: record(shared(communication=0.09))),
    "imbalance": Case(lambda: record(shared(waiting=0.2, imbalance=1.4), techniques={"micro_batch": {"examples": 4}}),
                      lambda: record(shared(waiting=0.05, imbalance=1.4))),
    "straggler": Case(lambda: record(events(between=[SLOW_PROCESS], processes=2)), lambda: record(shared())),
    "warned": Case(lambda: record(events(between=[DISK])), lambda: record(events(between=[OOM, SLOW_PROCESS]))),
}


def rules(run: RunRecord) -> list[str]:
    """What is found and no praise."""
    return [finding.rule for finding in symptoms_of(run) if finding.severity != "good"]


def test_every_symptom_has_its_case_here():
    assert sorted(CASES) == sorted(symptom.name for symptom in SYMPTOMS)


@pytest.mark.parametrize("name", CASES)
def test_what_was_planted_is_found_and_nothing_else(name: str):
    assert rules(CASES[name].there()) == [name]


@pytest.mark.parametrize("name", CASES)
def test_a_near_miss_is_none(name: str):
    assert name not in rules(CASES[name].near())


def test_an_ordinary_run_has_nothing_but_praise():
    found = symptoms_of(record(events()))
    assert [(finding.rule, finding.severity) for finding in found] == [("unlike_prediction", "good")]


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_is_no_symptom(seed: int):
    draw = random.Random(seed)
    noisy = [loss + draw.gauss(0, 0.3) for loss in falling(noise=0.0)]
    grad_norms = [math.exp(draw.gauss(-1.5, 0.3)) for _ in noisy]
    run = record(events(noisy, grad_norms, held_out={50: 3.9, 100: 3.5, 150: 3.3, 200: 3.27},
                        seconds=[STEP_S * math.exp(draw.gauss(0, 0.08)) for _ in noisy]))
    assert rules(run) == []


def test_findings_carry_evidence_a_reason_and_a_cure():
    for name, case in CASES.items():
        finding = symptoms_of(case.there())[0]
        assert finding.evidence, name
        assert all(evidence.what for evidence in finding.evidence), name
        assert all((finding.why, finding.cure.says, finding.expected.says, finding.rests_on)), name


def test_the_worst_comes_first():
    run = record(events(level(STEPS, 7.62), norms(usual=3.0), between=[DISK], seconds=slow(range(120, 200), 0.3)))
    assert [finding.severity for finding in symptoms_of(run)] == ["critical", "moderate", "moderate"]
