"""An arm's process: it prepares its recipe, applies its plan, and takes optimizer steps on request of its parent.

Processes are forked from a server that has imported what every arm needs and done nothing else, so that a start is cheap and
still a process, an allocator and a pool of threads of its own.

Between two requests the process sleeps. It waits for the device at the ends of windows only, and reads losses there. An error
is sent back as a `CannotRun`, in one sentence; the process ends when its pipe closes or its parent is gone.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from powertrain import planner
from powertrain.evidence.profile import Profile, from_shares, profile_steps
from powertrain.facts.measure import wait_for
from powertrain.recipe import resolve_words
from powertrain.records import Facts, NotApplied, UserError, WrongUse
from powertrain.records.evidence import Arm, Window
from powertrain.run.fits import needed_bytes
from powertrain.run.prepare import Prepared, build_setup, prepare
from powertrain.training.loop import StepResult, measured_step_bytes, new_state, train
from powertrain.training.memory import is_out_of_memory, peak_memory_bytes
from powertrain.training.schedule import Schedule

PRELOADED = ["powertrain.evidence.worker"]
GRACE_S = 2.0                                # for a process that is told to end; then it is made to
FIRST = "first.safetensors"                  # weights before the first step
FOREVER = 10**9                              # steps: the parent says when it is enough


@dataclass(frozen=True)
class Order:
    """The arguments with which a process starts."""

    arm: Arm
    cache: str
    folder: str                              # to work in: where runs/ is looked for
    scratch: str                             # a folder for files that the parent clears away
    preload: tuple[str, ...] = ()            # modules that may add techniques
    precision: str | None = None             # "fp32": the plan less its technique of precision
    seed: int | None = None                  # instead of the recipe's


@dataclass(frozen=True)
class Ready:
    """The answer of a process whose plan is in force."""

    apply_s: float                           # of applying and confirming it, with whatever that compiles
    techniques: tuple[str, ...]
    plan: Mapping[str, Any]                  # as plan.json
    facts: Facts
    needed_bytes: int                        # of memory, predicted; the process has taken no step yet
    loss_scaling: bool                       # then a step now and then has gradients that are not finite, and is skipped


@dataclass(frozen=True)
class Taken:
    """The steps of one request: `window` is the timed part, at the end."""

    window: Window
    losses: tuple[float, ...]                # of all, the untimed ones included
    grad_norms: tuple[float, ...]


@dataclass(frozen=True)
class Probe:
    """The first steps of a run in a fresh process, untimed."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    allocated_bytes: int | None              # the real peak of a step, of all tensors alive in it; None where it did not run
    error: str | None = None                 # why there is nothing else
    technique: str = ""                      # that was asked for and is not in force, if that is the error


class CannotRun(Exception):
    """An arm's process failed. The message is one sentence: that of the process's own NotApplied or WrongUse, for example.

    `details` is the traceback, for developers; `technique` the one that was asked for and is not in force.
    """

    def __init__(self, sentence: str, *, out_of_memory: bool = False, details: str = "", technique: str = ""):
        super().__init__(sentence)
        self.out_of_memory, self.details, self.technique = out_of_memory, details, technique


def serve(pipe: connection.Connection, order: Order) -> None:
    """Answer requests, each (method of Runner, arguments), until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # it is the parent that is interrupted, and then closes the pipe
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    be_silent()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            os.chdir(order.folder)
            runner = Runner(order)
            pipe.send(runner.ready)
            while True:
                method, arguments = pipe.recv()
                pipe.send(getattr(runner, method)(*arguments))
        except Exception as error:
            if isinstance(error, (EOFError, BrokenPipeError, ConnectionResetError)):
                raise
            pipe.send(failure(error))


def failure(error: Exception) -> CannotRun:
    """Return an error as one sentence: its message where it is meant for users, else with its class."""
    lines, out_of_memory = str(error).strip().splitlines() or [""], is_out_of_memory(error)
    sentence = f"there is not enough memory: {lines[0]}" if out_of_memory else \
        " ".join(lines) if isinstance(error, UserError) else f"{type(error).__name__}: {lines[0]}"
    return CannotRun(sentence, out_of_memory=out_of_memory, details="".join(traceback.format_exception(error)),
                     technique=error.technique if isinstance(error, NotApplied) else "")


class Runner:
    """One arm's setup and state, which takes steps with a constant learning rate."""

    def __init__(self, order: Order):
        for module in order.preload:
            importlib.import_module(module)
        prepared, building_s = _timed_building(_prepare(order))
        began = time.perf_counter()
        self.prepared, self.setup = prepared, build_setup(prepared)
        apply_s = time.perf_counter() - began - sum(building_s)
        self.ready = Ready(apply_s, prepared.plan.names, planner.to_json(prepared.plan), prepared.facts,
                           needed_bytes(prepared.facts, prepared.plan), self.setup.precision.loss_scaling)
        self._trained = {name: value for name, value in self.setup.model.named_parameters() if value.requires_grad}
        self._first = Path(order.scratch, FIRST)
        self._begin()

    def _begin(self) -> None:
        self.state = new_state(self.setup, self.prepared.recipe.weight_decay)
        schedule = Schedule("constant", self.prepared.recipe.learning_rate, FOREVER)
        self._steps: Iterator[StepResult] = train(self.setup, self.state, schedule, self.prepared.recipe.max_grad_norm)
        gc.collect()
        gc.freeze()                          # as a run does

    def remember(self) -> None:
        """Save the first weights for `rewind`, on disk, because a copy in memory would count as the arm's memory."""
        save_file({name: value.detach().contiguous() for name, value in self._trained.items()}, self._first)

    def rewind(self) -> None:
        """Return to the state before the first step: weights, optimizer and order of the data."""
        self._steps.close()  # type: ignore[attr-defined]
        del self._steps, self.state
        with torch.no_grad(), safe_open(self._first, framework="pt") as first:
            for name, value in self._trained.items():
                value.copy_(first.get_tensor(name))
        self._begin()

    def window(self, untimed: int, steps: int) -> Taken:
        """Take `untimed` steps, then `steps` that are timed from one wait for the device to the next."""
        before = [next(self._steps) for _ in range(untimed)]
        wait_for(self.setup.device.type)
        began = time.perf_counter()
        timed = [next(self._steps) for _ in range(steps)]
        wait_for(self.setup.device.type)
        seconds = time.perf_counter() - began
        laps = [result.laps.parts() for result in timed]
        parts = {part: sum(step_parts[part] for step_parts in laps) for part in laps[0]}
        window = Window(timed[0].step, steps, seconds, sum(result.trained_tokens for result in timed),
                        sum(result.real_tokens for result in timed), sum(result.padding_tokens for result in timed), parts)
        return Taken(window, _floats([result.loss for result in before + timed]),
                     _floats([result.grad_norm for result in before + timed]))

    def peak(self) -> int:
        return peak_memory_bytes(self.setup.device)

    def probe(self, steps: int) -> Probe:
        taken = self.window(0, steps)
        self._steps.close()  # type: ignore[attr-defined]
        allocated = measured_step_bytes(self.setup, self.state, self.prepared.recipe.max_grad_norm)
        return Probe(taken.losses, taken.grad_norms, allocated)

    def profile(self, steps: int) -> Profile:
        """Return the profile of some steps after the first two, which allocate and compile.

        A library that was compiled ahead calls its products past torch's profiler, so the shares are those of the same parts
        compiled by this process; the seconds are the library's.
        """
        window = self.window(2, steps).window
        if "fused_blocks" in self.ready.techniques and self.setup.device.type == "cpu":
            self._without_libraries()
        self._steps.close()  # type: ignore[attr-defined]
        workload = planner.workload_of(self.prepared.facts, self.prepared.plan)
        return from_shares(profile_steps(self.setup, self.state, self.state.step, steps, self.prepared.recipe.max_grad_norm,
                                         marks_attention=not (workload.compiled or workload.one_call)), window)

    def _without_libraries(self) -> None:
        """Build the setup again without libraries that an earlier process compiled, and take the steps that compile."""
        self._steps.close()  # type: ignore[attr-defined]
        self._trained.clear()
        del self._steps, self.state, self.setup      # two of them need not fit
        self.setup = build_setup(replace(self.prepared, cache=None))
        self._begin()
        self.window(0, 2)


def _prepare(order: Order) -> Prepared:
    words = [*order.arm.words, *([] if order.seed is None else [f"seed={order.seed}"])]
    prepared = prepare(resolve_words(words), Path(order.cache), lambda said: None)       # the parent tells the user
    if order.arm.plan is not None:
        prepared = replace(prepared, plan=planner.from_json(order.arm.plan))
    if order.precision is None:
        return prepared
    if order.precision != "fp32":
        raise WrongUse(f"a probe in {order.precision!r} is not possible: it is as the plan says (None), or in fp32")
    steps = tuple(step for step in prepared.plan.steps if "precision" not in step.technique.slots)
    return replace(prepared, plan=replace(prepared.plan, steps=steps))


def _timed_building(prepared: Prepared) -> tuple[Prepared, list[float]]:
    """Return `prepared` whose model building adds its seconds to a list; they are not counted as the plan's."""
    seconds: list[float] = []
    build = prepared.material.build

    def timed() -> Any:
        began = time.perf_counter()
        try:
            return build()
        finally:
            seconds.append(time.perf_counter() - began)

    return replace(prepared, material=replace(prepared.material, build=timed)), seconds


def _floats(values: list[torch.Tensor]) -> tuple[float, ...]:
    return tuple(torch.stack([value.detach().float() for value in values]).tolist()) if values else ()


def be_silent() -> None:
    """Send all output of this process to nowhere, so that none appears between the lines of its parent."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _leave_with_parent(leave: Callable[[int], Any] = os._exit) -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])   # type: ignore[list-item,unused-ignore]
        leave(1)


# ------------------------------------------------------------------------------------------------ the parent's side


class ChildProcess:
    """A process that runs `target(pipe, *arguments)` and answers through the pipe. Raises CannotRun where it ends instead."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any):
        self.name = name
        context = process_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), name=name)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def ask(self, method: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise self._gone() from None
        return self.answer()

    def answer(self) -> Any:
        """Return what the process sends next, or raise the error that it sends."""
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _gone(self) -> CannotRun:
        self._process.join(GRACE_S)
        code = self._process.exitcode
        how = f"ended with code {code}" if code is None or code >= 0 else f"was ended by {signal.Signals(-code).name}"
        memory = code == -9                  # SIGKILL, which Windows does not have
        why = ", as Linux does when the memory is used up" if memory else ""
        return CannotRun(f"the process of {self.name} {how}{why}", out_of_memory=memory)

    def close(self) -> None:
        """End the process at once."""
        self._pipe.close()
        self._process.join(GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ArmProcess(ChildProcess):
    """An arm's process that is ready to take steps. Raises CannotRun whenever the process fails."""

    def __init__(self, order: Order):
        self.arm, self._first = order.arm, Path(order.scratch, FIRST)
        self.first_step_s = 0.0              # set by the caller that asks for the very first step
        began = time.perf_counter()
        super().__init__(f"the arm {order.arm.name!r}", serve, order)
        try:
            self.ready: Ready = self.answer()
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - began

    def close(self) -> None:
        super().close()
        self._first.unlink(missing_ok=True)


def process_context() -> Any:
    """Return a context that forks from a server with torch imported, or starts processes from scratch where it cannot.

    On macOS it cannot: Apple's frameworks, which torch loads, fail in a forked process (docs.python.org, multiprocessing).
    """
    if sys.platform == "darwin" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
