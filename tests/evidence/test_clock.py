"""Arms in processes of their own: what they take, what comes back, and that none is left. Nothing here is about speed."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from driver import TINY
from powertrain.evidence.clock import (
    LEAST_PAIRS,
    Arena,
    CannotRun,
    Pace,
    Track,
    check_room,
    is_steady,
    judge,
    lead_in,
    steps_per_window,
    warm_up,
)
from powertrain.evidence.parity import compare_losses
from powertrain.evidence.worker import PRELOADED, ArmProcess, Order, failure, process_context
from powertrain.records.evidence import FASTER, INVALID, Arm, ArmRun, Comparison, Window

SABOTEURS = Path(__file__).resolve().parents[2] / "benchmarks"
QUICK = Pace(window_s=0.001, pairs=5, most_pairs=5, warm_up_s=0.05)
NO_CLAIM = {"step_time": [1.0, 1.0], "peak_memory_bytes": 0, "basis": "guess: a test"}


@pytest.fixture
def words(source: Path) -> tuple[str, ...]:
    """Dropout, passes of unequal size, fp32, one thread: tests run beside each other."""
    return (f"data={source}", *(word for word in TINY if "threads" not in word), "techniques.threads.threads=1",
            "techniques.bf16=off")


@pytest.fixture
def arena(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Arena]:
    monkeypatch.syspath_prepend(SABOTEURS)
    monkeypatch.chdir(tmp_path)
    with Arena(cache, preload=["saboteurs"]) as arena:
        yield arena
    assert not multiprocessing.active_children()


def planned(arena: Arena, words: tuple[str, ...], **steps: dict[str, Any]) -> Arm:
    """The plan for these words, with further techniques in the place of those of the same slot."""
    if "planned" not in arena.plans:
        arena.probe(Arm("planned", words), steps=1)
    plan = arena.plans["planned"]
    kept = [step for step in plan["steps"] if not (step["technique"] == "fused_adamw" and "idle_adamw" in steps)]
    added = [{"technique": name, "settings": settings, "because": "a test", "exactness": "ROUNDING", "claim": NO_CLAIM}
             for name, settings in steps.items()]
    return Arm(" and ".join(steps), words, {**plan, "steps": kept + added})


def test_equal_arms_take_the_same_steps_in_turns_and_learn_the_same(
        arena: Arena, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    ask = ArmProcess.ask
    monkeypatch.setattr(ArmProcess, "ask", lambda process, method, *arguments: (
        turns.append(process.arm.name) if method == "window" else None, ask(process, method, *arguments))[1])
    comparison, a, b = arena.control(Arm("plan", words), QUICK)
    assert (comparison.a, comparison.b) == ("plan", "plan again")
    assert turns[-10:] == ["plan", "plan again", "plan again", "plan", "plan", "plan again", "plan again", "plan", "plan",
                           "plan again"]
    assert comparison.pairs == len(a.windows) == len(b.windows) == LEAST_PAIRS
    assert a.losses == b.losses
    assert a.grad_norms == b.grad_norms
    assert a.warm_up_steps == b.warm_up_steps >= 3
    assert [(window.first_step, window.steps, window.real_tokens) for window in a.windows] == [
        (window.first_step, window.steps, window.real_tokens) for window in b.windows]
    assert a.windows[0].first_step > a.warm_up_steps
    assert 0 < sum(a.windows[0].parts.values()) <= a.windows[0].seconds
    assert comparison.speed is not None
    assert math.isfinite(comparison.speed.median)
    assert "micro_batch" in a.techniques
    assert min(*comparison.peak_memory_bytes, *comparison.tokens_per_s, a.ready_s, a.first_step_s) > 0


def test_an_arm_that_is_measured_again_starts_again(arena: Arena, words: tuple[str, ...]) -> None:
    plan, other, third = (Arm(name, (*words, *more)) for name, more in [
        ("plan", ()), ("other", ("techniques.fused_adamw=off",)), ("third", ("techniques.micro_batch=off",))])
    _, first, _ = arena.compare(plan, other, QUICK)
    process = arena._processes[0]
    _, second, _ = arena.compare(plan, third, QUICK)
    assert arena._processes[0] is process
    assert len(multiprocessing.active_children()) == 2, "the third arm takes the other's place"
    steps = min(len(first.losses), len(second.losses))
    assert steps >= 8
    assert first.losses[:steps] == second.losses[:steps], "weights, optimizer, data and dropout are those of the first step"
    assert first.first_step_s == second.first_step_s
    assert (first.arm, second.arm) == ("plan", "plan")


def test_arms_that_do_not_fit_together_take_whole_runs_in_turns(cache: Path, words: tuple[str, ...],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(arms: object) -> None:
        raise CannotRun("no room", out_of_memory=True)

    monkeypatch.setattr("powertrain.evidence.clock.check_room", too_large)
    with Arena(cache) as arena:
        comparison, a, b = arena.compare(Arm("a", words), Arm("b", words), QUICK)
        assert len(multiprocessing.active_children()) == 0
    assert comparison.pairs == len(a.windows) == len(b.windows) == 6
    assert a.losses == b.losses
    assert a.windows[0].first_step == a.windows[3].first_step, "of the first run, and of the last"
    assert [window.first_step for window in a.windows] == [window.first_step for window in b.windows]
    assert min(a.first_step_s, b.first_step_s) > 0


def test_arms_that_turn_out_too_large_for_the_memory_together_take_turns_too(
        arena: Arena, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[int] = []
    ask = ArmProcess.ask
    monkeypatch.setattr(ArmProcess, "ask", lambda process, method, *arguments: (
        beside.append(len(multiprocessing.active_children())) if method == "window" else None,
        ask(process, method, *arguments))[1])
    with ArmProcess(Order(Arm("plan", words), str(arena._cache), ".", ".")) as process:
        free_bytes = process.ready.facts.hardware.free_memory_bytes
        assert 0 < process.ready.needed_bytes < free_bytes
        large = replace(process.ready, needed_bytes=free_bytes // 2 + 1)
    with pytest.raises(CannotRun, match="GiB together"):
        check_room([large, large])
    monkeypatch.setattr("powertrain.evidence.clock.check_room", lambda arms: check_room([large, large]))
    comparison, _, _ = arena.compare(Arm("a", words), Arm("b", words), QUICK)
    assert comparison.pairs == 6
    assert set(beside) == {1}, "never two at a time"


def test_a_technique_that_does_nothing_is_found_out_by_its_confirm(arena: Arena, words: tuple[str, ...]) -> None:
    idle = planned(arena, words, idle_adamw={})
    with pytest.raises(CannotRun, match=r"fused_adamw: parameter groups \[0, 1\] of 2 are not fused") as error:
        arena.compare(planned(arena, words), idle, QUICK)
    assert error.value.technique == "idle_adamw"
    assert "fused_adamw" in str(arena.probe(idle).error)


@pytest.mark.parametrize("what", ["tokens", "scale", "learning_rate"])
def test_a_technique_that_changes_the_mathematics_is_found_out_by_parity(arena: Arena, words: tuple[str, ...],
                                                                         what: str) -> None:
    plain, skewed = (arena.probe(arm, precision="fp32") for arm in (planned(arena, words),
                                                                    planned(arena, words, skewed={"what": what})))
    assert plain.error is None
    assert skewed.error is None
    assert not compare_losses("ROUNDING", plain, skewed, dtype="fp32").holds
    assert (plain.losses[0] == skewed.losses[0]) == (what == "learning_rate"), "that shows after the first step only"


def test_a_technique_that_only_waits_learns_the_same_to_the_bit(arena: Arena, words: tuple[str, ...]) -> None:
    plain, slow = (arena.probe(arm) for arm in (planned(arena, words), planned(arena, words, slow={})))
    assert compare_losses("BITWISE", plain, slow, dtype="fp32").holds


def test_a_run_in_which_nothing_is_learned_has_no_speed(arena: Arena, words: tuple[str, ...]) -> None:
    comparison, _, b = arena.compare(planned(arena, words), planned(arena, words, skewed={"what": "nothing"}), QUICK)
    assert comparison.verdict == INVALID
    assert comparison.speed is None
    assert "all gradients are zero" in comparison.because
    assert not any(b.grad_norms)


def test_a_run_whose_loss_is_not_finite_has_no_speed(arena: Arena, words: tuple[str, ...]) -> None:
    comparison, _, _ = arena.compare(Arm("plan", words), Arm("wild", (*words, "learning_rate=1e30")), QUICK)
    assert comparison.verdict == INVALID
    assert comparison.because == "wild: the loss is not finite"


def test_another_seed_and_another_precision_are_other_runs(arena: Arena, words: tuple[str, ...]) -> None:
    arm = Arm("plan", (*words[:-1], "techniques.bf16=on"))
    plain, again, seeded, exact = (arena.probe(arm), arena.probe(arm), arena.probe(arm, seed=7),
                                   arena.probe(arm, precision="fp32"))
    assert plain == again
    assert len(plain.losses) == len(plain.grad_norms) == 4
    assert plain.losses[0] != seeded.losses[0]
    assert plain.losses[0] != exact.losses[0]
    assert compare_losses("ROUNDING", plain, exact, dtype="bf16").holds


def test_a_profile_sums_to_the_step(arena: Arena, words: tuple[str, ...]) -> None:
    found = arena.profile(Arm("plan", words), steps=2)
    assert sum(found.classes.values()) == pytest.approx(found.step_s)
    assert min(found.classes[name] for name in ("products", "attention", "loss", "elementwise", "optimizer")) > 0


def test_what_cannot_be_trained_comes_back_as_the_sentence_that_says_so(arena: Arena, words: tuple[str, ...]) -> None:
    wrong = Arm("wrong", (*words, "techniques.bf17=on"))
    with pytest.raises(CannotRun, match="there is no technique 'bf17'; did you mean"):
        arena.compare(Arm("plan", words), wrong, QUICK)
    assert "'bf17'" in str(arena.probe(wrong).error)
    with pytest.raises(CannotRun, match="'bf17'"):
        arena.profile(wrong)


def process_of(cache: Path, words: tuple[str, ...], tmp_path: Path) -> ArmProcess:
    return ArmProcess(Order(Arm("plan", words), str(cache), str(tmp_path), str(tmp_path)))


def test_an_interrupt_is_the_parents_business(cache: Path, words: tuple[str, ...], tmp_path: Path) -> None:
    with process_of(cache, words, tmp_path) as process:
        child, = multiprocessing.active_children()
        os.kill(child.pid or 0, signal.SIGINT)
        assert process.ask("window", 0, 2).window.steps == 2


def test_a_process_that_is_killed_is_a_sentence(cache: Path, words: tuple[str, ...], tmp_path: Path) -> None:
    with process_of(cache, words, tmp_path) as process:
        multiprocessing.active_children()[0].kill()
        with pytest.raises(CannotRun, match="the process of the arm 'plan' was ended by SIGKILL") as error:
            process.ask("window", 0, 2)
    assert error.value.out_of_memory, "it may have been for that, so the arms are tried one after the other"


def test_nothing_is_left_when_the_parent_fails_or_is_killed(cache: Path, words: tuple[str, ...], tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), Arena(cache) as arena:
        arena.compare(Arm("a", words), Arm("b", words), QUICK)
        assert len(multiprocessing.active_children()) == 2
        raise KeyboardInterrupt
    assert not multiprocessing.active_children()
    script = tmp_path / "parent.py"
    script.write_text("import multiprocessing, sys, time\n"
                      "from pathlib import Path\n"
                      "from powertrain.evidence.worker import ArmProcess, Order\n"
                      "from powertrain.records.evidence import Arm\n"
                      "if __name__ == '__main__':\n"
                      f"    process = ArmProcess(Order(Arm('plan', {words!r}), {str(cache)!r}, '.', '.'))\n"
                      "    print(multiprocessing.active_children()[0].pid, flush=True)\n"
                      "    process.ask('window', 0, 10**6)\n")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, alive = psutil.wait_procs([child], timeout=30)
    assert not alive, "in the middle of a window, too"
    assert gone


def test_what_every_arm_imports_leaves_cuda_alone() -> None:
    """A process that is forked after CUDA was looked at can never use it."""
    code = ("import torch\n"
            "def looked(*arguments): raise SystemExit('CUDA was looked at')\n"
            "torch._C._cuda_getDeviceCount = torch._C._cuda_init = torch.cuda.is_available = torch.cuda._lazy_init = looked\n"
            "torch.cuda.device_count = looked\n"
            f"import importlib\nfor name in {PRELOADED!r}:\n    importlib.import_module(name)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------ decisions, without a clock


def windows(*seconds: float, steps: int = 1) -> list[Window]:
    return [Window(1, steps, each, 100, 100 * steps, 0, {}) for each in seconds]


@pytest.mark.parametrize(("seconds", "steady"), [
    ((20.0, 1.0), False), ((20.0, 1.0, 1.0), True), ((20.0, 2.0, 1.0), False), ((20.0, 2.0, 1.0, 1.05), True),
    ((1.0, 1.0), False), ((20.0, *[1.0, 2.0] * 6), True),
])
def test_a_warm_up_ends_when_two_parts_run_at_one_speed(seconds: tuple[float, ...], steady: bool) -> None:
    assert is_steady(windows(*seconds)) is steady


class FromATable:
    """Stands in for an arm's process: steps take what the table says."""

    def __init__(self, step_s: Callable[[int], float]):
        self.step_s, self.done, self.first_step_s, self.now_s = step_s, 0, 0.0, 0.0

    def ask(self, method: str, untimed: int, steps: int) -> Any:
        from powertrain.evidence.worker import Taken

        assert method == "window"
        seconds = sum(self.step_s(self.done + number) for number in range(untimed + steps))
        self.now_s += seconds
        self.done += untimed + steps
        return Taken(replace(windows(seconds, steps=steps)[0], first_step=self.done), (1.0,) * steps, (1.0,) * steps)


@pytest.mark.parametrize(("step_s", "steps"), [
    (lambda step: 30.0 if step == 0 else 1.0, 3),                    # compiles in the first step
    (lambda step: 30.0 if step == 0 else 5.0 if step < 2 else 1.0, 4),
    (lambda step: 3.0, 3), (lambda step: 300.0, 3),
])
def test_a_warm_up_takes_what_it_needs(step_s: Callable[[int], float], steps: int) -> None:
    process = FromATable(step_s)
    track = Track(process)  # type: ignore[arg-type]
    warm_up(track, Pace(warm_up_s=100), now=lambda: process.now_s)
    assert track.warm_up_steps >= steps
    assert process.first_step_s == step_s(0)


def test_a_warm_up_that_never_becomes_steady_ends_all_the_same() -> None:
    process = FromATable(lambda step: 1.0 + step % 2)
    track = Track(process)  # type: ignore[arg-type]
    warm_up(track, Pace(warm_up_s=6), now=lambda: process.now_s)
    assert process.now_s <= 9


def test_an_arm_whose_steps_are_no_shorter_in_the_median_never_earns_its_start_back() -> None:
    """It is faster by its pairs, and the machine stood still in one of its windows."""
    times = [float(second) for second in range(10, 18)]
    taken = {"a": windows(1.0, *times), "b": windows(100.0, *(second / 1.05 for second in times))}
    tracks = [Track(SimpleNamespace(arm=Arm(name, ()), first_step_s=20.0, ready=SimpleNamespace(  # type: ignore[arg-type]
        apply_s=apply_s, loss_scaling=False)), [1.0], [1.0]) for name, apply_s in (("a", 0.0), ("b", 5.0))]
    runs = [ArmRun(name, 1.0, 20.0, 3, tuple(each), (1.0,), (1.0,), 1) for name, each in taken.items()]
    found, _, _ = judge(*tracks, *runs, margin=0.02)
    assert found.verdict == FASTER
    assert found.compile_s > 0
    assert found.break_even_steps is None


@pytest.mark.parametrize("text", ["std::bad_alloc", "could not create a memory object", "not enough memory: you tried"])
def test_a_process_that_has_no_memory_says_so_whichever_library_asked_for_it(text: str) -> None:
    assert failure(RuntimeError(text)).out_of_memory


def test_windows_have_the_same_steps_and_their_usual_length_between_them() -> None:
    assert steps_per_window(Pace(window_s=1.0), [0.1, 0.3]) == 5
    assert steps_per_window(Pace(window_s=1.0), [4.0, 3.0]) == 1


def test_nothing_is_forked_from_a_process_with_torch_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert process_context().get_start_method() == "spawn"


def test_untimed_steps_before_a_window_are_a_time_and_the_same_for_both_arms() -> None:
    assert lead_in(Pace(lead_in_s=1.0), [0.1, 0.3]) == 5
    assert lead_in(Pace(lead_in_s=1.0), [2.0, 1.0]) == 0
    assert lead_in(Pace(lead_in_s=1.0, least_lead_in=1), [2.0, 1.0]) == 1


def test_the_comparison_is_a_value(arena: Arena, words: tuple[str, ...]) -> None:
    found, _, _ = arena.compare(Arm("a", words), Arm("b", words), QUICK, deadline=time.monotonic())
    assert isinstance(found, Comparison)
    assert found.pairs == LEAST_PAIRS
    assert set(arena.plans) == {"a", "b"}
    assert arena.facts is not None
