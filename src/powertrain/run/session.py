"""A session of a run: its steps, what happens between them, and what it leaves on the disk beside its events.

A step that does not fit the memory is repeated in smaller passes: same examples, same batch, same update up to rounding.
Clearing the gradients is enough, for a pass that ran out of memory left weights and optimizer as they were. With dropout the
second try draws other masks than the first, because its passes are others.
"""

import contextlib
import errno
import gc
import os
import shutil
import time
from dataclasses import replace

import torch

from powertrain import planner
from powertrain.data.publishing import sync
from powertrain.models.adapters.attached import measure_adapters
from powertrain.models.adapters.files import save_model
from powertrain.recipe import in_steps
from powertrain.records import NotDurable, RunFailed, events, to_plain
from powertrain.records.errors import DONE, STOPPED_AND_SAVED, DoesNotFit
from powertrain.records.json_files import write_json
from powertrain.run.fits import checkpoint_bytes, cures, largest_pass, with_smaller_passes
from powertrain.run.folder import RunFolder
from powertrain.run.learned import keep_speed
from powertrain.run.links import keep_link, measure_link
from powertrain.run.part import Listener, Part, WriteSample, new_run
from powertrain.run.prepare import Prepared
from powertrain.training.checkpoint import keep_only, save_checkpoint
from powertrain.training.loop import State, evaluate, spread
from powertrain.training.memory import MemoryLedger, PassTooLarge, is_out_of_memory, said_by
from powertrain.training.pipeline import stages_gathered
from powertrain.training.sharded import gathered


def start_run(prepared: Prepared, listener: Listener, write_sample: WriteSample) -> tuple[RunFolder, int]:
    """Train a new run; return its folder and the exit code."""
    with new_run(prepared, listener, write_sample) as part:
        run(part)
    return part.folder, exit_code(part)


def run(part: Part) -> None:
    """Take the steps that are left, until a signal asks to stop; after the last step, write the model."""
    state, total_steps = part.state, part.prepared.total_steps
    check_disk(part)
    _learn_link(part)
    gc.collect()
    gc.freeze()                              # the objects that exist now stay; the collector need not look at them each time
    setup, steps = part.setup, part.steps()
    while state.step < total_steps and part.stopped_by is None:
        too_large = None
        try:
            with part.ledger() as ledger:
                result = next(steps)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            too_large = said_by(error)
        if too_large is not None:            # here, where the error holds no activations any more
            go_on_smaller(part, too_large)
        else:
            part.pending.append(result)
            _between(part, ledger)
        if part.setup is not setup:          # a step or an evaluation needed smaller passes
            setup, steps = part.setup, part.steps()
    if part.stopped_by is None:
        write_model(part)
        if part.prepared.cache is not None and part.ranks.world == 1:
            keep_speed(part.prepared.cache, part.prepared.facts, part.prepared.plan, part.step_s)


def _learn_link(part: Part) -> None:
    """Measure the link between the processes, for the plans of later runs, where no run has."""
    hardware, cache = part.prepared.facts.hardware, part.prepared.cache
    if part.ranks.world > 1 and part.ranks.agree(not hardware.links):
        link = measure_link(part.ranks, part.setup.device.type)
        if part.ranks.is_writer and cache is not None:
            keep_link(cache, hardware, link)


def exit_code(part: Part) -> int:
    """Return 0 for done, 3 where a checkpoint is not on the disk, 75 for stopped and saved. Raises NotDurable."""
    if part.record.log.failure is not None:
        raise NotDurable(f"the run is in {part.folder.path}, but its last events could not be written to "
                         f"{part.folder.events.name}: {part.record.log.failure}. Free some disk space before the next run")
    return STOPPED_AND_SAVED if part.stopped_by is not None else NotDurable.exit_code if part.checkpoint_failed else DONE


def _between(part: Part, ledger: MemoryLedger | None) -> None:
    """Read, evaluate and save after a step where that is due."""
    prepared, recipe, state = part.prepared, part.prepared.recipe, part.state
    eval_every, save_every = (in_steps(every, prepared.steps_per_epoch) for every in (recipe.eval_steps, recipe.save_steps))
    asked = part.ranks.first(part.interrupt.requested)
    last, stop = state.step == prepared.total_steps, asked is not None
    evaluating = eval_every > 0 and state.step % eval_every == 0 and not last
    saving = save_every > 0 and state.step % save_every == 0
    if last or stop or evaluating or saving or ledger is not None or state.step % recipe.logging_steps == 0:
        part.read_steps()
    if ledger is not None:                   # after the watched step itself: events stand in the order in which things happened
        part.emit_memory(ledger)
    if last or (evaluating and not stop):
        _evaluate(part, final=last)
    if last or stop or saving:
        save(part, required=stop)
    if stop and not last:
        part.stopped_by = asked


def _evaluate(part: Part, *, final: bool) -> None:
    material, recipe, step = part.prepared.material, part.prepared.recipe, part.state.step
    if not len(material.held_out):
        return
    examples = spread(material.held_out, None if final else recipe.max_eval_samples)
    while True:
        try:
            found = evaluate(part.setup, examples, tokens_per_byte=material.tokens_per_byte)
            break
        except PassTooLarge as error:
            too_large = error.said
        go_on_smaller(part, too_large)
    part.state.evaluations[step] = found.loss
    part.emit(replace(found, step=step, final=final))
    if final and (told := measure_adapters(part.setup.model)):
        part.emit(events.Adapters(step=step, modules=to_plain(told)))
    if recipe.sample.tokens and (part.ranks.is_writer or part.ranks.lockstep):
        began = time.perf_counter()
        text = recipe.sample.prompt + part.write_sample(part.prepared, part.setup, recipe.sample.tokens)
        part.ranks.put_away()
        part.emit(events.Sample(step=step, text=text, seconds=time.perf_counter() - began))


# ------------------------------------------------------------------------------------------------ smaller passes


def go_on_smaller(part: Part, said: str) -> None:
    """Halve the passes of the plan, in force and on disk. Raises DoesNotFit where that is impossible."""
    state, step, before = part.state, part.state.step, largest_pass(part.setup, part.state.step)
    stays = state.updating or part.ranks.lockstep        # in lockstep the others are in the midst of this very pass
    if not stays or part.ranks.world == 1:   # else the others are elsewhere, and wait for another exchange
        part.read_steps()                    # whose passes are those of the setup that made them
    if not state.updating:
        clear_step(state)
    smaller = None if stays else with_smaller_passes(part.prepared, part.setup, step)
    if smaller is None:
        raise DoesNotFit(step + 1, said, before, cures(part.prepared, judged=False), updating=state.updating)
    part.prepared, part.setup = smaller
    part.step_s.clear()
    part.taken = 0
    if part.ranks.is_writer:
        write_json(part.folder.plan, planner.to_json(part.prepared.plan))
    part.emit(events.OutOfMemory(step=step, before_tokens=before, after_tokens=largest_pass(part.setup, step),
                                 train_batch_size=part.setup.train_batch_size, said=said))


def clear_step(state: State) -> None:
    """Undo everything that an unfinished step has left behind."""
    state.optimizer.zero_grad(set_to_none=True)
    if state.scaler.is_enabled():
        with contextlib.suppress(AssertionError):        # nothing was unscaled yet
            state.scaler.update()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------ checkpoints and the model


def check_disk(part: Part) -> None:
    """Warn before the training, not at its last checkpoint. One more than is kept exists while a new one is written."""
    kept = part.prepared.recipe.save_total_limit
    needed_bytes = (kept + 2) * checkpoint_bytes(part.prepared)
    free_bytes = shutil.disk_usage(part.folder.path).free
    if free_bytes < needed_bytes and part.state.step == 0:
        part.emit(events.LittleDisk(free_bytes=free_bytes, needed_bytes=needed_bytes, checkpoints=kept))


def save(part: Part, *, required: bool) -> None:
    """Write a checkpoint. A disk that refuses stops only a run that has to end now: the next save tries again."""
    failed = _save(part)
    part.checkpoint_failed = None
    if failed is None:
        return
    part.checkpoint_failed = f"step {failed.step:,} could not be saved: {failed.why}"
    if required:
        raise RunFailed(f"{part.checkpoint_failed}; the checkpoints before it are whole. {failed.cure}")
    part.emit(failed)


def _save(part: Part) -> events.CheckpointFailed | None:
    """Save, in all processes; return why the disk refused it, or None."""
    began, state, checkpoints = time.perf_counter(), part.state, part.folder.checkpoints
    if part.ranks.is_writer:                 # before the checkpoint: a resumed run must find the events of steps not repeated
        part.record.flush(durable=True, step=state.step)
    try:
        saved = save_checkpoint(checkpoints, state, part.ranks)
    except OSError as error:
        return _refused(part, error)
    if not part.ranks.is_writer:
        return None
    try:
        keep_only(checkpoints, newest=part.prepared.recipe.save_total_limit, evaluations=state.evaluations)
    except OSError as error:
        part.emit(events.CheckpointNotDeleted(step=state.step, why=error.strerror or str(error), folder=str(checkpoints)))
    size_bytes = sum(file.stat().st_size for file in saved.iterdir())
    part.emit(events.Saved(step=state.step, path=str(saved), bytes=size_bytes, seconds=time.perf_counter() - began),
                     durable=True)
    return None


def _refused(part: Part, error: OSError) -> events.CheckpointFailed:
    """Return what a disk refused and, where the disk is full, what is free and what a checkpoint needs."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return events.CheckpointFailed(step=part.state.step, why=error.strerror or str(error), folder=str(part.folder.checkpoints),
                                   last=part.state.step == part.prepared.total_steps,
                                   free_bytes=shutil.disk_usage(part.folder.path).free if full else None,
                                   needed_bytes=checkpoint_bytes(part.prepared) if full else None)


def write_model(part: Part) -> None:
    """Publish the final model whole: it is written beside its place and renamed. Raises NotDurable."""
    model, keep = part.setup.model, part.ranks.is_writer
    with gathered(model, keep=keep), stages_gathered(model, keep=keep):
        refused = part.ranks.agree(_write_model(part) if part.ranks.is_writer else None)
    if refused is not None:
        raise NotDurable(refused)


def _write_model(part: Part) -> str | None:
    """Write the model on the writer; return why that failed, or None."""
    model_folder, began = part.folder.model, time.perf_counter()
    if model_folder.exists():
        return None
    unfinished = model_folder.with_name(".model-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        save_model(part.setup.model, unfinished, part.prepared.material.tokenizer)
        for file in unfinished.iterdir():
            sync(file)
        os.rename(unfinished, model_folder)
        sync(part.folder.path)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        besides = "" if part.checkpoint_failed is None else f" ({part.checkpoint_failed})"
        return (f"the model is trained, but could not be written to {model_folder}: {error.strerror or error}. "
                f"{_refused(part, error).cure}, then `powertrain train --resume {part.folder.path}` writes it{besides}")
    part.emit(events.ModelSaved(path=str(model_folder), step=part.state.step, seconds=time.perf_counter() - began))
    return None
