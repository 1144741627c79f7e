"""What a run's checkpoints hold, for those who look at them: which there are, what they say of themselves, how two differ."""

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powertrain.mirror.process import Listener, upload_all
from powertrain.mirror.returning import fetched, shelf_at
from powertrain.mirror.shelf import newest_first
from powertrain.mirror.waiting import EVENTS, FOLDER, Settings, all_waiting, new_id, settings_of, uploaded_to
from powertrain.records import WrongUse
from powertrain.records.addresses import EXAMPLE, check_address, is_address
from powertrain.records.checkpoints import ABOUT, FILES, MANIFEST, checkpoints_in, keep_only, shard_name, what_is_wrong
from powertrain.records.event_log import EventReader
from powertrain.records.json_files import read_json
from powertrain.run.folder import RunFolder, existing, recipe_of, refuse_links
from powertrain.run.mirroring import add_material, hand_over
from powertrain.training.stored import Stored


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint. Whether it is whole is not known until `wrong` was asked."""

    path: Path
    step: int
    about: Mapping[str, Any]                 # metadata.json; of older checkpoints only what state.json tells
    bytes: int
    place: str                               # where it lies, for people
    files: Mapping[str, int]                 # bytes of those that are on this disk, by name

    def number(self, key: str) -> float | None:
        """Return a finite number that the checkpoint tells of itself; None where it tells none."""
        found = self.about.get(key)
        return found if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found) else None

    @property
    def held_out_loss(self) -> float | None:
        return self.number("held_out_loss")

    def wrong(self) -> str | None:
        """Return what is wrong with it, after reading all of it; None for a whole one."""
        return what_is_wrong(self.path)

    def weights(self) -> Stored:
        """Return its weights. Raises WrongUse where it is not whole."""
        if (why := self.wrong()) is not None:
            raise WrongUse(f"the checkpoint {self.path} is not whole: {why}")
        shards = read_json(self.path / MANIFEST).get("shards", 1)
        return Stored([self.path / shard_name(FILES[0], shard, shards) for shard in range(shards)])


@contextlib.contextmanager
def opened(place: str, whole: Sequence[int] = ()) -> Iterator[list[Checkpoint]]:
    """Yield the checkpoints of a run by step: of its folder, or of its address in a mirror.

    From a mirror come the files that tell of a checkpoint, and all files of those of the steps `whole`, for as long as this is
    open. Raises WrongUse where there are none.
    """
    if not is_address(place):
        yield found_in(Path(place))
        return
    with tempfile.TemporaryDirectory(prefix="powertrain-") as folder, shelf_at(place) as (shelf, sets):
        found = []
        for one in reversed(newest_first(sets)):
            path = Path(folder) / one.name
            shelf.fetch(one, path, None if one.step in whole else (ABOUT, FILES[2], MANIFEST))
            found.append(replace(_read(one.step, path), bytes=one.bytes, place=f"{shelf.store.address}/{one.name}"))
        yield found


def found_in(run: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run's folder by step. Raises WrongUse where there are none."""
    found = [_read(step, path) for step, path in checkpoints_in(run / "checkpoints").items()]
    if not found:
        raise WrongUse(f"{run} holds no checkpoints; `powertrain runs list` shows the runs")
    return found


def one_of(found: Sequence[Checkpoint], step: int | None) -> Checkpoint:
    """Return the checkpoint of a step; the newest one where none is named."""
    if step is None:
        return found[-1]
    if (named := next((one for one in found if one.step == step), None)) is None:
        raise WrongUse(f"the run has no checkpoint of step {step}; it has {', '.join(str(one.step) for one in found)}")
    return named


def verified(place: str) -> Iterator[tuple[Checkpoint, str | None]]:
    """Yield each checkpoint of a run and what is wrong with it, after reading all of it, from a mirror too."""
    if not is_address(place):
        yield from ((one, one.wrong()) for one in found_in(Path(place)))
        return
    with shelf_at(place) as (shelf, sets):
        for one in reversed(newest_first(sets)):
            with tempfile.TemporaryDirectory(prefix="powertrain-") as folder:
                why = fetched(shelf, one, Path(folder))
                yield replace(_read(one.step, Path(folder) / "checkpoints" / one.name), bytes=one.bytes,
                              place=f"{shelf.store.address}/{one.name}"), why


def _read(step: int, path: Path) -> Checkpoint:
    try:
        about = read_json(path / (ABOUT if (path / ABOUT).is_file() else FILES[2]))
    except (WrongUse, OSError):
        about = {}                           # `checkpoints verify` says what is wrong
    if "held_out_loss" not in about and isinstance(about.get("evaluations"), dict):
        about["held_out_loss"] = about["evaluations"].get(str(step))
    files = {file.name: file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()}
    return Checkpoint(path, step, about, sum(files.values()), str(path), files)


def changes(first: Checkpoint, second: Checkpoint) -> dict[str, float]:
    """Return how far each weight moved from one checkpoint to the other: |after - before| over |before|, in the L2 norm.

    "all" is that of all weights together. Raises WrongUse where they hold other weights.
    """
    before, after = first.weights(), second.weights()
    if {name: before.shape(name) for name in before.pieces} != {name: after.shape(name) for name in after.pieces}:
        raise WrongUse(f"{first.path} and {second.path} hold other weights than each other: they are not of one run")
    squares: dict[str, tuple[float, float]] = {}
    for name in before.pieces:
        old, new = before.read(name).double(), after.read(name).double()
        squares[name] = float((new - old).square().sum()), float(old.square().sum())
    squares["all"] = sum(moved for moved, _ in squares.values()), sum(size for _, size in squares.values())
    return {name: math.sqrt(moved / size) if size else math.inf if moved else 0.0 for name, (moved, size) in squares.items()}


def prune(place: str, keep: int, keep_every: int = 0) -> list[str]:
    """Delete checkpoints of a run and return their names: all but the `keep` newest and the one with the lowest held-out loss.

    In a mirror those of each multiple of `keep_every` steps stay too. In a folder nothing is deleted where one of them is
    damaged, for it would count as one that is kept: WrongUse.
    """
    if is_address(place):
        with shelf_at(place) as (shelf, _):
            return shelf.keep_only(keep, keep_every)
    run = Path(place)
    refuse_links(RunFolder(run))
    found = found_in(run)
    for one in found:
        if (why := one.wrong()) is not None:
            raise WrongUse(f"nothing was deleted: {one.path} is not whole ({why}); move that folder away first")
    losses = {one.step: one.held_out_loss for one in found if one.held_out_loss is not None}
    keep_only(run / "checkpoints", newest=keep, evaluations=losses)
    return [one.path.name for one in found if not one.path.exists()]


def upload(run: Path, address: str | None, step: int | None, listener: Listener) -> bool:
    """Upload a run's checkpoints to its mirror, or to another address, and its model; return whether all of it is there.

    These are the newest one, the one with the lowest held-out loss and those that are kept for ever there, or that of a step;
    what the run is made from; and what waits already. Raises WrongUse.
    """
    folder = existing(run)
    settings = settings_of(run)
    if address is not None:
        there = f"{check_address(address)}/{run.resolve().name}"
        settings = replace(settings, address=there) if settings else Settings(there, new_id())
        settings.write(run)
    if settings is None:
        raise WrongUse(f"{run} has no mirror; name one with --to, such as --to {EXAMPLE}")
    found = found_in(run)
    losses = [one.held_out_loss for one in found if one.held_out_loss is not None]
    for one in found if step is None else [one_of(found, step)]:
        if step is not None or one is found[-1] or (losses and one.held_out_loss == min(losses)) or (
                settings.keep_every and one.step % settings.keep_every == 0):
            hand_over(folder, one.path.name, one.path, one.step, one.held_out_loss)
    if folder.model.is_dir() and step is None:
        hand_over(folder, "model", folder.model, found[-1].step, None)
    if (recipe := recipe_of(folder)).mirror_material:
        add_material(run, recipe)
    return upload_all(run, listener)


def in_mirror(run: Path) -> dict[str, str]:
    """Return what is known here of the run's checkpoints in its mirror, by name."""
    settings = settings_of(run)
    uploaded = uploaded_to(settings.address, EventReader(run / FOLDER / EVENTS).read_whole()[0]) if settings else set()
    return {**dict.fromkeys(uploaded, "in the mirror"), **{one.name: "waits for its upload" for one in all_waiting(run)}}
