"""The disk of a run: what the run takes of it, whether that is free, what else might be deleted, and what it refuses."""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from powertrain.records import events
from powertrain.run.fits import checkpoint_bytes
from powertrain.run.part import Part
from powertrain.run.prepare import Prepared
from powertrain.shapes import FP32

FULL = (errno.ENOSPC, errno.EDQUOT)          # errors that end when something is deleted
NAMED = 3                                    # folders that are named, the largest first
WORTH_BYTES = 1 << 20                        # a smaller one is not worth naming


def check_disk(part: Part) -> None:
    """Warn before the training, not at its last checkpoint. One more than is kept exists while a new one is written."""
    kept = part.prepared.recipe.save_total_limit
    needed_bytes = (kept + 2) * checkpoint_bytes(part.prepared) + _model_bytes(part.prepared)
    free_bytes = shutil.disk_usage(part.folder.path).free
    if free_bytes < needed_bytes and part.state.step == 0:
        part.emit(events.LittleDisk(free_bytes=free_bytes, needed_bytes=needed_bytes, checkpoints=kept, frees=what_frees(part)))


def no_room(part: Part) -> events.SaveWaits | None:
    """Return what is said where a checkpoint does not fit the disk now; None where it fits."""
    needed_bytes, free_bytes = checkpoint_bytes(part.prepared), shutil.disk_usage(part.folder.path).free
    if free_bytes >= needed_bytes:
        return None
    return events.SaveWaits(step=part.state.step, free_bytes=free_bytes, needed_bytes=needed_bytes, frees=what_frees(part))


def what_frees(part: Part) -> dict[str, int]:
    """Return the bytes of the largest folders on the run's disk that this run does not need, by path.

    These are checkpoints that did not verify, the checkpoints of other runs beside this one, and the cache.
    """
    path = part.folder.path
    found = [*part.folder.checkpoints.glob("rejected-*"), *_checkpoints_beside(path)]
    if part.prepared.cache is not None:
        found.append(part.prepared.cache)
    sizes = {}
    for folder in found:
        with contextlib.suppress(OSError):
            if folder.stat().st_dev == path.stat().st_dev:
                sizes[str(folder)] = sum(file.lstat().st_size for file in folder.rglob("*"))
    largest = sorted((name for name in sizes if sizes[name] >= WORTH_BYTES), key=lambda name: -sizes[name])[:NAMED]
    return {name: sizes[name] for name in largest}


def refused(part: Part, error: OSError, step: int) -> events.CheckpointFailed:
    """Return what a disk refused and, where the disk is full, what is free and what a checkpoint needs."""
    full = error.errno in (*FULL, errno.EFBIG)
    return events.CheckpointFailed(step=step, why=error.strerror or str(error), folder=str(part.folder.checkpoints),
                                   last=step == part.prepared.total_steps,
                                   code=errno.errorcode.get(error.errno or 0, ""),
                                   free_bytes=shutil.disk_usage(part.folder.path).free if full else None,
                                   needed_bytes=checkpoint_bytes(part.prepared) if full else None)


def _model_bytes(prepared: Prepared) -> int:
    """Return what the final model takes at most: the adapters, or all weights in fp32."""
    model = prepared.facts.model
    return FP32 * (model.trainable if model.method in ("lora", "qlora") else model.parameters)


def _checkpoints_beside(path: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for other in path.resolve().parent.iterdir():
            if other != path.resolve() and (other / "recipe.yaml").is_file():
                yield other / "checkpoints"
