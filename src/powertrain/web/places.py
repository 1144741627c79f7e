"""Which files the page may read: those below named folders, by their real path, and nothing through a link."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from powertrain.records import WrongUse
from powertrain.records.json_files import read_json

NAME = re.compile(r"[^/\\\x00-\x1f\x7f.][^/\\\x00-\x1f\x7f]{0,199}")         # of a run or a study: one folder's own name


class NotThere(WrongUse):
    """The page has nothing of this name."""


class Places:
    """The folder in which the page was started, with its own folders in it, and others that its user named."""

    def __init__(self, root: Path, more: tuple[Path, ...] = ()):
        self.root, self.more = root, more
        self.runs, self.studies, self.exports = root / "runs", root / "studies", root / "exports"
        self.uploads, self.jobs = root / "uploads", root / "jobs"

    def run(self, name: str) -> Path:
        """Return the folder of a run. Raises NotThere where `runs` has no folder of this name."""
        return self._without_links(child(self.runs, name, "run"))

    def study(self, name: str) -> Path:
        return self._without_links(child(self.studies, name, "study"))

    def _without_links(self, folder: Path) -> Path:
        """Return the folder. Raises WrongUse where a file of it is a link to a file outside every named folder."""
        for entry in list(os.scandir(folder)):
            if entry.is_symlink():
                try:
                    self.inside(entry.path)
                except WrongUse:
                    raise WrongUse(f"{self.shown(Path(entry.path))} is a link to a file outside this page's folders; put the "
                                   "file itself there, or start the page with `--allow FOLDER`") from None
        return folder

    def inside(self, path: str) -> Path:
        """Return the real path of what a user named. Raises WrongUse where it lies outside every named folder."""
        try:
            real = Path(os.path.realpath(self.root / os.path.expanduser(path)))
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(real)
        except (OSError, ValueError):        # a NUL, half a character, a name of thousands of characters, a loop of links
            raise WrongUse(f"{path[:100]!r} is no path; name a file or a folder") from None
        if not any(real.is_relative_to(os.path.realpath(one)) for one in (self.root, *self.more)):
            raise WrongUse(f"{path} is outside this page's folders ({', '.join(map(str, (self.root, *self.more)))}); start it "
                           f"with `powertrain ui --allow {real.parent}`, or copy the file here")
        return real

    def made(self, folder: Path) -> Path:
        """Return one of the page's own folders, made where it is not there yet. Raises WrongUse for a link."""
        if folder.is_symlink():
            raise WrongUse(f"{folder.name}/ is a link; put a folder in its place")
        folder.mkdir(exist_ok=True)
        return folder

    def opened(self, path: Path) -> BinaryIO:
        """Open a file of the named folders for reading. Raises WrongUse, or OSError.

        What became a link after its real path was looked at is not followed: the file that is open is asked where it lies.
        """
        file = opened(real := self.inside(str(path)))
        with contextlib.suppress(OSError):               # a system without /proc
            if os.readlink(f"/proc/self/fd/{file.fileno()}") != str(real):
                file.close()
                raise WrongUse(f"{self.shown(path)} was put somewhere else just now; try again")
        return file

    def json(self, path: Path) -> dict[str, Any]:
        """Return the object in a JSON file of the named folders. Raises WrongUse."""
        return read_json(path, open_file=self.opened)

    def shown(self, path: Path) -> str:
        """Return a path as commands that run in `root` take it."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def command(self, path: Path) -> str:
        """Return a path as a command takes it that takes names too: it begins with a dot or a slash."""
        found = self.shown(path)
        return found if Path(found).is_absolute() else f"./{found}"


def child(folder: Path, name: str, what: str) -> Path:
    """Return the folder `name` that lies in `folder` itself, and not behind a link. Raises NotThere."""
    path = folder / name
    if not NAME.fullmatch(name) or os.path.islink(path) or not os.path.isdir(path):      # these raise for no name
        raise NotThere(f"there is no {what} {name[:100]!r} in {folder.name}/; the list shows what is there")
    return path


def children(folder: Path, having: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the folders in `folder` that hold one of these files, or all of them if none is named, without links."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and (not having or any(
                os.path.lexists(os.path.join(entry.path, name)) for name in having)):
            yield Path(entry.path)


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder, as far as they can be told."""
    total = 0
    with contextlib.suppress(OSError):       # it is being written, or deleted
        for entry in os.scandir(folder):
            total += entry.stat(follow_symlinks=False).st_size
    return total


def opened(path: Path) -> BinaryIO:
    """Open a file for reading, but not through a link at its end. Raises OSError, for a pipe or a device too."""
    descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return os.fdopen(descriptor, "rb")
