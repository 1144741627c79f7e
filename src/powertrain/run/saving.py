"""The checkpoints of a run: when they are due, written beside the training, one at a time, and what the disk refuses.

The processes of a run do all of this together: whatever one of them measures or is refused, they agree on.
"""

import contextlib
import datetime
import hashlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from powertrain.machine import usable_memory
from powertrain.recipe import in_steps
from powertrain.recipe.schema import AUTO
from powertrain.records import RunFailed, events
from powertrain.records.checkpoints import keep_only
from powertrain.records.event_log import read_events
from powertrain.records.timeline import last_of
from powertrain.records.version import VERSION
from powertrain.run.disk import FULL, no_room, refused
from powertrain.run.fits import checkpoint_bytes
from powertrain.run.mirroring import Mirror
from powertrain.run.part import Part
from powertrain.training.checkpoint import Save, slabs_for
from powertrain.training.memory import peak_memory_bytes

LOOK_EVERY_S = 60.0          # between two looks at a disk that had no room
FIRST_AFTER_S = 60.0         # of training, before the first save of save_steps=auto: its cost sets the interval
AFFORDABLE_SHARE = 0.01      # of the time, that saves of save_steps=auto may take


@dataclass
class InFlight:
    """A checkpoint that is being written."""

    save: Save
    began_s: float
    waited_s: float                          # by the training
    beside: bool


@dataclass
class Saves:
    """What the saves of a session share."""

    tried_s: float                           # when the last one began; before the first one, when the session began
    in_flight: InFlight | None = None
    looked_s: float | None = None            # at a disk without room, while a save waits for it
    every: int | None = None                 # steps between saves; None while save_steps=auto has not measured one
    said_at_once: bool = False
    pinned_bytes: int = 0                    # of the largest copy so far, which torch keeps for the next one
    mirror: Mirror | None = None             # of the process that writes


@contextlib.contextmanager
def saves_of(part: Part, mirror: Mirror | None = None) -> Iterator[Saves]:
    """Hold the saves of a session. A resumed run keeps the interval that save_steps=auto has found.

    Where the session fails, the save in flight is finished. Where other processes may have gone, the next start clears it.
    """
    saves = Saves(time.perf_counter(), every=_interval(part), mirror=mirror)
    try:
        yield saves
    except BaseException:
        if part.ranks.world == 1:
            with contextlib.suppress(RunFailed):
                finish(part, saves)
        elif saves.in_flight is not None:    # its thread does not outlive the process; what ended the session is told, not this
            with contextlib.suppress(Exception):
                saves.in_flight.save.wait()
        raise


def _interval(part: Part) -> int | None:
    """Return the steps between saves; None where save_steps=auto has not found them yet."""
    recipe, known = part.prepared.recipe, None
    if recipe.save_steps != AUTO:
        return in_steps(recipe.save_steps, part.prepared.steps_per_epoch)
    if part.ranks.is_writer:
        known = last_of(events.SaveInterval, read_events(part.folder.events))
    known = part.ranks.agree(known)
    return known.steps if known is not None and known.save_every_s == recipe.save_every_s else None


def is_due(part: Part, saves: Saves) -> bool:
    """Return whether a checkpoint is to be saved after this step. While one waits for room, the disk is looked at at times."""
    if saves.looked_s is not None:
        return part.ranks.agree(time.perf_counter() - saves.looked_s >= LOOK_EVERY_S)
    if saves.every is not None:
        return saves.every > 0 and part.state.step % saves.every == 0
    wait_s = min(FIRST_AFTER_S, part.prepared.recipe.save_every_s)
    return saves.in_flight is None and part.ranks.agree(time.perf_counter() - saves.tried_s >= wait_s)


def save(part: Part, saves: Saves, *, required: bool) -> None:
    """Begin to save a checkpoint of this step, where the disk has room; the last one and a required one are waited for.

    A disk that refuses stops only a run that has to end now. Raises RunFailed there, and with on_disk_full=stop.
    """
    finish(part, saves)                      # what is waited here counts for that one
    began_s, state = time.perf_counter(), part.state
    at_once = required or part.is_last
    saves.tried_s, saves.looked_s = began_s, None
    if (full := part.ranks.agree(no_room(part) if part.ranks.is_writer else None)) is not None and not at_once:
        _wait_for_room(part, saves, full)
        return
    if part.ranks.is_writer:                 # before the checkpoint: a resumed run must find the events of steps not repeated
        part.record.flush(durable=True, step=state.step)
    beside = not at_once and _has_memory(part, saves)
    try:
        begun = Save(part.folder.checkpoints, state, part.ranks, beside=beside, about=_about(part))
    except OSError as error:
        _refuse(part, saves, error, state.step, required=required)
        return
    saves.in_flight = InFlight(begun, began_s, time.perf_counter() - began_s, beside)
    if not beside:
        finish(part, saves, required=required)


def _about(part: Part) -> dict[str, Any]:
    """Return what a checkpoint's metadata.json says of it. Speed and shares are those of the steps since the last save."""
    recipe, facts, state = part.prepared.recipe, part.prepared.facts, part.state
    steps, part.since_save = part.since_save, []
    seconds = sum(step.seconds for step in steps)
    spent = {name: sum(step.parts.get(name, 0.0) for step in steps) for name in (steps[-1].parts if steps else ())}
    return {"step": state.step, "total_steps": part.prepared.total_steps, "epochs": state.step / part.prepared.steps_per_epoch,
            "trained_tokens": state.trained_tokens, "loss": steps[-1].loss if steps else None,
            "held_out_loss": state.evaluations.get(state.step), "evaluations": state.evaluations,
            "tokens_per_s": sum(step.tokens for step in steps) / seconds if seconds else None,
            "share_of_time": {name: part_s / seconds for name, part_s in spent.items()},
            "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "processes": part.ranks.world,
            "recipe": recipe.name, "recipe_sha256": hashlib.sha256(part.folder.recipe.read_bytes()).hexdigest(),
            "data_sha256": facts.data.digest, "parameters": facts.model.parameters, "machine": facts.hardware.name,
            "versions": {"powertrain": VERSION, **facts.software.versions}}


def look(part: Part, saves: Saves) -> None:
    """Finish the save in flight where it is written, and tell what the mirror says. Called after every step."""
    if saves.in_flight is not None and saves.in_flight.save.is_written():
        finish(part, saves)
    if saves.mirror is not None:
        saves.mirror.look()


def finish(part: Part, saves: Saves, *, required: bool = False) -> None:
    """Wait for the save in flight, if there is one, and tell its end. A failure is raised only where it is `required`."""
    if (flight := saves.in_flight) is None:
        return
    saves.in_flight, began_s, step = None, time.perf_counter(), flight.save.step
    try:
        saved = flight.save.finish()
    except OSError as error:
        _refuse(part, saves, error, step, required=required)
        return
    part.checkpoint_failed = None
    saves.pinned_bytes = max(saves.pinned_bytes, flight.save.pinned_bytes)
    if part.ranks.is_writer:
        try:
            keep_only(part.folder.checkpoints, newest=part.prepared.recipe.save_total_limit,
                      evaluations=part.state.evaluations)
        except OSError as error:
            part.emit(events.CheckpointNotDeleted(step=step, why=error.strerror or str(error),
                                                  folder=str(part.folder.checkpoints)))
        now_s = time.perf_counter()
        flight.waited_s += now_s - began_s + flight.save.copying_s
        part.emit(events.Saved(step=step, path=str(saved), bytes=sum(file.stat().st_size for file in saved.iterdir()),
                               seconds=flight.waited_s, written_s=now_s - flight.began_s, beside=flight.beside), durable=True)
        if saves.mirror is not None:
            saves.mirror.add(saved.name, saved, step)
    if saves.every is None:
        _choose_interval(part, saves, flight)


def _choose_interval(part: Part, saves: Saves, flight: InFlight) -> None:
    """Set the interval of save_steps=auto: save_every_s, or longer where saves would take more than AFFORDABLE_SHARE."""
    step_s, save_every_s = statistics.median(part.step_s or [0.0]), part.prepared.recipe.save_every_s
    between_s = max(save_every_s, flight.waited_s / AFFORDABLE_SHARE)
    found = part.ranks.agree(events.SaveInterval(
        step=flight.save.step, steps=max(1, round(between_s / max(step_s, 1e-6))), step_s=step_s, saving_s=flight.waited_s,
        save_every_s=save_every_s))
    saves.every = found.steps
    part.emit(found)


def _wait_for_room(part: Part, saves: Saves, full: events.SaveWaits) -> None:
    if part.prepared.recipe.on_disk_full == "stop":
        goes_on = events.continuing(part.folder.path, part.ranks.world)
        raise RunFailed(f"{full.sentence.partition('. ')[0]}, and on_disk_full=stop ends the run here. The checkpoints before "
                        f"it are whole: free some space, then `{goes_on}` goes on")
    saves.looked_s = time.perf_counter()
    part.emit(full)


def _refuse(part: Part, saves: Saves, error: OSError, step: int, *, required: bool) -> None:
    """Tell of a save that the disk has refused. Raises RunFailed where the run has to end."""
    failed = refused(part, error, step)
    part.checkpoint_failed = f"step {failed.step:,} could not be saved: {failed.why}"
    full = error.errno in FULL
    if required or (full and part.prepared.recipe.on_disk_full == "stop"):
        raise RunFailed(f"{part.checkpoint_failed}; the checkpoints before it are whole. {failed.cure}")
    if full:
        saves.looked_s = time.perf_counter()
    part.emit(failed)


def _has_memory(part: Part, saves: Saves) -> bool:
    """Return whether each process has memory for a copy of what it saves, beside what a step takes; say it once if not."""
    short = part.ranks.first(_shortage(part, saves) if part.ranks.shard is not None else None)
    if short is not None and not saves.said_at_once:
        saves.said_at_once = True
        part.emit(short)
    return short is None


def _shortage(part: Part, saves: Saves) -> events.SavedAtOnce | None:
    needed_bytes, free_bytes = checkpoint_bytes(part.prepared), usable_memory()[1]
    if part.setup.device.type == "cuda":
        needed_bytes += slabs_for(part.state).slab_bytes         # the rest of the last one
        free_bytes += saves.pinned_bytes
    if part.setup.device.type == "cpu":      # what the process has had at its peak, the next step may take again
        free_bytes -= max(0, peak_memory_bytes(part.setup.device) - psutil.Process().memory_info().rss)
    if needed_bytes <= free_bytes:
        return None
    return events.SavedAtOnce(step=part.state.step, free_bytes=max(0, free_bytes), needed_bytes=needed_bytes)
