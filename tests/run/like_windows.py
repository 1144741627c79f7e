"""Runs the command line on Linux without what Windows lacks: `python like_windows.py WORDS -- WORDS ...`, one command after
another, or `python like_windows.py`, which imports every module. A process of its own.

Missing: modules and functions of POSIX, for Powertrain's own code; what other libraries do on Windows is theirs. Refused, as
Windows refuses it: opening a folder, syncing a file that is open for reading only, links, names with reserved characters, and
moving or removing what is open or mapped. Not shown: separators, drives, ACLs, and how a Windows build of torch trains.
"""

from __future__ import annotations

import asyncio  # noqa: F401
import builtins
import concurrent.futures.thread  # noqa: F401
import errno
import fcntl
import importlib
import multiprocessing
import multiprocessing.context
import multiprocessing.popen_spawn_posix
import os
import pkgutil
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch._dynamo
import transformers  # noqa: F401
import typer.rich_utils  # noqa: F401

MODULES = {"resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "crypt", "syslog", "posix", "readline"}
FUNCTIONS = ("fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getgid", "getegid", "sched_getaffinity",
             "sched_setaffinity", "statvfs", "fstatvfs", "mkfifo", "killpg", "getpgid", "setpgid", "setsid",
             "getsid", "getloadavg", "nice", "sysconf", "uname", "chown", "lchown", "chroot", "fchmod", "pread",
             "pwrite", "posix_fallocate", "posix_fadvise", "sendfile", "wait3", "wait4", "waitid", "O_DIRECTORY",
             "O_NOFOLLOW", "O_SYNC", "O_CLOEXEC", "O_DIRECT")
SIGNALS = ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPROF", "SIGCONT", "SIGSTOP", "SIGCHLD", "SIGPIPE",
           "SIGQUIT", "setitimer", "alarm", "pthread_sigmask", "pause")
RESERVED = set('<>:"|?*\\')
BINARY = 1 << 30             # a flag that Linux ignores


def in_use(*paths: object) -> str | None:
    """Return what this process holds open or mapped of these files and folders; None if nothing."""
    places = [os.path.realpath(os.fsdecode(path)) for path in paths]         # type: ignore[arg-type]
    held = {line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            held.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    return next((one for one in held for place in places if one == place or one.startswith(f"{place}/")), None)


def refuse(event: str, given: tuple[Any, ...]) -> None:
    """Refuse what Windows refuses. Python calls this before each open, rename and removal."""
    if event == "open" and not isinstance(given[0], int) and not str(given[0]).startswith(("/proc/", "/sys/")):
        path, mode, flags = given
        if mode is None and os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Windows opens no folder", str(path))
        if flags & os.O_CREAT and RESERVED & set(os.path.basename(str(path))):
            raise OSError(errno.EINVAL, "Windows has no such names", str(path))
        ours = str(sys._getframe(1).f_globals["__name__"]).startswith("powertrain")
        if ours and mode is None and flags & os.O_WRONLY and not flags & BINARY and path != os.devnull:
            raise OSError(errno.EINVAL, "Windows would write other ends of lines", str(path))
    elif event == "os.mkdir" and RESERVED & set(os.path.basename(str(given[0]))):
        raise OSError(errno.EINVAL, "Windows has no such names", str(given[0]))
    elif event in ("os.rename", "os.remove", "os.rmdir") and (held := in_use(*given[:2 if event == "os.rename" else 1])):
        raise PermissionError(errno.EACCES, f"{event} while {held} is open", str(given[0]))
    elif event in ("os.symlink", "os.link"):
        raise OSError(errno.EPERM, "a privilege is not held", str(given[0]))


def take_away() -> None:
    """Take from this process what Windows lacks."""
    plain_import, plain_fsync = builtins.__import__, os.fsync

    def import_(name: str, globals: Any = None, *others: Any, **named: Any) -> Any:
        if name.partition(".")[0] in MODULES and str((globals or {}).get("__name__")).startswith("powertrain"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, globals, *others, **named)

    def fsync(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Windows syncs no file that is open for reading only")
        plain_fsync(descriptor)

    psutil._pslinux.os = shutil.os = SimpleNamespace(**vars(os))     # they ask Linux, and on Windows they ask Windows
    builtins.__import__, os.fsync = import_, fsync
    for name in FUNCTIONS:
        delattr(os, name)
    for name in SIGNALS:
        delattr(signal, name)
    os.O_BINARY = BINARY                     # type: ignore[attr-defined]
    shutil._use_fd_functions = False         # type: ignore[attr-defined]
    multiprocessing.get_all_start_methods = lambda: ["spawn"]                # type: ignore[method-assign]
    del multiprocessing.context._concrete_contexts["fork"], multiprocessing.context._concrete_contexts["forkserver"]
    multiprocessing.set_start_method("spawn", force=True)
    sys.addaudithook(refuse)
    from powertrain.training import memory

    known = psutil.Process.memory_info
    psutil.Process.memory_info = lambda process: SimpleNamespace(rss=known(process).rss, vms=known(process).vms,
                                                                 peak_wset=known(process).rss)
    memory.sys = SimpleNamespace(platform="win32")       # type: ignore[attr-defined]


# they import libraries of others, which ask the real system what it is
TRACKERS = tuple(f"tracking.{name}" for name in ("mlflow", "tensorboard", "trackio", "wandb"))


def import_everything() -> None:
    """Import every module of Powertrain; print how many there are."""
    import powertrain

    names = [module.name for module in pkgutil.walk_packages(powertrain.__path__, "powertrain.")
             if not module.name.endswith(("__main__", *TRACKERS))]
    for name in names:
        importlib.import_module(name)
    print(len(names) + len(TRACKERS))


def main(words: Sequence[str]) -> int:
    torch.set_num_threads(1)
    take_away()
    if not words:
        import_everything()
        return 0
    from powertrain.cli import main as run

    commands: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    for command in commands:
        sys.argv = ["powertrain", *command]
        try:
            run()
        except SystemExit as end:
            if end.code:
                return int(end.code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
