"""The work between a run's steps, done once and timed: evaluation with sample, checkpoint on the run's disk, log."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from powertrain.data.example import Example
from powertrain.diagnosis.observed import Between
from powertrain.recipe import in_steps
from powertrain.records.event_log import EventLog
from powertrain.records.events import Step
from powertrain.run.fits import checkpoint_bytes
from powertrain.run.folder import RUNS
from powertrain.run.prepare import Prepared
from powertrain.training.checkpoint import save_checkpoint
from powertrain.training.evaluation import evaluate, spread
from powertrain.training.loop import State
from powertrain.training.setup import Setup
from powertrain.use.sampling import write_sample

MOST_S = 4.0                 # of an evaluation here: a longer one is done in part and extrapolated
SAMPLE_TOKENS = 16           # generated to time one token


@dataclass(frozen=True)
class Pauses:
    evaluation: Between | None               # None: the run holds no data out
    checkpoint: Between | None
    logging: Between
    last_s: float                            # after the last step: evaluation on all held-out text, and a checkpoint


def watch_pauses(prepared: Prepared, setup: Setup, state: State, step_s: float) -> Pauses:
    recipe, held_out = prepared.recipe, prepared.material.held_out
    eval_every = in_steps(recipe.eval_steps, prepared.steps_per_epoch)
    save_every = in_steps(recipe.save_steps, prepared.steps_per_epoch)
    evaluation, whole_s = None, 0.0
    if len(held_out):
        some = spread(held_out, recipe.max_eval_samples)
        some_s = evaluation_s(setup, some, step_s)
        written_s = _sample_s(prepared, setup)
        whole_s = some_s * len(held_out) / len(some) + written_s
        evaluation = Between("eval_steps", some_s + written_s, eval_every)
    save_s = _save_s(prepared, state)
    checkpoint = None if save_s is None else Between("save_steps", save_s, save_every)
    return Pauses(evaluation, checkpoint, Between("logging_steps", _log_s(recipe.logging_steps), recipe.logging_steps),
                  whole_s + (save_s or 0.0))


def evaluation_s(setup: Setup, examples: Sequence[Example], step_s: float) -> float:
    """Return the seconds of an evaluation on these examples, extrapolated from as many batches as there is time for."""
    batch = setup.train_batch_size
    evaluate(setup, examples[:batch], tokens_per_byte=None)
    first = evaluate(setup, examples[:batch], tokens_per_byte=None)
    affordable = max(1, int(MOST_S / max(first.seconds, 1e-6, step_s / 100))) * batch
    if len(examples) <= batch:
        return first.seconds
    chosen = spread(examples, affordable)
    return evaluate(setup, chosen, tokens_per_byte=None).seconds * len(examples) / len(chosen)


def run_disk(output_dir: str | None) -> Path:
    """Return the nearest existing folder of the run's folder."""
    wanted = Path(output_dir) if output_dir else RUNS
    return next(folder for folder in (wanted, *wanted.absolute().parents) if folder.is_dir())


def _sample_s(prepared: Prepared, setup: Setup) -> float:
    wanted = prepared.recipe.sample.tokens
    tokens = min(wanted, SAMPLE_TOKENS)
    if not tokens:
        return 0.0
    began = time.perf_counter()
    write_sample(prepared, setup, tokens)
    return (time.perf_counter() - began) * wanted / tokens


def _save_s(prepared: Prepared, state: State) -> float | None:
    """Return the seconds of a checkpoint, or None where the disk has no room for one, which a check reports."""
    disk = run_disk(prepared.recipe.output_dir)
    if shutil.disk_usage(disk).free < 2 * checkpoint_bytes(prepared):
        return None
    try:
        with tempfile.TemporaryDirectory(dir=disk, prefix=".powertrain-diagnose-") as folder:
            began = time.perf_counter()
            save_checkpoint(Path(folder), state)
            return time.perf_counter() - began
    except OSError:
        return None


def _log_s(steps: int) -> float:
    """Return the seconds of writing so many steps to the log."""
    with tempfile.TemporaryDirectory(prefix="powertrain-") as folder:
        log = EventLog(Path(folder, "events.jsonl"))
        began = time.perf_counter()
        for step in range(steps):
            log.write(Step(step=step, loss=1.0, tokens=1, real_tokens=1, seconds=1.0, learning_rate=1e-3, grad_norm=1.0,
                           parts=dict.fromkeys("abcde", 0.123456), padding_tokens=0))
        log.flush()
        return time.perf_counter() - began
