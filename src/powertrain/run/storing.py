"""What a run leaves beside its events: checkpoints and the final model; and what becomes of it where the disk refuses."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain import planner
from powertrain.cost.optimizer import state_bytes
from powertrain.data.publishing import sync
from powertrain.models.saving import save_model
from powertrain.records import NotDurable, RunFailed
from powertrain.records.events import CheckpointFailed, CheckpointNotDeleted, LittleDisk, ModelSaved, Saved, disk_cure
from powertrain.shapes import FP32
from powertrain.training.checkpoint import disk_is_full, keep_only, save_checkpoint

if TYPE_CHECKING:
    from powertrain.run.prepare import Prepared
    from powertrain.run.session import Session


def checkpoint_bytes(prepared: Prepared) -> int:
    """Return what a checkpoint of such a run takes on the disk: the trained weights in fp32, and the optimizer's state."""
    model, workload = prepared.facts.model, planner.workload_of(prepared.facts, prepared.plan)
    return FP32 * model.trainable + state_bytes(model, workload.optimizer)


def check_disk(session: Session) -> None:
    """Warn before the training, not at its last checkpoint. One more than is kept exists while a new one is written."""
    recipe = session.prepared.recipe
    needed_bytes = (recipe.save_total_limit + 2) * checkpoint_bytes(session.prepared)
    free_bytes = shutil.disk_usage(session.folder.path).free
    if free_bytes < needed_bytes:
        session.emit(LittleDisk(free_bytes=free_bytes, needed_bytes=needed_bytes, checkpoints=recipe.save_total_limit))


def save(session: Session, *, required: bool) -> None:
    """A checkpoint. A disk that refuses stops nothing but a run that has to end now: the next save tries again."""
    began, recipe, state = time.perf_counter(), session.prepared.recipe, session.state
    session.flush(durable=True)              # before: a resumed run must find the events of the steps it does not repeat
    try:
        saved = save_checkpoint(session.folder.checkpoints, state)
    except OSError as error:
        why = f"step {state.step:,} could not be saved: {error.strerror or error}"
        if required:
            raise RunFailed(f"{why}; the checkpoints before it are whole. {disk_cure(**_room(error, session))}") from None
        session.checkpoint_failed = why
        session.emit(CheckpointFailed(step=state.step, why=error.strerror or str(error), **_room(error, session),
                                      last=state.step == session.prepared.total_steps))
        return
    session.checkpoint_failed = None
    try:
        keep_only(session.folder.checkpoints, newest=recipe.save_total_limit, evaluations=state.evaluations)
    except OSError as error:
        session.emit(CheckpointNotDeleted(step=state.step, why=error.strerror or str(error),
                                          folder=str(session.folder.checkpoints)))
    size_bytes = sum(file.stat().st_size for file in saved.folder.iterdir())
    session.emit(Saved(step=saved.step, path=str(saved.folder), bytes=size_bytes, seconds=time.perf_counter() - began),
                 durable=True)


def _room(error: OSError, session: Session) -> dict[str, Any]:
    """Return the folder that a disk refused and, where the disk is full, what is free and what a checkpoint needs."""
    full = disk_is_full(error)
    return {"folder": str(session.folder.checkpoints),
            "free_bytes": shutil.disk_usage(session.folder.path).free if full else None,
            "needed_bytes": checkpoint_bytes(session.prepared) if full else None}


def write_model(session: Session) -> None:
    """The final model, published whole: written beside and renamed."""
    model_folder = session.folder.model
    if model_folder.exists():
        return
    unfinished, began = model_folder.with_name(".model-unfinished"), time.perf_counter()
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        save_model(session.setup.model, unfinished, session.prepared.material.tokenizer)
        for file in unfinished.iterdir():
            sync(file)
        os.rename(unfinished, model_folder)
        sync(session.folder.path)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise NotDurable(f"the model is trained and could not be written to {model_folder}: {error.strerror or error}. "
                        f"{disk_cure(**_room(error, session))}, then `powertrain train --resume "
                        f"{session.folder.path}` writes it"
                        + ("" if session.checkpoint_failed is None else f" ({session.checkpoint_failed})")) from None
    session.emit(ModelSaved(path=str(model_folder), step=session.state.step, seconds=time.perf_counter() - began))


def set_aside(path: Path) -> None:
    """A checkpoint that does not verify makes room for the one that this continuation will write."""
    path.rename(path.with_name(f"rejected-{path.name}-{time.time_ns()}"))
