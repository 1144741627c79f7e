"""Conditions of a comparison with a peer: what makes it unclean, and that a waiting arm does nothing. Nothing is timed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from powertrain.evidence import studies
from powertrain.evidence.worker import Taken
from powertrain.facts.machine_watch import Meanwhile
from powertrain.records.evidence import Arm, ArmRun, Study, Window

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import bench
import conditions

IDLE = Meanwhile(wall_s=100.0, own_s=190.0, busy_s=191.0)                # 1 of 200 core seconds is others'


def windows(*seconds: float) -> tuple[Window, ...]:
    return tuple(Window(4 + number, 1, one, 1000, 1000, 0, {}) for number, one in enumerate(seconds))


def test_a_peer_that_is_as_fast_beside_us_as_alone_on_an_idle_machine_is_clean() -> None:
    found = conditions.conditions("TRL", windows(10, 10, 10), windows(10.2, 10.4, 10.5), (IDLE, IDLE), 2)
    assert found.unclean == ()
    assert found.slower.median == pytest.approx(1 - 10 / 10.4)
    assert (found.alone_tokens_per_s, found.beside_tokens_per_s) == (100.0, pytest.approx(1000 / 10.4))


def test_a_peer_that_is_slower_beside_us_is_marked_with_both_figures() -> None:
    found = conditions.conditions("TRL", windows(10, 10, 10), windows(19, 20, 21), (IDLE, IDLE), 2)
    assert found.unclean == ("TRL is 50% slower beside us (50 tokens/s) than alone (100)",)


@pytest.mark.parametrize(("seen", "says"), [
    (Meanwhile(100.0, 100.0, 130.0), "other processes used 15% of the cores"),
    (Meanwhile(100.0, 100.0, 101.0, host_s=40.0), "the hypervisor gave 20% of the cores to other machines")])
def test_a_machine_that_was_not_idle_at_one_of_the_two_is_marked(seen: Meanwhile, says: str) -> None:
    same = windows(10, 10)
    for watched in ((IDLE, seen), (seen, IDLE)):
        assert conditions.conditions("TRL", same, same, watched, 2).unclean == (says,)


def test_a_study_keeps_the_conditions_and_opens_again(tmp_path: Path) -> None:
    found = conditions.conditions("TRL", windows(10, 10), windows(20, 20), (IDLE,), 2)
    study = Study("x", "peers", "what", "2026-12-01", "make bench", None, {"name": "A CPU"}, {},
                  findings={"conditions": [found.plain()]})
    studies.save(tmp_path / "study", study, {})
    kept, = studies.load(tmp_path / "study").findings["conditions"]
    assert kept["alone_tokens_per_s"] == 100.0
    assert kept["beside_tokens_per_s"] == 50.0
    assert (kept["slower"], kept["slower_95"]) == (0.5, [0.5, 0.5])
    assert kept["unclean"] == list(found.unclean) != []


def test_a_busy_machine_is_refused_and_an_idle_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch:
        def __enter__(self) -> Any:
            return SimpleNamespace(seen=self.seen)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(conditions, "MachineWatch", Watch)
    Watch.seen = IDLE
    conditions.refuse_busy_machine(2, seconds=0)
    Watch.seen = Meanwhile(100.0, 0.0, 60.0)
    with pytest.raises(SystemExit, match="other processes use 30% of this machine's 2 cores"):
        conditions.refuse_busy_machine(2, seconds=0)


def test_whole_runs_are_marked_too() -> None:
    assert conditions.marked({"name": "A CPU"}, Meanwhile(100.0, 0.0, 0.0)) == {
        "name": "A CPU", "others_share": 0.0, "unclean": []}
    assert conditions.marked({}, Meanwhile(100.0, 0.0, 100.0 * conditions.CORES))["unclean"]


def is_stopped(pid: int) -> bool:
    """Wait for a signal to arrive, which takes a moment; a minute later none was sent."""
    until = time.monotonic() + 60
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def test_an_arm_that_waits_is_stopped_and_answers_when_it_is_asked() -> None:
    script = "for line in iter(input, None): print(line, flush=True)"

    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def ask(method: str, *arguments: Any) -> str:
            child.stdin.write(json.dumps([method, *arguments]) + "\n")  # type: ignore[union-attr]
            child.stdin.flush()                                         # type: ignore[union-attr]
            return child.stdout.readline()                              # type: ignore[union-attr]

        process = SimpleNamespace(arm=Arm("an arm", ()), ready=None, ready_s=0.0, pid=child.pid, ask=ask)
        with conditions.InTurns(process) as arm:
            assert is_stopped(child.pid)
            assert json.loads(arm.ask("window", 1, 2)) == ["window", 1, 2]
            assert is_stopped(child.pid)
        assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED
        child.kill()


def test_the_peer_alone_takes_the_steps_that_it_took_beside_us() -> None:
    asked: list[tuple[int, int]] = []

    def ask(method: str, untimed: int, steps: int) -> Taken:
        asked.append((untimed, steps))
        first = 1 + sum(map(sum, asked[:-1])) + untimed
        return Taken(Window(first, steps, 1.0, 1, 1, 0, {}), (1.0,) * (untimed + steps), (1.0,) * (untimed + steps))

    # three steps of warm-up, then windows of five steps, each after one that is not timed
    run = ArmRun("TRL", 0.0, 0.0, 3, tuple(Window(5 + 6 * number, 5, 1.0, 1, 1, 0, {}) for number in range(7)), (), (), 0)
    alone = conditions.repeat(SimpleNamespace(ask=ask, first_step_s=0.0), run)
    assert asked == [(0, 1), (0, 2), *[(1, 5)] * 7]
    assert [window.first_step for window in alone] == [window.first_step for window in run.windows]


@pytest.mark.parametrize(("budget_s", "rounds"), [(0.0, 1), (25.0, 3)])
def test_rounds_fill_the_budget_and_all_their_windows_count(monkeypatch: pytest.MonkeyPatch, budget_s: float, rounds: int
                                                            ) -> None:
    clock = SimpleNamespace(now_s=0.0)
    arm = SimpleNamespace(why_invalid=None, process=SimpleNamespace(ready=SimpleNamespace(apply_s=0.0), first_step_s=0.0))

    def one_round(*_: Any) -> bench.Round:
        clock.now_s += 8.0
        theirs, mine = (ArmRun(name, 0.0, 0.0, 3, windows(*[seconds] * 5), (), (), 0)
                        for name, seconds in (("TRL", 10.0), ("powertrain", 5.0)))
        return bench.Round((arm, arm), theirs, mine, windows(*[10.0] * 5), (IDLE, IDLE))

    monkeypatch.setattr(bench, "one_round", one_round)
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    found, theirs, mine, under = bench.against(Arm("powertrain", ()), bench.PeerArm("TRL", "", {}), Path(), None, budget_s)
    assert found.pairs == len(theirs.windows) == len(mine.windows) == 5 * rounds
    assert found.speed is not None
    assert found.speed.median == pytest.approx(2.0)
    assert under.slower.median == pytest.approx(0.0)
