"""A run in a store: sets of files, each complete by its MIRROR.json, which is written last, and only once.

    s3://bucket/prefix/RUN/step-000120/model.safetensors, events.jsonl.zst, ..., MIRROR.json
    s3://bucket/prefix/RUN/model/...
    s3://bucket/prefix/RUN/.reading-...      somebody reads a set just now: it is not deleted
"""

import contextlib
import errno
import math
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from powertrain.mirror.store import FULL_OR_CLOSED, PROBE, READ_BYTES, Damaged, OtherBytes, Store
from powertrain.mirror.waiting import Settings, Waiting
from powertrain.records import WrongUse, to_plain
from powertrain.records.checkpoints import FOLDER, MANIFEST, entry_of
from powertrain.records.errors import RunFailed
from powertrain.records.json_files import read_json, sync
from powertrain.records.sizes import memory

COMPLETE, FORMAT = "MIRROR.json", 1
NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,199}")          # of a file or a set: no path leads out of its folder
TEXT = {".json", ".jsonl", ".yaml", ".txt", ".md", ".jinja", ".csv"}
WEIGHTS = ".safetensors"
READING, READING_S = ".reading-", 6 * 3600.0             # a reader that was killed stops to count then
LEVEL = 3                                    # of zstd


@dataclass(frozen=True)
class StoredFile:
    """A file of a set, and the object that holds it."""

    bytes: int
    sha256: str
    stored_as: str
    stored_bytes: int


@dataclass(frozen=True)
class StoredSet:
    """A complete set in a store."""

    name: str
    run: str
    step: int
    files: Mapping[str, StoredFile]
    held_out_loss: float | None = None

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def stored_bytes(self) -> int:
        return sum(file.stored_bytes for file in self.files.values())

    def is_in(self, sizes: Mapping[str, int]) -> bool:
        """Return whether a store with objects of these sizes has all of the set's."""
        return all(sizes.get(f"{self.name}/{file.stored_as}") == file.stored_bytes for file in self.files.values())

    @property
    def is_checkpoint(self) -> bool:
        return FOLDER.fullmatch(self.name) is not None


@dataclass(frozen=True)
class Upload:
    """What an upload took."""

    bytes: int
    stored_bytes: int
    seconds: float
    packing_s: float


class Shelf:
    """One run in a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._is_ours = False                # a set of the run that is published here lies here: others see it and refuse

    def sets(self) -> dict[str, StoredSet]:
        """Return the complete sets by name: with a whole MIRROR.json, and all objects that it lists at their sizes."""
        found, sizes = {}, self.store.sizes()
        for name in sizes:
            folder, _, file = name.partition("/")
            if file == COMPLETE and (read := _read(folder, self.store.read_manifest(name))) is not None and read.is_in(sizes):
                found[folder] = read
        return found

    def check_run(self, run: str) -> None:
        """Raise WrongUse where another run lies here."""
        for one in self.sets().values():
            self._check_run(one, run)

    def _check_run(self, one: StoredSet, run: str) -> None:
        if one.run != run:
            raise WrongUse(f"{self.store.address} already holds another run (its {one.name}); choose another --output, whose "
                           "last name is that of the run in the mirror, or another mirror")

    # ---------------------------------------------------------------------------------------- there

    def publish(self, one: Waiting, settings: Settings, packed: Path) -> Upload:
        """Upload a set: its files, each verified, then MIRROR.json. `packed` is a folder for compressed files.

        A set that is there already stays, unless the run has gone back behind it and made other weights.
        """
        began_s, packing_s, files = time.perf_counter(), 0.0, {}
        expected = _expected(one)
        if not self._is_ours:                # another run may have come since it was looked whether this place is free
            self.check_run(settings.run)
        there = _read(one.name, self.store.read_manifest(f"{one.name}/{COMPLETE}"))
        if there is not None:
            self._check_run(there, settings.run)
            if there.is_in(self.store.sizes(one.name)) and all(
                    name in there.files and there.files[name].sha256 == entry["sha256"]
                    for name, entry in expected.items() if name.endswith(WEIGHTS)):
                return Upload(there.bytes, there.stored_bytes, time.perf_counter() - began_s, 0.0)
            self.store.delete(f"{one.name}/{COMPLETE}")  # other weights, or some objects are gone: it is published again
        for name, file in one.files().items():
            packs = settings.compress == "all" or (settings.compress == "text" and file.suffix in TEXT)
            # the copy in the store is compared with the checkpoint's own sha256: the file here is read once, to be sent
            here = expected[name] if name in expected and self.store.compares_sha256 and not packs else _entry_here(file)
            _check_here(file, here, expected.get(name, here))
            stored, stored_as, entry = file, name, here
            if packs:
                packing_began_s = time.perf_counter()
                stored_as = f"{name}.zst"
                stored = _pack(file, packed / stored_as)
                entry = entry_of(stored)
                packing_s += time.perf_counter() - packing_began_s
            try:
                self.store.put(stored, f"{one.name}/{stored_as}", entry["sha256"])
            except OtherBytes:
                _check_here(file, _entry_here(file), here)
                raise
            finally:
                if stored != file:
                    stored.unlink()
            files[name] = StoredFile(here["bytes"], here["sha256"], stored_as, entry["bytes"])
        found = StoredSet(one.name, settings.run, one.step, files, _finite(one.held_out_loss))
        self.store.put_manifest(f"{one.name}/{COMPLETE}", {"format": FORMAT, **to_plain(found)})
        if not found.is_in(self.store.sizes(one.name)):
            raise OSError(errno.EIO, "somebody has deleted objects there during the upload")
        self._is_ours = True
        return Upload(found.bytes, found.stored_bytes, time.perf_counter() - began_s, packing_s)

    def keep_only(self, newest: int, every: int) -> list[str]:
        """Delete all checkpoints but the newest, the best, each multiple of `every` steps and what is being read.

        Return the names of the deleted ones.
        """
        sets = sorted((one for one in self.sets().values() if one.is_checkpoint), key=lambda one: one.step)
        losses = [one.held_out_loss for one in sets if one.held_out_loss is not None]
        kept = {one.name for one in sets[-newest:]} | {one.name for one in sets if (every and one.step % every == 0) or (
            losses and one.held_out_loss == min(losses))}
        old = [one.name for one in sets if one.name not in kept]
        being_read = self._being_read() if old else set()
        gone = [name for name in old if name not in being_read]
        for name in gone:
            self.remove(name)
        return gone

    def remove(self, name: str) -> None:
        """Delete a set, MIRROR.json first: half a deletion must not look like a set."""
        self.store.delete(f"{name}/{COMPLETE}")
        for other in self.store.sizes(name):
            self.store.delete(other)

    def clear(self, waiting: Collection[str]) -> None:
        """Delete what uploads that ended midway have left: probes, and objects of checkpoints that no longer wait."""
        sizes = self.store.sizes()
        for name in sizes:
            folder = name.partition("/")[0]
            if name.startswith(PROBE) or (FOLDER.fullmatch(folder) and folder not in waiting
                                          and f"{folder}/{COMPLETE}" not in sizes):
                self.store.delete(name)

    # ---------------------------------------------------------------------------------------- and back

    def fetch(self, one: StoredSet, folder: Path, only: Collection[str] | None = None) -> None:
        """Download a set's files, or `only` some of them, into a folder, and check each.

        Raises RunFailed for damaged ones, and WrongUse where this disk has no room for them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        needed_bytes = sum(file.bytes for name, file in one.files.items() if only is None or name in only)
        if needed_bytes > (free_bytes := shutil.disk_usage(folder).free):
            raise WrongUse(f"{one.name} takes {memory(needed_bytes)}, and {memory(free_bytes)} are free in {folder.parent}; "
                           "free space there, or name another folder")
        with self._reading(one.name) if only is None else contextlib.nullcontext():
            for name, file in one.files.items():
                if only is None or name in only:
                    self._fetch_file(one, name, file, folder / name)

    def _fetch_file(self, one: StoredSet, name: str, file: StoredFile, to: Path) -> None:
        written = 0
        with _on_this_disk(to), open(to, "wb") as out, contextlib.suppress(Damaged), (
                self.store.open(f"{one.name}/{file.stored_as}")) as content:
            for chunk in _chunks(content, packed=file.stored_as != name):
                written += len(chunk)
                if written > file.bytes:     # more than was stored: the rest is not even looked at
                    break
                out.write(chunk)
        if entry_of(to) != {"bytes": file.bytes, "sha256": file.sha256}:
            raise RunFailed(f"{self.store.address}/{one.name}/{file.stored_as} is damaged: its size or its sha256 is not "
                            "that of the file that was stored")
        sync(to)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Say in the store that a set is being read, where the store may be written."""
        said = f"{READING}{name}-{secrets.token_hex(4)}"
        try:
            self.store.put_manifest(said, {"set": name, "time": time.time()})
        except Exception:                    # a store for reading only: nobody deletes there
            said = ""
        try:
            yield
        finally:
            if said:
                with contextlib.suppress(OSError):
                    self.store.delete(said)

    def _being_read(self) -> set[str]:
        being_read = set()
        for name in (name for name in self.store.sizes() if name.startswith(READING)):
            said = self.store.read_manifest(name) or {}
            if isinstance(began := said.get("time"), int | float) and abs(time.time() - began) < READING_S:
                being_read.add(str(said.get("set")))
            else:
                self.store.delete(name)
        return being_read


def newest_first(sets: Mapping[str, StoredSet]) -> Sequence[StoredSet]:
    """Return the checkpoints among the sets."""
    return sorted((one for one in sets.values() if one.is_checkpoint), key=lambda one: -one.step)


def _read(name: str, found: Mapping[str, Any] | None) -> StoredSet | None:
    """Return the set that a MIRROR.json describes; None where it describes none, or one that no run has written."""
    try:
        if found is None or found["format"] != FORMAT or found["name"] != name:
            return None
        files = {file: _stored_file(**entry) for file, entry in found["files"].items()}
        if (match := FOLDER.fullmatch(name)) and int(match[1]) != found["step"]:
            return None
        if not all(NAME.fullmatch(one) for one in (name, *files, *(entry.stored_as for entry in files.values()))):
            return None
        loss = found["held_out_loss"]
        return StoredSet(name, str(found["run"]), int(found["step"]), files, _finite(None if loss is None else float(loss)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _stored_file(bytes: object, sha256: object, stored_as: object, stored_bytes: object) -> StoredFile:
    if not (type(bytes) is type(stored_bytes) is int and bytes >= 0 and isinstance(sha256, str) and isinstance(stored_as, str)):
        raise TypeError
    return StoredFile(bytes, sha256, stored_as, stored_bytes)


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


# ------------------------------------------------------------------------------------------------ this disk


def _entry_here(file: Path) -> dict[str, Any]:
    with _readable(file):
        return entry_of(file)


def _check_here(file: Path, entry: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    with _readable(file):
        if entry != expected or file.stat().st_size != expected["bytes"]:
            raise RunFailed(f"{file} is damaged on this disk")


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise RunFailed where this disk does not give the file back."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"{file} cannot be read on this disk ({error.strerror or error})") from error


def _expected(one: Waiting) -> dict[str, Any]:
    """Return what a checkpoint's own manifest tells of its files. Raises RunFailed where files of the set are missing."""
    expected = dict(read_json(one.path / MANIFEST)["files"]) if (one.path / MANIFEST).is_file() else {}
    told = {"bytes", "sha256"}
    if damaged := [name for name, entry in expected.items() if not isinstance(entry, dict) or entry.keys() != told]:
        raise RunFailed(f"{one.path / MANIFEST} is damaged on this disk: it tells no size and sha256 of {damaged[0]}")
    if missing := expected.keys() - one.files().keys():
        raise RunFailed(f"{one.path / min(missing)} is missing on this disk")
    if not expected and not one.elsewhere and one.name != "model":
        raise RunFailed(f"{one.path} is damaged on this disk: nothing tells any more which files belong there")
    return expected


@contextlib.contextmanager
def _on_this_disk(file: Path) -> Iterator[None]:
    """Raise WrongUse where it is this disk that is full or closed, and not the store."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_OR_CLOSED:
            raise WrongUse(f"{file.parent} cannot be written ({error.strerror}); free space there, or name another folder"
                           ) from error
        raise


# ------------------------------------------------------------------------------------------------ compression


def _pack(file: Path, to: Path) -> Path:
    import zstandard

    to.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "rb") as content, open(to, "wb") as out:
        zstandard.ZstdCompressor(LEVEL).copy_stream(content, out, size=file.stat().st_size)
    return to


def _chunks(content: BinaryIO, *, packed: bool) -> Iterator[bytes]:
    """Yield the bytes of an object, unpacked. Raises RunFailed for a damaged one."""
    import zstandard

    source = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(content) if packed else content
    try:
        while chunk := source.read(READ_BYTES):
            yield chunk
    except zstandard.ZstdError as error:
        raise RunFailed(f"a compressed file in the store is damaged ({error})") from None
