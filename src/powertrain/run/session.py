"""A run from its first step to its last: the loop, and what has to happen between steps.

Everything that happens is an event: appended to `events.jsonl`, and given to a listener (the terminal) as it is.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from powertrain import planner
from powertrain.cost.memory import peak_memory
from powertrain.data.example import Example
from powertrain.recipe import in_steps
from powertrain.records import Evaluation, NotDurable, RunFailed, StepRecord, to_plain
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

Listener = Callable[[Mapping[str, Any]], None]
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
    memory: dict[str, Any] = field(default_factory=dict)     # of the watched step, until that step is written
    began_s: float = field(default_factory=time.perf_counter)    # before its first event, from which its report counts
    watch: UpdateWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = UpdateWatch(self.state.optimizer)

    def emit(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        self.log.write(event, **fields)
        self.listener({"event": event, **fields})
        if event != "step":
            self.flush(durable=durable)

    def flush(self, *, durable: bool) -> None:
        was_failing = self.log.failure
        self.log.flush(durable=durable)
        if self.log.failure and not was_failing:
            self.listener({"event": "warning", "message": f"events.jsonl cannot be written ({self.log.failure}); training "
                                                          "goes on, and they are kept until it can"})
        self.flushed_at = time.perf_counter()

    def read_steps(self) -> None:
        """Wait for the device, and write what the steps since the last reading computed. Raises RunFailed on NaN."""
        if not self.pending:
            return
        losses = torch.stack([result.loss for result in self.pending]).tolist()
        norms = torch.stack([result.grad_norm for result in self.pending]).tolist()
        for result, loss, norm in zip(self.pending, losses, norms, strict=True):
            if not math.isfinite(loss):
                raise RunFailed(f"the loss of step {result.step} is not finite ({loss}); the checkpoints before it are "
                                "untouched. Start a new run with a lower learning_rate, or with max_grad_norm=1")
            parts = result.laps.parts()
            self.step_s.append(sum(parts.values()))
            self.emit("step", **to_plain(StepRecord(
                result.step, loss, result.trained_tokens, result.real_tokens, sum(parts.values()), result.learning_rate, norm,
                {name: round(seconds, 6) for name, seconds in parts.items()}, result.padding_tokens)))
        self.pending.clear()
        if time.perf_counter() - self.flushed_at > EVENTS_EVERY_S:
            self.flush(durable=False)

    def tell_memory(self) -> None:
        """After the watched step itself, so that the events stand in the order in which things happened."""
        self.emit("memory", **self.memory)
        self.memory = {}


def start_run(prepared: Prepared, listener: Listener, write_sample: WriteSample) -> tuple[RunFolder, int]:
    """Train a new run; returns its folder and the exit code (0 done, 3 not all on the disk, 75 stopped and saved)."""
    refuse_what_does_not_fit(prepared)
    folder = run_folder.create(prepared.recipe)
    with run_folder.locked(folder), listen() as interrupt:
        listener({"event": "folder", "path": str(folder.path)})
        setup = build_setup(prepared)
        prepared = with_measured_length(prepared, setup, lambda text: listener({"event": "note", "message": text}))
        run_folder.write_json(folder.facts, to_plain(prepared.facts))
        run_folder.write_json(folder.plan, planner.to_json(prepared.plan))
        folder.recipe.write_text(prepared.resolved.to_yaml(), encoding="utf-8")
        state = new_state(setup, prepared.recipe.weight_decay)
        session = Session(prepared, setup, state, folder, EventLog(folder.events), listener, write_sample, [])
        check_disk(session)
        session.emit("start", durable=True, **_start_fields(prepared))
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
            raise RunFailed(f"no checkpoint in {folder.checkpoints} is whole: {'; '.join(rejected)}. Start again with another "
                            "--output; this folder was left as it is")
        if checkpoint is not None:
            load_checkpoint(checkpoint, state)
        session = Session(prepared, setup, state, folder, EventLog(folder.events), listener, write_sample, [])
        session.emit("resume", durable=True, step=state.step, rejected=rejected, **_start_fields(prepared))
        tell_found(session)
        for reason in rejected:
            session.emit("warning", message=f"passed over checkpoint {reason}")
            set_aside(folder.checkpoints / reason.partition(":")[0])
        return folder, _run(session, interrupt)


def tell_found(session: Session) -> None:
    """What the techniques in force have to say of this model."""
    for step in session.prepared.plan.steps:
        if (text := step.technique.found(session.setup)) is not None:
            session.emit("note", message=text)


def _start_fields(prepared: Prepared) -> dict[str, Any]:
    recipe, data, model = prepared.recipe, prepared.facts.data, prepared.facts.model
    return {"name": recipe.name, "method": recipe.method, "task": model.task, "provider": model.provider,
            "opens_in": None if recipe.lora.kind == "lslora" else "peft", "total_steps": prepared.total_steps,
            "train_batch_size": recipe.train_batch_size,
            "block": data.block, "parameters": model.parameters, "device": prepared.facts.hardware.device,
            "techniques": [step.technique.name for step in prepared.plan.steps],
            "estimate": to_plain(prepared.plan.estimate), "load": psutil.getloadavg()[0]}


def _run(session: Session, interrupt: Interrupt) -> int:
    try:
        stopped_by = _steps(session, interrupt)
        if stopped_by is None:
            write_model(session)
            if session.prepared.cache is not None:
                keep_speed(session.prepared.cache, session.prepared.facts, session.prepared.plan, session.step_s)
        reason = "finished" if stopped_by is None else f"stopped ({stopped_by})"
    except BaseException as error:
        session.emit("end", durable=True, reason="failed", step=session.state.step, message=str(error),
                     seconds=time.perf_counter() - session.began_s)
        raise
    not_saved = {} if session.checkpoint_failed is None else {"not_saved": session.checkpoint_failed}
    session.emit("end", durable=True, reason=reason, step=session.state.step, seconds=time.perf_counter() - session.began_s,
                 clipped_steps=int(session.state.clipped_steps), passes=getattr(session.setup.run_pass, "counts", {}),
                 peak_memory_bytes=peak_memory_bytes(session.setup.device), **not_saved)
    if session.log.failure is not None:
        raise NotDurable(f"what was trained is in {session.folder.path}, and its last events could not be written to "
                         f"{session.folder.events.name}: {session.log.failure}. Free some space before the next run")
    return STOPPED_AND_SAVED if stopped_by is not None else NotDurable.exit_code if not_saved else DONE


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
        if session.memory:
            session.tell_memory()
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
        reserved: dict[str, Any] = {"reserved_bytes": ledger.reserved_bytes} if ledger.reserved_bytes else {}
        session.memory = {"step": result.step, "allocated_bytes": ledger.peak_bytes, "predicted": predicted, **reserved,
                          "fullest_bytes": sum(peak_memory(model, workload).values())}
    return result


def go_on_smaller(session: Session, why: str) -> None:
    """Halve the passes of the plan, in force and on disk. Raises RunFailed where that cannot be done."""
    step = session.state.step
    if session.watch.updating:
        raise RunFailed(f"the optimizer's update of step {step + 1:,} ran out of memory ({why}), and half an update cannot be "
                        "repeated; go on from the last checkpoint with more memory free, or start again: "
                        f"{cures(session.prepared, judged=False)}")
    before = largest_pass(session.setup, step)
    clear_step(session.state)
    smaller = with_smaller_passes(session.prepared, session.setup, step)
    if smaller is None:
        raise RunFailed(f"step {step + 1:,} does not fit the memory ({why}), and its largest pass, of {before:,} tokens, "
                        f"cannot be halved; {cures(session.prepared, judged=False)}")
    session.prepared, session.setup = smaller
    session.step_s.clear()
    session.taken = 0
    run_folder.write_json(session.folder.plan, planner.to_json(session.prepared.plan))
    session.emit("warning", step=step, message=(
        f"step {step + 1:,} ran out of memory ({why}): it is taken again in passes of at most "
        f"{largest_pass(session.setup, step):,} tokens instead of {before:,}, at the same batch of "
        f"{session.setup.train_batch_size}; plan.json says so, and a continuation starts with it"))


def _evaluate(session: Session, *, final: bool) -> None:
    material, recipe = session.prepared.material, session.prepared.recipe
    if not len(material.held_out):
        return
    found = _evaluated(session, spread(material.held_out, None if final else recipe.max_eval_samples))
    session.state.evaluations[session.state.step] = found.loss
    session.emit("evaluation", step=session.state.step, final=final, **to_plain(found))
    if final and (told := session.setup.model.diagnose()):
        session.emit("adapters", step=session.state.step, modules=to_plain(told))
    if recipe.sample.tokens:
        began = time.perf_counter()
        text = _sample(session)
        session.emit("sample", step=session.state.step, text=text, seconds=time.perf_counter() - began)


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

