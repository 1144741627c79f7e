"""The machine as this process may use it: cores and memory within control groups and affinity, and a compiler.

A container often sees the whole machine in /proc while its control group grants a part of it; threads and memory
beyond that part are throttled or killed, so the smaller number counts. Loads no torch.
"""

import contextlib
import functools
import operator
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")
COMPILERS = ("g++", "clang++")               # of C++, the first that is there
C_COMPILERS = ("gcc", "clang")               # in Triton's order
COMPILER_BYTES = 1 << 30                     # of a process that compiles ahead, with its compiler: 0.8 GiB were seen


# ------------------------------------------------------------------------------------------------ cores


def usable_cores() -> tuple[int, str]:
    """Return the physical cores that this process may keep busy, and what limits them: for kernels."""
    counted = {"psutil, physical cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1}
    return _least({**counted, "CPU affinity of this process": physical_cores(_allowed_cpus())})


def usable_cpus() -> int:
    """Return the logical CPUs that this process may keep busy: for processes, of which a core runs two better than one."""
    return _least({"CPU affinity of this process": len(_allowed_cpus())})[0]


def _allowed_cpus() -> list[int]:
    """Return the logical CPUs that this process may run on: all of them where the system has no affinity."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(psutil.cpu_count() or 1))


def _least(counted: dict[str, int]) -> tuple[int, str]:
    """Return the least of the counts and of the quota, and which one that is."""
    quota = cpu_quota(group_folders("cpu"))
    if quota is not None:
        counted["CPU quota of the control group"] = max(1, int(quota))
    source = min(counted, key=lambda name: counted[name])
    return counted[source], source


def physical_cores(cpus: Iterable[int], topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return on how many physical cores the logical `cpus` lie. A CPU without known siblings counts as a core."""
    cores = set()
    for cpu in cpus:
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.add(siblings.read_text().strip() if siblings.exists() else f"cpu{cpu}")
    return len(cores)


def cpu_quota(folders: Iterable[Path]) -> float | None:
    """Return the smallest CPU quota, in CPUs, that the control groups in `folders` set; None where none is set."""
    quotas = []
    for folder in folders:
        quota, period = (_text(folder / "cpu.max") or "max 100000").split()            # version 2
        if quota == "max":                                                             # or version 1
            quota = _text(folder / "cpu.cfs_quota_us") or "-1"
            period = _text(folder / "cpu.cfs_period_us") or "100000"
        if int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


# ------------------------------------------------------------------------------------------------ memory


def usable_memory() -> tuple[int, int, str]:
    """Return the bytes of main memory that this process may have, those that are free now, and what limits them."""
    machine = psutil.virtual_memory()
    limit, free = memory_limit(group_folders("memory"))
    if limit is None or limit >= machine.total:
        return int(machine.total), int(machine.available), "psutil, of the machine"
    return limit, min(int(machine.available), free or 0), "memory limit of the control group"


def memory_limit(folders: Iterable[Path]) -> tuple[int | None, int | None]:
    """Return the smallest memory limit of the control groups in `folders`, and the least that is free under one, in bytes.

    File cache that can be dropped (inactive_file) counts as free; version 1 says that of the group without those below it,
    which its limit counts too (total_inactive_file). None where no limit is set.
    """
    limits, free = [], []
    for folder in folders:
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes") or "max"
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes") or "0"
        if limit == "max":
            continue
        statistics = dict(line.split()[:2] for line in (_text(folder / "memory.stat") or "").splitlines())
        limits.append(int(limit))
        droppable = statistics.get("total_inactive_file") or statistics.get("inactive_file") or "0"
        free.append(max(0, int(limit) - int(used) + int(droppable)))
    return min(limits, default=None), min(free, default=None)


# ------------------------------------------------------------------------------------------------ control groups


def group_folders(controller: str, mount: Path = CONTROL_GROUPS, membership: str | None = None) -> list[Path]:
    """Return the folders of this process's control group for `controller`, up to the mount: each may set a limit.

    `membership` is the text of /proc/self/cgroup. Inside a container the path in it may not exist under the mount;
    then the mount itself is the group.
    """
    if membership is None:
        membership = _text(Path("/proc/self/cgroup")) or ""
    folders: list[Path] = []
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:                                          # version 2
            folders += _up_to_mount(mount, path) + _up_to_mount(mount / "unified", path)
        elif controller in controllers.split(","):                                     # version 1
            folders += _up_to_mount(mount / controllers, path) + _up_to_mount(mount / controller, path)
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def _up_to_mount(mount: Path, path: str) -> list[Path]:
    parts = Path(path.lstrip("/")).parts
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _text(path: Path) -> str | None:
    """Return the text of a file, or None where the file is absent or this process may not read it."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------ libraries

# of NVIDIA, of Windows in WSL, of AMD; on Windows the driver's library
GPU_DEVICES = tuple(map(Path, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "C:/Windows/System32/nvcuda.dll")))
VARIABLES = ("OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NVIDIA_")


def what_libraries_see() -> tuple[object, ...]:
    """Return what decides which device and how many threads a library such as torch chooses by itself."""
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES))
    return os.cpu_count(), _allowed_cpus(), variables, gpu_devices()


def gpu_devices() -> list[str]:
    """Return the files of GPU_DEVICES that are here."""
    return [str(path) for path in GPU_DEVICES if path.exists()]


def hiding_amd() -> str | None:
    """Return the setting (NAME=value) by which AMD's GPUs may be hidden from torch; None if there is none."""
    names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    return next((f"{name}={os.environ[name]}" for name in names if name in os.environ), None)


def hidden_gpus() -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES, by which a process sees some of its GPUs or none; None where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


# ------------------------------------------------------------------------------------------------ folders of one user


class NotOwn(Exception):
    """A folder or file that others may have written. The message says why, in one sentence."""


def own_folder(folder: Path) -> Path:
    """Return the folder, which this user alone may enter: it is made, or made so. Machine code is loaded from no other.

    Raises NotOwn where the folder or the one around it is another user's, or everybody may replace it; OSError where the
    system refuses.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not hasattr(os, "geteuid"):           # Windows: access lists decide, and every folder has mode 777
        return folder
    around = folder.parent.stat()
    if around.st_uid not in (0, os.geteuid()):
        raise NotOwn(f"{folder.parent} belongs to user {around.st_uid}, and machine code in it may be anybody's")
    for above in (folder.parent.resolve(), *folder.parent.resolve().parents):
        if (mode := above.stat().st_mode) & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise NotOwn(f"every user may write in {above}, and machine code in {folder} may be anybody's")
    check_own(folder)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def check_own(path: Path) -> None:
    """Raise NotOwn for what another user has made or everybody may write; OSError where there is nothing."""
    found = path.lstat()
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise NotOwn(f"{path} belongs to user {found.st_uid}, and machine code in it may be anybody's")
    if stat.S_ISLNK(found.st_mode) or (found.st_mode & stat.S_IWOTH and hasattr(os, "geteuid")):
        raise NotOwn(f"{path} is a link, or every user may write it, and machine code in it may be anybody's")


def not_through_a_link(path: str, flags: int) -> int:
    """Open a file as `open`'s opener. Raises OSError for a link, which may lead anywhere; waits for no pipe."""
    more = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")          # of which each system has some
    return os.open(path, functools.reduce(operator.or_, (getattr(os, name, 0) for name in more), flags), 0o666)


# ------------------------------------------------------------------------------------------------ compilers


def cpp_compiler() -> str | None:
    """Return the path of the first of COMPILERS that is installed."""
    return next((found for found in map(shutil.which, COMPILERS) if found is not None), None)


def c_compiler() -> tuple[str | None, str]:
    """Return the path of the C compiler that Triton calls, or None, and where it looks: CC, else C_COMPILERS on the PATH."""
    named = os.environ.get("CC")
    found = next((path for path in map(shutil.which, C_COMPILERS if named is None else (named,)) if path is not None), None)
    return found, f"{' or '.join(C_COMPILERS)} on the PATH" if named is None else f"CC={named}"


def compilers_at_once() -> int:
    """Return how many processes may compile at the same time: one for each CPU, if half of the free memory is enough."""
    _, free_bytes, _ = usable_memory()
    return max(1, min(usable_cpus(), free_bytes // 2 // COMPILER_BYTES))


@contextlib.contextmanager
def one_at_a_time(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Let in one process or thread at a time of those that name this file. Where there are no such locks, all go in at once."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(folder / name, "a", opener=not_through_a_link))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
