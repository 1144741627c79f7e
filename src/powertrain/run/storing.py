"""What a run leaves beside its events: checkpoints and the final model; and what becomes of it where the disk refuses."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

from powertrain import planner
from powertrain.cost.optimizer import state_bytes
from powertrain.data.publishing import sync
from powertrain.models.saving import save_model
from powertrain.records import NotDurable, RunFailed
from powertrain.records.events import CheckpointFailed, CheckpointNotDeleted, LittleDisk, ModelSaved, Saved, disk_cure
from powertrain.run.part import Part
from powertrain.run.prepare import Prepared
from powertrain.shapes import FP32
from powertrain.training.checkpoint import disk_is_full, keep_only, save_checkpoint


def checkpoint_bytes(prepared: Prepared) -> int:
    """Return what a checkpoint of such a run takes on the disk: the trained weights in fp32, and the optimizer's state."""
    model, workload = prepared.facts.model, planner.workload_of(prepared.facts, prepared.plan)
    return FP32 * model.trainable + state_bytes(model, workload.optimizer)


def check_disk(part: Part) -> None:
    """Warn before the training, not at its last checkpoint. One more than is kept exists while a new one is written."""
    kept = part.prepared.recipe.save_total_limit
    needed_bytes = (kept + 2) * checkpoint_bytes(part.prepared)
    free_bytes = shutil.disk_usage(part.folder.path).free
    if free_bytes < needed_bytes and part.state.step == 0:
        part.emit(LittleDisk(free_bytes=free_bytes, needed_bytes=needed_bytes, checkpoints=kept))


def save(part: Part, *, required: bool) -> None:
    """Write a checkpoint. A disk that refuses stops only a run that has to end now: the next save tries again."""
    refused = part.ranks.agree(_save(part) if part.ranks.is_writer else None)
    part.checkpoint_failed = None
    if refused is None:
        return
    part.checkpoint_failed = f"step {part.state.step:,} could not be saved: {refused['why']}"
    if required:
        room = {key: value for key, value in refused.items() if key != "why"}
        raise RunFailed(f"{part.checkpoint_failed}; the checkpoints before it are whole. {disk_cure(**room)}")
    part.emit(CheckpointFailed(step=part.state.step, **refused, last=part.state.step == part.prepared.total_steps))


def _save(part: Part) -> dict[str, Any] | None:
    """Save on the writer; return why the disk refused it, as fields of CheckpointFailed, or None."""
    began, state, checkpoints = time.perf_counter(), part.state, part.folder.checkpoints
    # before the checkpoint: a resumed run must find the events of the steps that it does not repeat
    part.record.flush(durable=True, step=state.step)
    try:
        saved = save_checkpoint(checkpoints, state)
    except OSError as error:
        return {"why": error.strerror or str(error), **_room(error, part)}
    try:
        keep_only(checkpoints, newest=part.prepared.recipe.save_total_limit, evaluations=state.evaluations)
    except OSError as error:
        part.emit(CheckpointNotDeleted(step=state.step, why=error.strerror or str(error), folder=str(checkpoints)))
    size_bytes = sum(file.stat().st_size for file in saved.folder.iterdir())
    part.emit(Saved(step=saved.step, path=str(saved.folder), bytes=size_bytes, seconds=time.perf_counter() - began),
              durable=True)
    return None


def _room(error: OSError, part: Part) -> dict[str, Any]:
    """Return the folder that a disk refused and, where the disk is full, what is free and what a checkpoint needs."""
    full = disk_is_full(error)
    return {"folder": str(part.folder.checkpoints),
            "free_bytes": shutil.disk_usage(part.folder.path).free if full else None,
            "needed_bytes": checkpoint_bytes(part.prepared) if full else None}


def write_model(part: Part) -> None:
    """Publish the final model whole: it is written beside its place and renamed. Raises NotDurable."""
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
                f"{disk_cure(**_room(error, part))}, then `powertrain train --resume {part.folder.path}` writes it{besides}")
    part.emit(ModelSaved(path=str(model_folder), step=part.state.step, seconds=time.perf_counter() - began))
    return None
