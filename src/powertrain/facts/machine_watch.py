"""The use of the machine's processors while something is measured: by this process, by others, and by limits.

Computing threads spin while they wait for each other, so an undisturbed process uses about one core for each thread. Missing
processor time was taken by other processes, as far as they used the cores meanwhile.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from powertrain.machine import group_folders

NOISE_CORES = 0.15           # of other processes on an idle machine
ENERGY = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Meanwhile:
    """Processor seconds, summed over cores, in `wall_s` seconds."""

    wall_s: float
    own_s: float                             # of this process and its children
    busy_s: float                            # of all processes, these included
    host_s: float = 0.0                      # given by the hypervisor to other machines
    held_s: float = 0.0                      # of waiting for the CPU quota of a control group
    energy_j: float | None = None            # of the processors; None where it cannot be read

    @property
    def others_s(self) -> float:
        """Return the processor seconds of other processes."""
        return max(0.0, self.busy_s - self.own_s)

    @property
    def others_cores(self) -> float:
        """Return how many cores other processes kept busy on average; 0 below the noise of an idle machine."""
        found = self.others_s / self.wall_s if self.wall_s else 0.0
        return found if found > NOISE_CORES else 0.0

    @property
    def disturbed_by(self) -> str:
        """Return who else used the cores, in words; empty below the noise of an idle machine."""
        if self.others_cores:
            return f"other processes kept {self.others_cores:.2g} cores busy"
        given = self.host_s / self.wall_s if self.wall_s else 0.0
        return f"the hypervisor gave {given:.2g} cores to other machines" if given > NOISE_CORES else ""

    def stolen_share(self, threads: int, cores: int) -> float:
        """Return the share of `threads` computing threads' time that other processes took."""
        if not self.wall_s:
            return 0.0
        wanted = max(0.0, self.others_cores + threads - cores) / threads     # an idle core beside them disturbs no thread
        missing = max(0.0, 1 - self.own_s / (threads * self.wall_s))
        return min(wanted, missing)

    def throttled(self, cores: int) -> tuple[float, str]:
        """Return the share of the time that a limit took, and the limit: a CPU quota or the hypervisor."""
        shares = {"the CPU quota of the control group": self.held_s,
                  "the hypervisor, which gave the cores to others": self.host_s}
        what = max(shares, key=lambda name: shares[name])
        return min(1.0, shares[what] / (cores * self.wall_s)) if self.wall_s else 0.0, what


class MachineWatch:
    """`with MachineWatch() as watch: ...`, then `watch.seen`."""

    seen: Meanwhile

    def __enter__(self) -> Self:
        self._folders = group_folders("cpu")
        self._before = _counters(self._folders)
        return self

    def __exit__(self, *_: object) -> None:
        before, after = self._before, _counters(self._folders)
        wall_s, own_s, busy_s, host_s, held_s = (late - early for early, late in zip(before[:5], after[:5], strict=True))
        self.seen = Meanwhile(wall_s, own_s, busy_s, host_s, held_s, taken_j(before[5], after[5]))


def held_s(folders: Iterable[Path]) -> float:
    """Return the seconds that the quotas of these control groups kept their processes waiting, the longest of them."""
    found = [0.0]
    for folder in folders:
        try:
            lines = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        # version 2 counts microseconds, version 1 nanoseconds
        found.append(int(lines.get("throttled_usec", 0)) / 1e6 or int(lines.get("throttled_time", 0)) / 1e9)
    return max(found)


def energy_j(folder: Path = ENERGY) -> float | None:
    """Return the joules that the processor packages have used so far; None where the counters cannot be read."""
    try:
        counters = [int((package / "energy_uj").read_text()) for package in folder.glob("intel-rapl:[0-9]*")
                    if package.name.count(":") == 1]
    except (OSError, ValueError):
        return None
    return sum(counters) / 1e6 if counters else None


def taken_j(before: float | None, after: float | None) -> float | None:
    """Return the joules between two readings; None where a counter was reset meanwhile, as each is after some minutes."""
    return None if before is None or after is None or after < before else after - before


def _counters(folders: Iterable[Path]) -> tuple[float, float, float, float, float, float | None]:
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    host_s = getattr(times, "steal", 0.0)
    counted = [name for name in times._fields if name not in ("guest", "guest_nice")]    # those are in user and nice too
    busy_s = sum(getattr(times, name) for name in counted) - idle_s - host_s
    return time.perf_counter(), _family_s(), busy_s, host_s, held_s(folders), energy_j()


def _family_s() -> float:
    """Return the processor seconds of this process and of its children, the living and those that have ended."""
    own = psutil.Process()
    found = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:         # it ended meanwhile, and its parent counts it
            continue
        found += sum(getattr(times, name, 0.0) for name in ("user", "system", "children_user", "children_system"))
    return found
