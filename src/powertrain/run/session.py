"""A session of a run: its steps, what happens between them, and what it leaves on the disk beside its events.

A step that does not fit the memory is repeated in smaller passes: same examples, same batch, same update up to rounding.
Clearing the gradients is enough, for a pass that ran out of memory left weights and optimizer as they were. With dropout the
second try draws other masks than the first, because its passes are others.
"""

import contextlib
import gc
import math
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
from powertrain.records import NotDurable, events, to_plain
from powertrain.records.checkpoints import by_loss, newest_checkpoint, set_aside_after
from powertrain.records.errors import DONE, STOPPED_AND_SAVED, DoesNotFit, LossNotFinite
from powertrain.records.event_log import read_events
from powertrain.records.json_files import write_json
from powertrain.run import bad_steps, ending, saving
from powertrain.run.best import take_best
from powertrain.run.disk import check_disk, refused
from powertrain.run.fits import cures, largest_pass, with_smaller_passes
from powertrain.run.folder import RunFolder
from powertrain.run.learned import keep_speed
from powertrain.run.links import keep_link, measure_link
from powertrain.run.mirroring import mirrored
from powertrain.run.part import Listener, Part, WriteSample, new_run
from powertrain.run.prepare import Prepared
from powertrain.training.checkpoint import load_checkpoint, refuse_broken, save_checkpoint
from powertrain.training.loop import State, evaluate, spread
from powertrain.training.memory import MemoryLedger, PassTooLarge, is_out_of_memory, said_by
from powertrain.training.pipeline import stages_gathered
from powertrain.training.sharded import gathered

SHORT_S = 5.0                # of an evaluation: a signal lets it end where no more has passed


def start_run(prepared: Prepared, listener: Listener, write_sample: WriteSample) -> tuple[RunFolder, int]:
    """Train a new run; return its folder and the exit code."""
    with new_run(prepared, listener, write_sample) as part:
        run(part)
    return part.folder, exit_code(part)


def run(part: Part) -> None:
    """Take the steps that are left, until a signal asks to stop; after the last step, write the model."""
    check_disk(part)
    _learn_link(part)
    gc.collect()
    gc.freeze()                              # the objects that exist now stay; the collector need not look at them each time
    with mirrored(part) as mirror:
        with saving.saves_of(part, mirror) as saves:
            state = part.state
            if state.step == 0 and "rewind" in (part.prepared.recipe.on_nan, part.prepared.recipe.on_spike):
                _save_beginning(part)
            _catch_up(part)
            setup, steps = part.setup, part.steps()
            while not part.is_last and part.stopped_by is None:
                too_large = None
                try:
                    with part.ledger() as ledger:
                        result = next(steps)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    too_large = said_by(error)
                if too_large is not None:    # here, where the error holds no activations any more
                    go_on_smaller(part, too_large)
                else:
                    part.pending.append(result)
                    _between(part, saves, ledger)
                rewound, part.rewind_from = part.rewind_from, None
                if rewound is not None:
                    saving.finish(part, saves)
                    rewind(part, rewound)
                if rewound is not None or part.setup is not setup:   # a step or an evaluation needed smaller passes
                    setup, steps = part.setup, part.steps()
        if part.stopped_by is None:
            _choose_weights(part)
        if part.stopped_by is None:
            write_model(part)
        if mirror is not None:
            part.not_mirrored = mirror.finish()
    if part.stopped_by is None and part.prepared.cache is not None and part.ranks.world == 1:
        keep_speed(part.prepared.cache, part.prepared.facts, part.prepared.plan, part.step_s)


def _learn_link(part: Part) -> None:
    """Measure the link between the processes, for the plans of later runs, where no run has."""
    hardware, cache = part.prepared.facts.hardware, part.prepared.cache
    if part.ranks.world > 1 and part.ranks.agree(not hardware.links):
        link = measure_link(part.ranks, part.setup.device.type)
        if part.ranks.is_writer and cache is not None:
            keep_link(cache, hardware, link)


def _save_beginning(part: Part) -> None:
    """Save the state before the first step, so that a rewind always has a place to go back to."""
    try:
        save_checkpoint(part.folder.checkpoints, part.state, part.ranks)
    except OSError as error:
        part.emit(refused(part, error, 0))


def exit_code(part: Part) -> int:
    """Return 0 for done, 3 where something is not on the disk or in the mirror, 75 for stopped and saved. Raises NotDurable."""
    if part.record.log.failure is not None:
        raise NotDurable(f"the run is in {part.folder.path}, but its last events could not be written to "
                         f"{part.folder.events.name}: {part.record.log.failure}. Free some disk space before the next run")
    if part.not_mirrored:
        return NotDurable.exit_code
    return STOPPED_AND_SAVED if part.stopped_by is not None else NotDurable.exit_code if part.checkpoint_failed else DONE


def _between(part: Part, saves: saving.Saves, ledger: MemoryLedger | None) -> None:
    """Read, evaluate and save after a step where that is due."""
    prepared, recipe, state = part.prepared, part.prepared.recipe, part.state
    eval_every = in_steps(recipe.eval_steps, prepared.steps_per_epoch)
    saving.look(part, saves)
    part.tell_beside()
    asked = part.ranks.first(part.interrupt.requested)
    last, stop, takes_best = part.is_last, asked is not None, recipe.load_best_model_at_end
    evaluating = takes_best if last else not stop and eval_every > 0 and state.step % eval_every == 0
    due = saving.is_due(part, saves)
    if last or stop or evaluating or due or ledger is not None or state.step % recipe.logging_steps == 0:
        part.read_steps()
    if part.rewind_from is not None:
        return
    if ledger is not None:                   # after the watched step itself: events stand in the order in which things happened
        part.emit_memory(ledger)
    if evaluating:
        _evaluate(part)
        due |= takes_best and by_loss(state.evaluations, state.evaluations)[:1] == [state.step]
        if not last and (early := ending.early_stop(recipe, state.evaluations, prepared.total_steps)) is not None:
            part.early, last = part.ranks.agree(early), True
            part.emit(part.early)
    if last and not takes_best:
        _evaluate(part, final=True)
    if last or stop or due:
        saving.save(part, saves, required=stop or part.stopped_by is not None)
    if stop and not last:
        part.stopped_by = asked


def _catch_up(part: Part) -> None:
    """Evaluate where a signal has ended the session before that was done; an early end that was decided stays."""
    recipe, state = part.prepared.recipe, part.state
    if not state.step:
        return
    every, takes_best = in_steps(recipe.eval_steps, part.prepared.steps_per_epoch), recipe.load_best_model_at_end
    if not part.is_last and (recipe.early_stopping_patience is not None or takes_best):
        missed = bool(every) and state.step % every == 0 and state.step not in state.evaluations
        if missed:
            _evaluate(part)
        part.early = part.ranks.agree(ending.early_stop(recipe, state.evaluations, part.prepared.total_steps))
        if missed and part.early is not None:
            part.emit(part.early)
    if part.is_last and not takes_best and len(part.prepared.material.held_out) and not _was_evaluated_at_last(part):
        _evaluate(part, final=True)


def _was_evaluated_at_last(part: Part) -> bool:
    """Return whether the log has the evaluation on all held-out text after this step."""
    done = part.ranks.is_writer and any(isinstance(event, events.Evaluated) and event.final and event.step == part.state.step
                                        for event in read_events(part.folder.events))
    return part.ranks.agree(done)


def _choose_weights(part: Part) -> None:
    """Take the weights with the lowest held-out loss, where the recipe asks for them, and evaluate these on all of the text."""
    written = part.ranks.agree(part.folder.model.exists() if part.ranks.is_writer else False)
    if part.prepared.recipe.load_best_model_at_end and not written:
        take_best(part)
        _evaluate(part, final=True)


class _AskedToStop(Exception):
    """A signal asks the run to stop, in an evaluation that the continuation will make."""


def _evaluate(part: Part, *, final: bool = False) -> None:
    material, recipe, step = part.prepared.material, part.prepared.recipe, part.state.step
    if not len(material.held_out):
        return
    examples, began_s = spread(material.held_out, None if final else recipe.max_eval_samples), time.monotonic()

    def stop_where_asked() -> None:
        """Leave an evaluation of all held-out text where a signal asks the run to stop, unless it has just begun."""
        asked = part.interrupt.requested if time.monotonic() - began_s > SHORT_S else None
        if final and (agreed := part.ranks.first(asked)) is not None:
            part.stopped_by = agreed
            raise _AskedToStop

    while True:
        try:
            with part.state.optimizer.averaged():
                found = evaluate(part.setup, examples, tokens_per_byte=material.tokens_per_byte, before_batch=stop_where_asked)
            break
        except _AskedToStop:
            return
        except PassTooLarge as error:
            too_large = error.said
        go_on_smaller(part, too_large)
    if not final or step not in part.state.evaluations:  # what is compared is of the same examples
        part.state.evaluations[step] = found.loss
    part.emit(replace(found, step=step, final=final, weights_step=part.weights_step))
    if final and not math.isfinite(found.loss):          # weights may be finite, and too large to compute with
        raise LossNotFinite(step, found.loss, held_out=True)
    with part.state.optimizer.averaged():
        if final and (told := measure_adapters(part.setup.model)):
            part.emit(events.Adapters(step=step, modules=to_plain(told)))
        if recipe.sample.tokens and (part.ranks.is_writer or part.ranks.lockstep):
            began = time.perf_counter()
            text = recipe.sample.prompt + part.write_sample(part.prepared, part.setup, recipe.sample.tokens)
            part.ranks.put_away()
            part.emit(events.Sample(step=step, text=text, seconds=time.perf_counter() - began))


# ------------------------------------------------------------------------------------------------ back to a checkpoint


def rewind(part: Part, bad: events.UpdateSkipped) -> None:
    """Load the newest whole checkpoint from before the bad steps, and go on with the data after them.

    A checkpoint made between the bad steps holds the weights from before them. Those of later steps than the loaded one are set
    aside: the steps come again, with other data.
    """
    state, guard, folder = part.state, part.state.guard, part.folder.checkpoints
    assert guard is not None
    rewinds, next_batch, found = guard.rewinds + 1, bad.step + guard.passed_over, None
    if part.ranks.is_writer:
        found = newest_checkpoint(folder, bad.step - bad.in_row)[0] or newest_checkpoint(folder)[0]
    if (found := part.ranks.agree(found)) is None:
        raise bad_steps.too_many(bad, "there is no whole checkpoint to go back to")
    state.optimizer.state.clear()            # step 0 has none that would take its place
    load_checkpoint(found, state)
    guard.in_row, guard.rewinds, guard.passed_over = 0, rewinds, next_batch - state.step
    part.since_save.clear()
    if part.ranks.is_writer:
        set_aside_after(folder, state.step)
    part.emit(events.Rewound(step=state.step, bad_step=bad.step, in_row=bad.in_row, examples=bad.examples, rewinds=rewinds,
                             passed_over=guard.passed_over, most=part.prepared.recipe.max_rewinds), durable=True)


# ------------------------------------------------------------------------------------------------ smaller passes


def go_on_smaller(part: Part, said: str) -> None:
    """Halve the passes of the plan, in force and on disk. Raises DoesNotFit where that is impossible."""
    state, step, before = part.state, part.state.step, largest_pass(part.setup, part.state.batch)
    stays = state.updating or part.ranks.lockstep        # in lockstep the others are in the midst of this very pass
    if not stays or part.ranks.world == 1:   # else the others are elsewhere, and wait for another exchange
        part.read_steps()                    # whose passes are those of the setup that made them
    if not state.updating:
        clear_step(state)
    smaller = None if stays else with_smaller_passes(part.prepared, part.setup, state.batch)
    if smaller is None:
        raise DoesNotFit(step + 1, said, before, cures(part.prepared, judged=False), updating=state.updating)
    part.prepared, part.setup = smaller
    part.step_s.clear()
    part.taken = 0
    if part.ranks.is_writer:
        write_json(part.folder.plan, planner.to_json(part.prepared.plan))
    part.emit(events.OutOfMemory(step=step, before_tokens=before, after_tokens=largest_pass(part.setup, state.batch),
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


# ------------------------------------------------------------------------------------------------ the final model


def write_model(part: Part) -> None:
    """Publish the final model whole: it is written beside its place and renamed. Raises NotDurable and WeightsNotFinite."""
    model, keep = part.setup.model, part.ranks.is_writer
    with part.state.optimizer.averaged():
        refuse_broken(part.state, part.ranks)
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
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        os.rename(unfinished, model_folder)
        sync(part.folder.path)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        besides = "" if part.checkpoint_failed is None else f" ({part.checkpoint_failed})"
        cure = refused(part, error, part.state.step).cure
        return (f"the model is trained, but could not be written to {model_folder}: {error.strerror or error}. "
                f"{cure}, then `{events.continuing(part.folder.path, part.ranks.world)}` writes it{besides}")
    part.emit(events.ModelSaved(path=str(model_folder), step=part.state.step, seconds=time.perf_counter() - began,
                                weights_step=part.weights_step))
    return None
