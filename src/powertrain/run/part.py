"""This process's part of a run: what its steps share, its events, and its folder from the lock to the last event.

A run of several processes has one folder: the first process writes events, checkpoints and the model, and all of them agree on
the end, on smaller passes and on a save that failed. A run of one process is the plainest case of that (training/ranks.py).
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil
import torch

from powertrain import planner
from powertrain.cost.memory import peak_memory
from powertrain.records import RunFailed, UserError, WrongUse, events, to_plain
from powertrain.records.checkpoints import clear_leftovers, newest_checkpoint, set_aside
from powertrain.records.ending_events import EARLY, LAST_STEP
from powertrain.records.errors import DoesNotFit
from powertrain.records.event_log import EVENTS_EVERY_S, EventLog
from powertrain.records.json_files import read_json, write_json
from powertrain.run import bad_steps
from powertrain.run import folder as run_folder
from powertrain.run.balance import OwnStep, SharedStep, StragglerWatch, shares_of
from powertrain.run.fits import cures, largest_pass, refuse_what_does_not_fit, with_smaller_passes, workload_of_step
from powertrain.run.folder import RunFolder
from powertrain.run.prepare import Prepared, build_setup, schedule_of, with_measured_length
from powertrain.training.checkpoint import load_checkpoint
from powertrain.training.loop import State, StepResult, new_state, train
from powertrain.training.memory import MemoryLedger, PassTooLarge, peak_memory_bytes, step_ledger
from powertrain.training.ranks import ALONE, Ranks
from powertrain.training.setup import Setup

Listener = Callable[[events.Event], None]
WriteSample = Callable[[Prepared, Setup, int], str]  # at most so many tokens after the recipe's prompt; see use/generation.py

SAME_REQUEST_S = 0.5         # Linux and launchers tell a process more than once that the one that started it has ended
WATCHED, WATCHED_RUN = 2, 20 # the step whose memory is watched, and steps of a run on a CPU from which that is worth its time


@dataclass
class Record:
    """The events of a run: written to its log and shown to a listener, by the writer among the run's processes."""

    log: EventLog
    listener: Listener
    ranks: Ranks
    _listener_failed: bool = False           # at the last event
    _flushed_at: float = field(default_factory=time.perf_counter)

    def emit(self, event: events.Event, *, durable: bool = False) -> None:
        """Write an event and show it. A step waits in memory; everything else goes to the disk at once."""
        if self.ranks.is_writer:
            self.log.write(event)
            self.show(event)
            if not isinstance(event, events.Step):
                self.flush(durable=durable, step=event.step)

    def show(self, event: events.Event) -> None:
        """Give the event to the listener. One that raises ends no run: the first of its errors in a row becomes an event."""
        if not self.ranks.is_writer:
            return
        try:
            self.listener(event)
        except Exception as error:
            if not self._listener_failed:
                self.log.write(events.ListenerFailed(step=event.step, why=f"{type(error).__name__}: {error}"))
            self._listener_failed = True
        else:
            self._listener_failed = False

    def flush(self, *, durable: bool = False, step: int = 0) -> None:
        """Bring the events that wait to the disk; the first flush that fails is an event."""
        was_failing = self.log.failure
        self.log.flush(durable=durable)
        if self.log.failure and not was_failing:
            waiting = events.EventsWaiting(step=step, why=self.log.failure)
            self.log.write(waiting)
            self.show(waiting)
        self._flushed_at = time.perf_counter()

    def flush_now_and_then(self) -> None:
        """Bring the steps that wait to the disk where the last flush is a second ago."""
        if self.ranks.is_writer and time.perf_counter() - self._flushed_at > EVENTS_EVERY_S:
            self.flush()


class Beside(Protocol):
    """Processes beside the training, which it does not wait for."""

    def look(self) -> Sequence[events.Event]:
        """Return what they have to say since the last look."""


@dataclass
class Interrupt:
    requested: str | None = None             # name of the signal that asked the run to stop


@contextlib.contextmanager
def listen() -> Iterator[Interrupt]:
    """Note Ctrl-C and SIGTERM inside: the first asks the run to finish its step and save, a second one exits at once.

    A signal within SAME_REQUEST_S of the first one repeats the same request.
    """
    interrupt, asked_s = Interrupt(), 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked_s
        if not interrupt.requested:
            interrupt.requested, asked_s = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - asked_s >= SAME_REQUEST_S:
            os._exit(128 + number)           # now: no clean-up that could hang; checkpoints are whole at any time

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@dataclass
class Part:
    """What the steps of a run share in this process."""

    prepared: Prepared
    setup: Setup
    state: State
    folder: RunFolder
    record: Record
    write_sample: WriteSample
    interrupt: Interrupt
    pending: list[StepResult] = field(default_factory=list)
    stopped_by: str | None = None            # the signal that ended the run early
    early: events.StoppedEarly | None = None     # why this step is the last one, before the schedule's
    weights_step: int | None = None          # whose weights the model has, where they need not be those of the last step
    checkpoint_failed: str | None = None     # why the last checkpoint is not on the disk
    not_mirrored: str | None = None          # what was promised and is not in the mirror, and why
    step_s: list[float] = field(default_factory=list)    # of the steps that the plan in force has made
    since_save: list[events.Step] = field(default_factory=list)      # read since the last save began
    stragglers: StragglerWatch = field(default_factory=StragglerWatch)
    taken: int = 0                           # steps that the plan in force has begun in this process
    rewind_from: events.UpdateSkipped | None = None      # the step after which the run has to rewind
    beside: Beside | None = None             # followers of the run that have something to say
    began_s: float = field(default_factory=time.perf_counter)    # before its first event, from which its report counts

    @property
    def ranks(self) -> Ranks:
        return self.setup.ranks

    @property
    def is_last(self) -> bool:
        """Return whether no step follows."""
        return self.early is not None or self.state.step == self.prepared.total_steps

    def steps(self) -> Iterator[StepResult]:
        """Return the steps that are left, by the setup in force."""
        return train(self.setup, self.state, schedule_of(self.prepared.recipe, self.prepared.total_steps),
                     self.prepared.recipe.max_grad_norm)

    def emit(self, event: events.Event, *, durable: bool = False) -> None:
        """Write an event and show it; see Record."""
        self.record.emit(event, durable=durable)

    def tell_beside(self) -> None:
        """Write what the processes beside the training have to say."""
        for event in () if self.beside is None else self.beside.look():
            self.emit(event if event.step else replace(event, step=self.state.step))

    def read_steps(self) -> None:
        """Wait for the device, and write the steps since the last reading, up to one that makes the run rewind.

        Raises LossNotFinite, GradientNotFinite and TooManyBadSteps.
        """
        if not self.pending:
            return
        recipe, guard, good = self.prepared.recipe, self.state.guard, torch.zeros((), device=self.setup.device)
        numbers = torch.stack([torch.stack([result.loss, result.grad_norm, *result.metrics.values(),
                                            good if result.bad is None else result.bad.float()])
                               for result in self.pending]).tolist()
        each = self.ranks.each([OwnStep(result.own_tokens, result.laps.parts()) for result in self.pending])
        shared = list(zip(*each, strict=True))
        for result, own, (loss, norm, *metrics, bad) in zip(self.pending, shared, numbers, strict=True):
            if (error := bad_steps.error_of(recipe, self.setup, result, loss, norm)) is not None:
                raise error
            parts = own[0].parts
            self.step_s.append(sum(parts.values()))
            step = events.Step(step=result.step, loss=loss, tokens=result.trained_tokens, real_tokens=result.real_tokens,
                               seconds=self.step_s[-1], learning_rate=result.learning_rate, grad_norm=norm,
                               parts={name: round(seconds, 6) for name, seconds in parts.items()},
                               padding_tokens=result.padding_tokens,
                               metrics=dict(zip(result.metrics, metrics, strict=True)), **shares_of(own))
            self.since_save.append(step)
            self.emit(step)
            if guard is not None and not bad:
                guard.in_row = 0
            elif guard is not None:
                told = bad_steps.skipped(recipe, self.setup, guard, result, loss, norm)
                self.emit(told)
                if bad_steps.must_rewind(recipe, guard, told):
                    self.rewind_from = told
                    break
        self.pending.clear()
        self._name_stragglers(shared)
        self.record.flush_now_and_then()

    def _name_stragglers(self, steps: Sequence[SharedStep]) -> None:
        """Warn of the processes that hold the others up. All processes come to the same ones. Stages differ by their blocks."""
        found = [straggler for step in ([] if self.ranks.in_stages else steps) for straggler in self.stragglers.take(step)]
        if found:
            hosts = self.ranks.each(socket.gethostname())
            for straggler in found:
                self.emit(replace(straggler, step=self.state.step, host=hosts[straggler.rank]))

    # ---------------------------------------------------------------------------------------- memory

    def ledger(self) -> contextlib.AbstractContextManager[MemoryLedger | None]:
        """Return the watch over the memory of the next step: of the second one of a run that is long enough, else none."""
        device = self.setup.device
        self.taken += 1
        if self.taken != WATCHED or (device.type != "cuda" and self.prepared.total_steps < WATCHED_RUN):
            return contextlib.nullcontext()
        return step_ledger(device, self.setup.model, self.state.optimizer, self.setup.objective.held)

    def emit_memory(self, ledger: MemoryLedger) -> None:
        """Write what the watched step, the last one, allocated."""
        facts, step, batch = self.prepared.facts, self.state.step, self.state.batch - 1
        workload = planner.workload_of(facts, self.prepared.plan)
        self.emit(events.Memory(step=step, allocated_bytes=ledger.peak_bytes, reserved_bytes=ledger.reserved_bytes,
                                predicted=peak_memory(facts.model, workload_of_step(workload, self.setup, batch)),
                                fullest_bytes=sum(peak_memory(facts.model, workload.shared_by(self.ranks.world)).values())))


# ---------------------------------------------------------------------------------------- from the lock to the last event


@contextlib.contextmanager
def new_run(prepared: Prepared, listener: Listener, write_sample: WriteSample, ranks: Ranks = ALONE) -> Iterator[Part]:
    """Open a new run: its folder, locked, and a setup with the plan in force. Writes the first and the last event."""
    refuse_what_does_not_fit(prepared)
    with (_in_folder(ranks, lambda: run_folder.create(prepared.recipe), is_new=True) as folder,
          ranks.watched(folder.path) as ranks, listen() as interrupt):
        record = Record(EventLog(folder.events), listener, ranks)
        record.show(events.Folder(path=str(folder.path), processes=ranks.world))
        _show_beginning(prepared, record)
        prepared, failed = _with_built_code(prepared, ranks)
        setup = build_setup(prepared, record.show).shared_by(ranks)
        prepared, setup = _with_length(prepared, setup, record)
        if ranks.is_writer:
            run_folder.write_beginning(folder, to_plain(prepared.facts), planner.to_json(prepared.plan), prepared.resolved)
        state = replace(new_state(setup, prepared.recipe.weight_decay), guard=bad_steps.guard_of(prepared.recipe, setup.device))
        part = Part(prepared, setup, state, folder, record, write_sample, interrupt)
        with _until_the_end(part):
            part.emit(events.Start(**_start_fields(part)), durable=True)
            _emit_notes(part, failed)
            yield part


def _with_built_code(prepared: Prepared, ranks: Ranks) -> tuple[Prepared, Mapping[str, str]]:
    """Return the run with what its techniques need compiled, and technique -> what failed, the same in all processes."""
    built = planner.with_built_code(prepared.plan)
    plan, failed = next((other for other in ranks.each(built) if other[1]), built)       # of the first that cannot compile
    return replace(prepared, plan=plan), failed


def _show_beginning(prepared: Prepared, record: Record) -> None:
    """Show what takes time before the first step."""
    if compiled := tuple(step.technique.name for step in prepared.plan.steps if step.technique.compiles()):
        record.show(events.Compiling(techniques=compiled))
    record.show(events.Building(parameters=prepared.facts.model.parameters))


def _with_length(prepared: Prepared, setup: Setup, record: Record) -> tuple[Prepared, Setup]:
    """Return the run with its number of steps, in smaller passes where those that are timed do not fit the memory."""
    while True:
        try:
            return with_measured_length(prepared, setup, lambda s: record.show(events.TimingSteps(seconds=s))), setup
        except PassTooLarge as error:
            said = error.said
        smaller = with_smaller_passes(prepared, setup, 0)
        if smaller is None:
            raise DoesNotFit(1, said, largest_pass(setup, 0), cures(prepared, judged=False), updating=False)
        prepared, setup = smaller


@contextlib.contextmanager
def continued_run(folder: RunFolder, prepared: Prepared, listener: Listener, write_sample: WriteSample,
                  ranks: Ranks = ALONE) -> Iterator[Part]:
    """Open a run at its newest whole checkpoint, with its own plan."""
    with _in_folder(ranks, lambda: folder), ranks.watched(folder.path) as ranks, listen() as interrupt:
        record = Record(EventLog(folder.events), listener, ranks)
        _show_beginning(prepared, record)
        prepared, failed = _with_built_code(prepared, ranks)
        setup = build_setup(prepared, record.show).shared_by(ranks)
        state = replace(new_state(setup, prepared.recipe.weight_decay), guard=bad_steps.guard_of(prepared.recipe, setup.device))
        part = Part(prepared, setup, state, folder, record, write_sample, interrupt)
        if ranks.is_writer:
            clear_leftovers(folder.checkpoints)
        ranks.barrier()
        checkpoint, rejected = newest_checkpoint(folder.checkpoints)
        if checkpoint is None and rejected:
            damaged = "; ".join(f"{name}: {why}" for name, why in rejected)
            raise RunFailed(f"no checkpoint in {folder.checkpoints} is whole: {damaged}. Start a new run with another "
                            "--output; this folder was not changed")
        if checkpoint is not None:
            load_checkpoint(checkpoint, part.state)
        ranks.barrier()                      # all have read before the writer moves anything
        if ranks.is_writer and (made := planner.to_json(prepared.plan)) != read_json(folder.plan):
            write_json(folder.plan, made)    # for other processes, another way to share the run, another device or no compiler
            write_json(folder.facts, to_plain(prepared.facts))
        with _until_the_end(part):
            part.emit(events.Resume(step=part.state.step, rejected=tuple(f"{name}: {why}" for name, why in rejected),
                                    **_start_fields(part)), durable=True)
            _emit_notes(part, failed)
            for name, why in rejected if ranks.is_writer else ():
                part.emit(events.CheckpointRejected(step=part.state.step, name=name, why=why))
                # the continuation will write a checkpoint in its place
                set_aside(folder.checkpoints / name)
            yield part


@contextlib.contextmanager
def _in_folder(ranks: Ranks, find: Callable[[], RunFolder], *, is_new: bool = False) -> Iterator[RunFolder]:
    """Enter the run's folder: the writer finds it and locks it, and all processes use that one."""
    with contextlib.ExitStack() as held:
        found = RunFolder(Path())
        if ranks.is_writer:
            found = find()
            held.enter_context(run_folder.locked(found))
            if is_new:                       # another may have begun there, and ended, while the lock was waited for
                run_folder.check_free(found.path)
            found.lock.write_text(f"{os.getpid()} {socket.gethostname()} {time.time_ns()}")
        found = ranks.agree(found)
        seen = ranks.each(found.lock.read_text() if found.lock.is_file() else "")
        if (other := next((rank for rank, token in enumerate(seen) if token != seen[0]), 0)):
            raise WrongUse(f"process {other} does not find the folder {found.path.resolve()} of this run, which all processes "
                           "need; name one on a disk that they share with --output")
        yield found


@contextlib.contextmanager
def _until_the_end(part: Part) -> Iterator[None]:
    """Write the last event of the session, whatever ends it."""
    try:
        yield
    except BaseException as error:
        fields = error.fields() if isinstance(error, UserError) else {"kind": type(error).__name__}
        part.emit(events.End(reason="failed", step=part.state.step, seconds=time.perf_counter() - part.began_s,
                             message=str(error), error=to_plain(fields)), durable=True)
        raise
    because = "" if part.stopped_by is not None else EARLY if part.early is not None else LAST_STEP
    part.emit(events.End(reason="finished" if part.stopped_by is None else "stopped", because=because, signal=part.stopped_by,
                         step=part.state.step, seconds=time.perf_counter() - part.began_s,
                         clipped_steps=int(part.state.clipped_steps), passes=getattr(part.setup.run_pass, "counts", {}),
                         peak_memory_bytes=peak_memory_bytes(part.setup.device), not_saved=part.checkpoint_failed,
                         not_mirrored=part.not_mirrored),
              durable=True)


def _emit_notes(part: Part, failed: Mapping[str, str]) -> None:
    """Write what the techniques in force found in this model, and which of them could not compile their code."""
    found = {step.technique.name: step.technique.found(part.setup) for step in part.prepared.plan.steps}
    for name, text in (*failed.items(), *found.items()):
        if text is not None:
            part.emit(events.TechniqueNote(step=part.state.step, technique=name, message=text))


def _start_fields(part: Part) -> Mapping[str, Any]:
    prepared = part.prepared
    recipe, data, model = prepared.recipe, prepared.facts.data, prepared.facts.model
    return {"version": events.VERSION, "name": recipe.name, "method": recipe.method, "task": model.task,
            "provider": model.provider, "opens_in": None if recipe.lora.kind == "lslora" else "peft",
            "total_steps": prepared.total_steps, "train_batch_size": recipe.train_batch_size, "block": data.block,
            "parameters": model.parameters, "device": prepared.facts.hardware.device, "processes": part.ranks.world,
            "techniques": prepared.plan.names,
            "estimate": to_plain(prepared.plan.estimate), "load": psutil.getloadavg()[0]}
