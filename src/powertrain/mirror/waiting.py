"""What waits to be uploaded, on the run's own disk: it outlives the processes, and what the run deletes meanwhile.

    mirror/settings.json            where the run is mirrored, and how
    mirror/waiting/step-000120/     the files of a checkpoint and of the run as it was then, and waiting.json, written last
    mirror/events.jsonl             what the uploading process has to say

The files are hard links where the disk has them, so that nothing is copied, and the training may delete a checkpoint that is
being uploaded. A folder that is gone was uploaded and verified, or a newer one has taken its place.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powertrain.records import checkpoints as saved
from powertrain.records import events, to_plain
from powertrain.records.errors import WrongUse
from powertrain.records.json_files import read_json, sync, write_json

FOLDER, ABOUT, SETTINGS, EVENTS = "mirror", "waiting.json", "settings.json", "events.jsonl"
PACKED, LOCK = "packed", ".lock"             # files that are compressed for their upload; held by whoever uploads
MATERIAL, MATERIAL_LIST = "material", "material.json"    # what a run was made from, and the paths that it had


@dataclass(frozen=True)
class Settings:
    """Where a run is mirrored, and how."""

    address: str                             # of the run's own folder in the store
    run: str                                 # that no other run has
    keep: int = 3                            # newest checkpoints kept there, besides the best
    keep_every: int = 0                      # and those of each multiple of so many steps
    compress: str = "text"                   # text, all or none
    paced: bool = False                      # while it trains: it needs every core of this machine

    def write(self, run: Path) -> None:
        write_json(run / FOLDER / SETTINGS, to_plain(self))


WHOLE = Settings("", "")


def settings_of(run: Path) -> Settings | None:
    """Return the settings of a run that has a mirror. Raises WrongUse for damaged ones."""
    path = run / FOLDER / SETTINGS
    if not path.is_file():
        return None
    with contextlib.suppress(TypeError, WrongUse):
        found = Settings(**read_json(path))
        if all(type(value) is type(getattr(WHOLE, name)) for name, value in vars(found).items()):
            return found
    raise WrongUse(f"{path} was changed by hand or by a bad disk; restore a copy of it, or delete it and give the run a new "
                   "place with mirror=ADDRESS")


def new_id() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Waiting:
    """A set of files that waits: a checkpoint, the final model, or what the run was made from."""

    path: Path
    name: str
    step: int = 0
    held_out_loss: float | None = None
    elsewhere: Mapping[str, str] = field(default_factory=dict)       # files that stay where they are, by name
    rebuilt: bool = False                    # waiting.json is damaged: the other files have told this

    def files(self) -> dict[str, Path]:
        """Return the files by the names that they get in the store."""
        here = {file.name: file for file in sorted(self.path.iterdir()) if file.name != ABOUT}
        return {**{name: Path(path) for name, path in self.elsewhere.items()}, **here}

    def is_wanted(self, others: "Sequence[Waiting]", keep_every: int) -> bool:
        """Return whether it is uploaded although newer checkpoints wait: the best of them, or one that is kept for ever."""
        steps = [one for one in others if one.name.startswith("step-")]
        if self not in steps or self.step == max(one.step for one in steps):
            return True
        losses = [one.held_out_loss for one in steps if one.held_out_loss is not None]
        return bool((keep_every and self.step % keep_every == 0) or (losses and self.held_out_loss == min(losses)))


def add(run: Path, name: str, files: Mapping[str, Path], *, step: int = 0, held_out_loss: float | None = None,
        elsewhere: Mapping[str, Path] | None = None) -> None:
    """Let a set wait, durably. Raises OSError; a whole one that waits stays. Files `elsewhere` are read where they lie."""
    folder = run / FOLDER / "waiting"
    final, draft = folder / name, folder / f".{name}-{os.getpid()}.tmp"
    if (there := _waiting_in(final)) is not None and not there.rebuilt:
        return
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        for stored_as, file in files.items():
            _link_or_copy(file, draft / stored_as)
        write_json(draft / ABOUT, {"name": name, "step": step, "held_out_loss": held_out_loss,
                                   "elsewhere": {name: str(file) for name, file in (elsewhere or {}).items()}})
        shutil.rmtree(final, ignore_errors=True)         # half a deletion, or a damaged set that is told again
        os.rename(draft, final)
        sync(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _link_or_copy(file: Path, to: Path) -> None:
    if file.suffix != ".jsonl":              # a log grows: it is copied as it is now
        try:
            os.link(file, to)
            return
        except OSError:                      # a disk without hard links
            pass
    shutil.copyfile(file, to)
    sync(to)


def all_waiting(run: Path) -> list[Waiting]:
    """Return the sets that wait, the one to upload first at the beginning: material, then the newest."""
    folder = run / FOLDER / "waiting"
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    found = [one for one in map(_waiting_in, paths) if one is not None]
    return sorted(found, key=lambda one: (one.name != MATERIAL, -one.step, one.name))


def _waiting_in(path: Path) -> Waiting | None:
    """Return the set in a folder, told by its other files where waiting.json is damaged; None where that file is gone."""
    told = _read(path / ABOUT)
    step, loss, elsewhere = told.get("step"), told.get("held_out_loss"), told.get("elsewhere")
    if told.get("name") == path.name and type(step) is int and isinstance(loss, float | int | None) and (
            isinstance(elsewhere, dict) and all(isinstance(file, str) for file in elsewhere.values())):
        return Waiting(path, path.name, step, loss, elsewhere)
    if not (path / ABOUT).exists():          # uploaded meanwhile
        return None
    steps = saved.checkpoints_in(path.parents[2] / "checkpoints")
    loss = _read(path / saved.ABOUT).get("held_out_loss")
    return Waiting(path, path.name, int(match[1]) if (match := saved.FOLDER.fullmatch(path.name)) else max(steps, default=0),
                   loss if isinstance(loss, float | int) else None, listed_files(_read(path / MATERIAL_LIST)), rebuilt=True)


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except WrongUse:
        return {}


def listed_files(listed: Mapping[str, Any], below: str = "") -> dict[str, str]:
    """Return the files that a list of material names, by the names that they have in the store; none of a damaged list."""
    try:
        return {name: f"{below}{path}" for name, (path, _) in listed["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def remove(one: Waiting) -> None:
    """Forget a set that is in the store, or whose place a newer one has taken."""
    gone = one.path.with_name(f".{one.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(one.path, gone)            # first: half a deletion must not look like a set
    shutil.rmtree(gone, ignore_errors=True)


def uploaded_to(address: str, log: Iterable[events.Event]) -> set[str]:
    """Return the names of the sets that the mirror at this address has, as the log tells; the run may have had others."""
    found: set[str] = set()
    now = ""
    for event in log:
        if isinstance(event, events.MirrorReady):
            now = event.address
        elif isinstance(event, events.Uploaded) and now == address:
            found = (found | {event.name}) - set(event.deleted)
    return found


def clear_leftovers(run: Path) -> None:
    """Remove what uploads that were killed have left: compressed files, and sets of which half is deleted."""
    shutil.rmtree(run / FOLDER / PACKED, ignore_errors=True)
    folder = run / FOLDER / "waiting"
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.endswith(".gone") or (not path.name.startswith(".") and not (path / ABOUT).exists()):
            shutil.rmtree(path, ignore_errors=True)


def clear_drafts(run: Path) -> None:
    """Remove the sets that a training was killed in handing over. Called by who holds the run's lock."""
    for path in (run / FOLDER / "waiting").glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
