"""A run brought back from its mirror: by name, whole and checked, into a folder of this machine."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from powertrain.mirror.shelf import Shelf, StoredSet, newest_first
from powertrain.mirror.store import Store, cure_of, told
from powertrain.mirror.waiting import EVENTS, FOLDER, LOCK, MATERIAL, MATERIAL_LIST, Settings
from powertrain.records import RunFailed, WrongUse, events
from powertrain.records.checkpoints import what_is_wrong
from powertrain.records.errors import UserError
from powertrain.records.event_log import EventLog
from powertrain.records.json_files import read_json
from powertrain.records.locks import got_lock
from powertrain.records.sizes import memory

Say = Callable[[str], None]
OF_RUN = ("recipe.yaml", "origins.json", "facts.json", "plan.json", "events.jsonl")


@contextlib.contextmanager
def shelf_at(address: str) -> Iterator[tuple[Shelf, dict[str, StoredSet]]]:
    """Open the run at an address, and yield it with its sets. Raises WrongUse where there is none, or no way to it."""
    try:
        store = Store(address)
        shelf = Shelf(store)
        if not (sets := shelf.sets()):
            runs = sorted({name.split("/")[0] for name in store.sizes() if name.count("/") > 1})
            holds = f"; it holds the runs {', '.join(runs[:8])}, such as {store.address}/{runs[0]}" if runs else ""
            raise WrongUse(f"{store.address} holds no run with a complete checkpoint{holds}")
        yield shelf, sets
    except UserError:
        raise
    except Exception as error:               # of the store's library
        cure = cure_of(error, address)
        raise WrongUse(f"{address} cannot be read: {told(error)}; {cure or 'look whether it can be reached, and try again'}"
                       ) from error


def checkpoint_at(sets: Mapping[str, StoredSet], step: int | None) -> list[StoredSet]:
    """Return the checkpoints that may be used, the best choice first: that of a step, or the newest. Raises WrongUse."""
    found = newest_first(sets)
    if step is None:
        return list(found)
    if not (named := [one for one in found if one.step == step]):
        raise WrongUse(f"the mirror has no checkpoint of step {step}; it has {', '.join(str(one.step) for one in found)}")
    return named


def bring_back(address: str, to: Path, say: Say, step: int | None = None) -> None:
    """Make the run's folder `to` from its mirror: its newest checkpoint that is whole, and all that the run goes on from.

    Raises WrongUse where `to` is taken or nothing can be read, and RunFailed where no checkpoint is whole.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise WrongUse(f"{to} is there already; continue that run with `powertrain train --resume {to}`, or name another "
                       "folder with --output")
    clear_drafts(to.parent)
    try:
        with _draft_of(to) as draft:
            with shelf_at(address) as (shelf, sets):
                for one in checkpoint_at(sets, step):
                    shutil.rmtree(draft / "checkpoints", ignore_errors=True)
                    say(f"fetching {one.name} from {shelf.store.address}")
                    if (why := fetched(shelf, one, draft)) is None:
                        break
                    say(f"passed over {one.name}: {why}")
                else:
                    raise RunFailed(f"no checkpoint in {shelf.store.address} is whole; nothing was written to {to}")
                if (model := sets.get("model")) is not None and step is None:
                    _fetch_model(shelf, model, draft / "model", say)
                if (material := sets.get(MATERIAL)) is not None:
                    say(f"fetching data and base model ({memory(material.bytes)})")
                    _fetch_material(shelf, material, draft / MATERIAL)
            Settings(shelf.store.address, one.run).write(draft)
            _note_as_uploaded(draft, shelf.store.address, [one, *([material] if material else [])])
            if to.is_dir():
                to.rmdir()
            os.rename(draft, to)
    except OSError as error:
        raise RunFailed(f"{to} cannot be written: {error.strerror or error}; free space there, or name another folder with "
                        "--output") from error


@contextlib.contextmanager
def _draft_of(folder: Path) -> Iterator[Path]:
    """Yield the folder that becomes `folder` when all of it is there, with a lock that says that somebody is at work."""
    draft = folder.with_name(f".{folder.name}-{os.getpid()}.tmp")
    draft.mkdir(parents=True, exist_ok=True)
    try:
        with open(draft / LOCK, "a") as lock:
            if got_lock(lock) is None:
                lock.close()                 # Windows renames no folder of open files
            yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def clear_drafts(folder: Path) -> None:
    """Remove what fetches into a folder have left that were killed: nobody holds the lock."""
    for path in folder.glob(f".*-*.tmp/{LOCK}"):
        with contextlib.suppress(OSError), open(path, "a") as lock:
            if got_lock(lock):
                shutil.rmtree(path.parent, ignore_errors=True)


def _note_as_uploaded(run: Path, address: str, sets: Sequence[StoredSet]) -> None:
    """Write into the log of uploads which sets the mirror has."""
    log = EventLog(run / FOLDER / EVENTS)
    log.write(events.MirrorReady(address=address))
    for one in sets:
        log.write(events.Uploaded(step=one.step, name=one.name, bytes=one.bytes, stored_bytes=one.stored_bytes))
    log.flush(durable=True)


def _fetch_model(shelf: Shelf, one: StoredSet, folder: Path, say: Say) -> None:
    """Fetch the final model; a damaged one is passed over, for the run makes it again from its last checkpoint."""
    try:
        shelf.fetch(one, folder)
    except (RunFailed, FileNotFoundError) as error:
        say(f"passed over {one.name}: {error}")
        shutil.rmtree(folder)


def _fetch_material(shelf: Shelf, one: StoredSet, folder: Path) -> None:
    """Fetch what a run was made from; each file comes to lie below `folder` at the path that it had."""
    shelf.fetch(one, folder)
    try:
        files = {name: (folder / path.lstrip("/"), int(changed_ns))
                 for name, (path, changed_ns) in read_json(folder / MATERIAL_LIST)["files"].items()}
        if any(".." in to.parts or "\0" in str(to) or to == folder or not 0 <= changed_ns < 1 << 62 or name not in one.files
               for name, (to, changed_ns) in files.items()):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RunFailed(f"{shelf.store.address}/{one.name}/{MATERIAL_LIST} is damaged, or was made to harm") from None
    for name, (to, changed_ns) in files.items():
        to.parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / name, to)
        os.utime(to, ns=(changed_ns, changed_ns))        # large data is known by its time too


def fetched(shelf: Shelf, one: StoredSet, run: Path) -> str | None:
    """Fetch a checkpoint into a run's folder, with the run's own files; return what is wrong with it."""
    checkpoint = run / "checkpoints" / one.name
    try:
        shelf.fetch(one, checkpoint)
    except (RunFailed, FileNotFoundError) as error:
        return str(error)
    for name in OF_RUN:
        if (checkpoint / name).is_file():
            os.rename(checkpoint / name, run / name)
    return what_is_wrong(checkpoint)

