"""A disk as a power failure may leave it, made from the log of what a process did.

Everything up to a moment was asked for. What was synced is there; of the rest, any part is: each write may be there, be lost,
or be garbled in its last page of 4 KiB; a file's new length may be there without its content, which then is zeros; each name
that a folder gained or lost may be there or not, whatever the order. A rename is one such change of its folder.
Source: the torn and lost writes of SQLite's test6.c, https://sqlite.org/testing.html#crash_testing
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from layer import Done

PAGE = 4096


@dataclass
class File:
    synced: bytearray = field(default_factory=bytearray)
    waiting: list[tuple[str, int, bytes]] = field(default_factory=list)      # "w" or "t", offset or length, data

    def sync(self) -> None:
        for kind, at, data in self.waiting:
            apply(self.synced, kind, at, data)
        self.waiting.clear()

    def after_failure(self, draw: random.Random) -> bytes:
        content = bytearray(self.synced)
        for kind, at, data in self.waiting:
            fate = draw.randrange(4)
            if fate == 1 and kind == "w":    # garbled
                end = max(0, len(data) - draw.randint(1, PAGE))
                data = data[:end] + draw.randbytes(len(data) - end)
            elif fate == 2 and kind == "w":  # its length alone
                kind, at = "t", max(len(content), at + len(data))
            if fate:
                apply(content, kind, at, data)
        return bytes(content)


def apply(content: bytearray, kind: str, at: int, data: bytes) -> None:
    """Write, or set the length."""
    end = at if kind == "t" else at + len(data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if kind == "t":
        del content[end:]
    else:
        content[at:end] = data


@dataclass
class Folder:
    synced: dict[str, File | Folder] = field(default_factory=dict)
    waiting: list[dict[str, File | Folder | None]] = field(default_factory=list)     # names gained, or lost: None

    def now(self) -> dict[str, File | Folder]:
        return self._with(self.waiting)

    def sync(self) -> None:
        self.synced, self.waiting = self.now(), []

    def after_failure(self, draw: random.Random) -> dict[str, File | Folder]:
        return self._with([change for change in self.waiting if draw.random() < 0.5])

    def _with(self, changes: Sequence[dict[str, File | Folder | None]]) -> dict[str, File | Folder]:
        names = dict(self.synced)
        for change in changes:
            for name, entry in change.items():
                names.pop(name, None)
                if entry is not None:
                    names[name] = entry
        return names


class Disk:
    """What a process did below `root`, which was empty but for itself."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = PurePosixPath(root), Folder()
        self.by_inode: dict[int, File | Folder] = {}

    def _place(self, path: PurePosixPath) -> tuple[Folder, str]:
        folder = self.top
        for name in path.relative_to(self.root).parts[:-1]:
            found = folder.now()[name]
            assert isinstance(found, Folder), path
            folder = found
        return folder, path.name

    def do(self, done: Done) -> None:
        path = PurePosixPath(done.first.decode()) if done.kind not in "wt" else PurePosixPath()
        if path == self.root:                # made, or synced
            self.by_inode[done.inode] = self.top
        if done.kind in "wt":
            file = self.by_inode.setdefault(done.inode, File())
            assert isinstance(file, File)
            file.waiting.append((done.kind, done.offset, done.first))
        elif done.kind == "s":
            entry = self.by_inode.setdefault(done.inode, File())
            if path != self.root:            # a name that came past the layer: safetensors' own rename
                folder, name = self._place(path)
                names = folder.now()
                if names.get(name) is not entry:
                    folder.waiting.append({**{old: None for old in names if names[old] is entry}, name: entry})
            entry.sync()
        elif path != self.root:
            self._rename(done, path)

    def _rename(self, done: Done, path: PurePosixPath) -> None:
        folder, name = self._place(path)
        if done.kind in "cd":
            self.by_inode[done.inode] = File() if done.kind == "c" else Folder()
            folder.waiting.append({name: self.by_inode[done.inode]})
        elif done.kind == "o" and done.offset:           # opened anew: its content is gone
            file = self.by_inode[done.inode]
            assert isinstance(file, File)
            file.waiting.append(("t", 0, b""))
        elif done.kind == "u":
            folder.waiting.append({name: None})
        elif done.kind == "r":
            to, new = self._place(PurePosixPath(done.second))
            entry = folder.now()[name]
            if to is folder:
                folder.waiting.append({name: None, new: entry})
            else:
                folder.waiting.append({name: None})
                to.waiting.append({new: entry})

    def write(self, folder: Path, draw: random.Random) -> None:
        """Make `folder` what a power failure may leave now."""
        shutil.rmtree(folder, ignore_errors=True)
        self._write(self.top, folder, draw)

    def _write(self, entry: File | Folder, path: Path, draw: random.Random) -> None:
        if isinstance(entry, File):
            path.write_bytes(entry.after_failure(draw))
            return
        path.mkdir()
        for name, inner in entry.after_failure(draw).items():
            self._write(inner, path / name, draw)
