"""A session of a run: its steps, and what happens between them."""

from __future__ import annotations

import gc
import time

from powertrain.recipe import in_steps
from powertrain.records import NotDurable, to_plain
from powertrain.records.events import Adapters, Evaluated, Sample
from powertrain.run.folder import RunFolder
from powertrain.run.out_of_memory import go_on_smaller
from powertrain.run.part import Listener, Part, WriteSample, new_run
from powertrain.run.prepare import Prepared
from powertrain.run.speeds import keep_speed
from powertrain.run.storing import check_disk, save, write_model
from powertrain.training.evaluation import evaluate, spread
from powertrain.training.ledger import MemoryLedger
from powertrain.training.out_of_memory import PassTooLarge, is_out_of_memory, said_by

DONE, STOPPED_AND_SAVED = 0, 75


def start_run(prepared: Prepared, listener: Listener, write_sample: WriteSample) -> tuple[RunFolder, int]:
    """Train a new run; return its folder and the exit code."""
    with new_run(prepared, listener, write_sample) as part:
        run(part)
    return part.folder, exit_code(part)


def run(part: Part) -> None:
    """Take the steps that are left, until a signal asks to stop; after the last step, write the model.

    A step that does not fit the memory is repeated in smaller passes.
    """
    state, total_steps = part.state, part.prepared.total_steps
    check_disk(part)
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
        if part.prepared.cache is not None and part.ranks.is_writer:
            keep_speed(part.prepared.cache, part.prepared.facts, part.prepared.plan, part.step_s)


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
    part.emit(Evaluated(step=step, final=final, loss=found.loss, tokens=found.tokens, bits_per_byte=found.bits_per_byte,
                        seconds=found.seconds))
    if final and (told := part.setup.model.diagnose()):
        part.emit(Adapters(step=step, modules=to_plain(told)))
    if recipe.sample.tokens and part.ranks.is_writer:
        began = time.perf_counter()
        text = recipe.sample.prompt + part.write_sample(part.prepared, part.setup, recipe.sample.tokens)
        part.emit(Sample(step=step, text=text, seconds=time.perf_counter() - began))
