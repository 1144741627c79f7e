"""A run from its first step to its last: the loop, and what has to happen between steps.

Everything that happens is an event: appended to `events.jsonl`, and given to a listener (the terminal) as it is.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch

from powertrain import planner
from powertrain.cost.memory import peak_memory
from powertrain.data.example import Example
from powertrain.recipe import in_steps
from powertrain.records import Evaluation, NotDurable, RunFailed, UserError, to_plain
from powertrain.records.errors import DoesNotFit, LossNotFinite
from powertrain.records.events import (
    VERSION,
    Adapters,
    CheckpointRejected,
    End,
    Evaluated,
    Event,
    EventsWaiting,
    Folder,
    ListenerFailed,
    Memory,
    OutOfMemory,
    Resume,
    Sample,
    Start,
    Step,
    TechniqueNote,
    TimingSteps,
)
from powertrain.run import folder as run_folder
from powertrain.run.fits import cures, refuse_what_does_not_fit, workload_of_step
from powertrain.run.folder import RunFolder
from powertrain.run.out_of_memory import UpdateWatch, clear_step, is_out_of_memory, largest_pass, said_by, with_smaller_passes
from powertrain.run.prepare import Prepared, build_setup, schedule_of, with_measured_length
from powertrain.run.speeds import keep_speed
from powertrain.run.storing import check_disk, save, set_aside, write_model
from powertrain.training.checkpoint import clear_leftovers, load_checkpoint, newest_checkpoint
from powertrain.training.evaluation import evaluate, spread
from powertrain.training.events import EVENTS_EVERY_S, EventLog
from powertrain.training.interrupt import Interrupt, listen
from powertrain.training.ledger import MemoryLedger, standing_bytes
from powertrain.training.loop import State, StepResult, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

Listener = Callable[[Event], None]
WriteSample = Callable[[Prepared, Setup, int], str]  # at most so many tokens after the recipe's prompt; see use/sampling.py

DONE, STOPPED_AND_SAVED = 0, 75
WATCHED, WATCHED_RUN = 2, 20 # the step whose memory is watched, and steps of a run on a CPU from which that is worth its time


@dataclass
class Session:
    """The parts of a run that its steps share."""

    prepared: Prepared
    setup: Setup
    state: State
    folder: RunFolder
    log: EventLog
    listener: Listener
    write_sample: WriteSample
    pending: list[StepResult]
    flushed_at: float = 0.0
    checkpoint_failed: str | None = None
    step_s: list[float] = field(default_factory=list)    # of the steps that the plan in force has made
    taken: int = 0               # steps that the plan in force has begun in this process
    memory: Memory | None = None             # of the watched step, until that step is written
    listener_failed: bool = False            # at the last event
    began_s: float = field(default_factory=time.perf_counter)    # before its first event, from which its report counts
    watch: UpdateWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = UpdateWatch(self.state.optimizer)

    def emit(self, event: Event, *, durable: bool = False) -> None:
        """Write an event and show it. A step waits in memory; everything else goes to the disk at once."""
        self.log.write(event)
        self.show(event)
        if not isinstance(event, Step):
            self.flush(durable=durable)

    def show(self, event: Event) -> None:
        """Give the event to the listener. One that raises ends no run: the first of its errors in a row is an event."""
        try:
            self.listener(event)
        except Exception as error:
            if not self.listener_failed:
                self.log.write(ListenerFailed(step=self.state.step, why=f"{type(error).__name__}: {error}"))
            self.listener_failed = True
        else:
            self.listener_failed = False

    def flush(self, *, durable: bool) -> None:
        was_failing = self.log.failure
        self.log.flush(durable=durable)
        if self.log.failure and not was_failing:
            waiting = EventsWaiting(step=self.state.step, why=self.log.failure)
            self.log.write(waiting)
            self.show(waiting)
        self.flushed_at = time.perf_counter()

    def read_steps(self) -> None:
        """Wait for the device, and write what the steps since the last reading computed. Raises RunFailed on NaN."""
        if not self.pending:
            return
        losses = torch.stack([result.loss for result in self.pending]).tolist()
        norms = torch.stack([result.grad_norm for result in self.pending]).tolist()
        metrics = {name: torch.stack([result.metrics[name] for result in self.pending]).tolist()
                   for name in self.pending[0].metrics}
        for place, (result, loss, norm) in enumerate(zip(self.pending, losses, norms, strict=True)):
            if not math.isfinite(loss):
                raise LossNotFinite(result.step, loss)
            parts = result.laps.parts()
            self.step_s.append(sum(parts.values()))
            self.emit(Step(step=result.step, loss=loss, tokens=result.trained_tokens, real_tokens=result.real_tokens,
                           seconds=sum(parts.values()), learning_rate=result.learning_rate, grad_norm=norm,
                           parts={name: round(seconds, 6) for name, seconds in parts.items()},
                           padding_tokens=result.padding_tokens,
                           metrics={name: values[place] for name, values in metrics.items()}))
        self.pending.clear()
        if time.perf_counter() - self.flushed_at > EVENTS_EVERY_S:
            self.flush(durable=False)


def start_run(prepared: Prepared, listener: Listener, write_sample: WriteSample) -> tuple[RunFolder, int]:
    """Train a new run; returns its folder and the exit code (0 done, 3 not all on the disk, 75 stopped and saved)."""
    refuse_what_does_not_fit(prepared)
    folder = run_folder.create(prepared.recipe)
    with run_folder.locked(folder), listen() as interrupt:
        listener(Folder(path=str(folder.path)))
        plan, failed = planner.with_built_code(prepared.plan)
        for name, text in failed.items():
            listener(TechniqueNote(technique=name, message=text))
        prepared = replace(prepared, plan=plan)
        setup = build_setup(prepared)
        prepared = with_measured_length(prepared, setup, lambda seconds: listener(TimingSteps(seconds=seconds)))
        run_folder.write_json(folder.facts, to_plain(prepared.facts))
        run_folder.write_json(folder.plan, planner.to_json(prepared.plan))
        folder.recipe.write_text(prepared.resolved.to_yaml(), encoding="utf-8")
        state = new_state(setup, prepared.recipe.weight_decay)
        session = Session(prepared, setup, state, folder, EventLog(folder.events), listener, write_sample, [])
        check_disk(session)
        session.emit(Start(**_start_fields(prepared)), durable=True)
        tell_found(session)
        return folder, _run(session, interrupt)


def resume_run(folder: RunFolder, prepared: Prepared, listener: Listener, write_sample: WriteSample) -> tuple[RunFolder, int]:
    """Go on from the newest whole checkpoint, by the run's own plan."""
    with run_folder.locked(folder), listen() as interrupt:
        clear_leftovers(folder.checkpoints)
        setup = build_setup(prepared)
        state = new_state(setup, prepared.recipe.weight_decay)
        checkpoint, rejected = newest_checkpoint(folder.checkpoints)
        if checkpoint is None and rejected:
            damaged = "; ".join(f"{name}: {why}" for name, why in rejected)
            raise RunFailed(f"no checkpoint in {folder.checkpoints} is whole: {damaged}. Start again with another "
                            "--output; this folder was left as it is")
        if checkpoint is not None:
            load_checkpoint(checkpoint, state)
        session = Session(prepared, setup, state, folder, EventLog(folder.events), listener, write_sample, [])
        session.emit(Resume(step=state.step, rejected=tuple(f"{name}: {why}" for name, why in rejected),
                            **_start_fields(prepared)), durable=True)
        tell_found(session)
        for name, why in rejected:
            session.emit(CheckpointRejected(step=state.step, name=name, why=why))
            set_aside(folder.checkpoints / name)
        return folder, _run(session, interrupt)


def tell_found(session: Session) -> None:
    """What the techniques in force have to say of this model."""
    for step in session.prepared.plan.steps:
        if (text := step.technique.found(session.setup)) is not None:
            session.emit(TechniqueNote(step=session.state.step, technique=step.technique.name, message=text))


def _start_fields(prepared: Prepared) -> dict[str, Any]:
    recipe, data, model = prepared.recipe, prepared.facts.data, prepared.facts.model
    return {"version": VERSION, "name": recipe.name, "method": recipe.method, "task": model.task, "provider": model.provider,
            "opens_in": None if recipe.lora.kind == "lslora" else "peft", "total_steps": prepared.total_steps,
            "train_batch_size": recipe.train_batch_size,
            "block": data.block, "parameters": model.parameters, "device": prepared.facts.hardware.device,
            "techniques": tuple(step.technique.name for step in prepared.plan.steps),
            "estimate": to_plain(prepared.plan.estimate), "load": psutil.getloadavg()[0]}


def _run(session: Session, interrupt: Interrupt) -> int:
    try:
        stopped_by = _steps(session, interrupt)
        if stopped_by is None:
            write_model(session)
            if session.prepared.cache is not None:
                keep_speed(session.prepared.cache, session.prepared.facts, session.prepared.plan, session.step_s)
    except BaseException as error:
        fields = error.fields() if isinstance(error, UserError) else {"kind": type(error).__name__}
        session.emit(End(reason="failed", step=session.state.step, seconds=time.perf_counter() - session.began_s,
                         message=str(error), error=to_plain(fields)), durable=True)
        raise
    session.emit(End(reason="finished" if stopped_by is None else "stopped", signal=stopped_by, step=session.state.step,
                     seconds=time.perf_counter() - session.began_s, clipped_steps=int(session.state.clipped_steps),
                     passes=getattr(session.setup.run_pass, "counts", {}), not_saved=session.checkpoint_failed,
                     peak_memory_bytes=peak_memory_bytes(session.setup.device)), durable=True)
    if session.log.failure is not None:
        raise NotDurable(f"what was trained is in {session.folder.path}, and its last events could not be written to "
                         f"{session.folder.events.name}: {session.log.failure}. Free some space before the next run")
    return STOPPED_AND_SAVED if stopped_by is not None else NotDurable.exit_code if session.checkpoint_failed else DONE


def _steps(session: Session, interrupt: Interrupt) -> str | None:
    """All steps that are left; returns the signal that ended them early, after saving, or None."""
    prepared, recipe, state = session.prepared, session.prepared.recipe, session.state
    total_steps, per_epoch = prepared.total_steps, prepared.steps_per_epoch
    eval_every, save_every = in_steps(recipe.eval_steps, per_epoch), in_steps(recipe.save_steps, per_epoch)
    gc.collect()
    gc.freeze()                              # what exists now stays; the collector need not look at it each time
    for result in _results(session, schedule_of(recipe, total_steps)):
        session.pending.append(result)
        last, stop = state.step == total_steps, interrupt.requested is not None
        evaluating = eval_every > 0 and state.step % eval_every == 0 and not last
        saving = save_every > 0 and state.step % save_every == 0
        if last or stop or evaluating or saving or session.memory or state.step % recipe.logging_steps == 0:
            session.read_steps()
        if session.memory is not None:       # after the watched step itself: events stand in the order in which things happened
            session.emit(session.memory)
            session.memory = None
        if evaluating and not stop:
            _evaluate(session, final=False)
        if last:
            _evaluate(session, final=True)
        if last or stop or saving:
            save(session, required=stop)
        if stop and not last:
            return interrupt.requested
    return None


def _results(session: Session, schedule: Schedule) -> Iterator[StepResult]:
    """The steps that are left. One that does not fit the memory is taken again in smaller passes."""
    while True:
        setup = session.setup
        steps = train(setup, session.state, schedule, session.prepared.recipe.max_grad_norm)
        try:
            while session.setup is setup:    # else an evaluation has needed smaller passes
                if (result := _next_step(session, steps)) is None:
                    return
                yield result
            continue
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = said_by(error)
        go_on_smaller(session, why)          # here, where the error holds no activations any more


def _next_step(session: Session, steps: Iterator[StepResult]) -> StepResult | None:
    """The next step, or None after the last. The second one of a run that is long enough is watched for its memory."""
    device, total = session.setup.device, session.prepared.total_steps
    session.taken += 1
    if session.taken != WATCHED or (device.type != "cuda" and total < WATCHED_RUN):
        return next(steps, None)
    standing = None if device.type == "cuda" else standing_bytes(session.setup.model, session.state.optimizer)
    with MemoryLedger(device, standing) as ledger:
        result = next(steps, None)
    if result is not None:
        model, workload = session.prepared.facts.model, planner.workload_of(session.prepared.facts, session.prepared.plan)
        predicted = peak_memory(model, workload_of_step(workload, session.setup, result.step - 1))
        session.memory = Memory(step=result.step, allocated_bytes=ledger.peak_bytes, reserved_bytes=ledger.reserved_bytes,
                                predicted=predicted, fullest_bytes=sum(peak_memory(model, workload).values()))
    return result


def go_on_smaller(session: Session, why: str) -> None:
    """Halve the passes of the plan, in force and on disk. Raises RunFailed where that cannot be done."""
    step = session.state.step
    before = largest_pass(session.setup, step)
    if session.watch.updating:
        raise DoesNotFit(step + 1, why, before, cures(session.prepared, judged=False), updating=True)
    clear_step(session.state)
    smaller = with_smaller_passes(session.prepared, session.setup, step)
    if smaller is None:
        raise DoesNotFit(step + 1, why, before, cures(session.prepared, judged=False))
    session.prepared, session.setup = smaller
    session.step_s.clear()
    session.taken = 0
    run_folder.write_json(session.folder.plan, planner.to_json(session.prepared.plan))
    session.emit(OutOfMemory(step=step, before_tokens=before, after_tokens=largest_pass(session.setup, step),
                             train_batch_size=session.setup.train_batch_size, said=why))


def _evaluate(session: Session, *, final: bool) -> None:
    material, recipe = session.prepared.material, session.prepared.recipe
    if not len(material.held_out):
        return
    found = _evaluated(session, spread(material.held_out, None if final else recipe.max_eval_samples))
    session.state.evaluations[session.state.step] = found.loss
    session.emit(Evaluated(step=session.state.step, final=final, loss=found.loss, tokens=found.tokens,
                           bits_per_byte=found.bits_per_byte, seconds=found.seconds))
    if final and (told := session.setup.model.diagnose()):
        session.emit(Adapters(step=session.state.step, modules=to_plain(told)))
    if recipe.sample.tokens:
        began = time.perf_counter()
        text = _sample(session)
        session.emit(Sample(step=session.state.step, text=text, seconds=time.perf_counter() - began))


def _evaluated(session: Session, examples: Sequence[Example]) -> Evaluation:
    while True:
        try:
            return evaluate(session.setup, examples, tokens_per_byte=session.prepared.material.tokens_per_byte)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = said_by(error)
        go_on_smaller(session, why)


def _sample(session: Session) -> str:
    wanted = session.prepared.recipe.sample
    return wanted.prompt + session.write_sample(session.prepared, session.setup, wanted.tokens)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes

