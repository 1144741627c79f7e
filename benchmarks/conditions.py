"""The conditions of a comparison with a peer: an idle machine, arms that do not disturb each other, and the peer alone.

A figure of a peer counts only if nothing of ours slowed the peer. So three things are done, and stored with the study:

- while one arm takes its steps, the other arm's processes are stopped (SIGSTOP), so that no thread of it can spin or prefetch
- the peer takes the same steps once more in a process of its own while no process of ours is alive, which gives its speed alone
- processor time that belongs to neither arm nor to this program is counted (/proc/stat less the own processes)

A comparison is clean where the peer beside us is at most 5 % slower than alone and others used at most 5 % of the cores. Where
it was slower, the pages compare us with the peer alone, and say so (tables/peers.py).
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import psutil

from powertrain.cli.options import say
from powertrain.evidence.clock import Track
from powertrain.evidence.stats import interval
from powertrain.facts.machine_watch import MachineWatch, Meanwhile
from powertrain.records.evidence import ArmRun, Interval, Window

MOST_SLOWER = 0.05           # share by which a peer may be slower beside us than alone
MOST_OTHERS = 0.05           # share of the machine's cores that other processes and the hypervisor may use
LOOK_S = 5.0                 # seconds for which the machine is watched before a case
NAMED_PROCESSES = 3
CORES = psutil.cpu_count() or 1              # that /proc/stat counts: those of the whole machine


class InTurns:
    """An arm whose processes are stopped except while they answer. Offers what `evidence.clock` asks of an arm.

    Where the program that measures is killed, Linux sends SIGHUP and SIGCONT to stopped processes that it leaves behind,
    and they end.
    """

    def __init__(self, process: Any) -> None:
        self.process = process
        self.arm, self.ready, self.ready_s = process.arm, process.ready, process.ready_s
        self.first_step_s = 0.0
        _send(process.pid, signal.SIGSTOP)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the arm's answer; the arm runs from the question to the answer."""
        _send(self.process.pid, signal.SIGCONT)
        try:
            return self.process.ask(method, *arguments)
        finally:
            _send(self.process.pid, signal.SIGSTOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _send(self.process.pid, signal.SIGCONT)


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and its children, as far as they are still there."""
    try:
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            os.kill(one, number)
        except ProcessLookupError:
            continue


def repeat(process: Any, run: ArmRun) -> tuple[Window, ...]:
    """Have a fresh process take the steps of `run` again, and return its windows."""
    track = Track(process)
    track.first_step()
    track.warm_up.append(track.take(run.warm_up_steps - 1))
    done = run.warm_up_steps
    for window in run.windows:
        track.windows.append(track.take(window.steps, untimed=window.first_step - 1 - done))
        done = window.first_step - 1 + window.steps
    return tuple(track.windows)


@dataclass(frozen=True)
class Conditions:
    """Under what conditions one peer was measured."""

    peer: str
    alone_tokens_per_s: float                # of the peer, while no process of ours was alive
    beside_tokens_per_s: float               # over the same steps, in turns with our arm
    slower: Interval                         # share by which the peer was slower beside us; negative where faster
    others_share: float                      # of the machine's cores, that processes of neither arm used meanwhile
    stolen_share: float                      # of the machine's cores, that the hypervisor gave to other machines

    @property
    def unclean(self) -> tuple[str, ...]:
        """Return why the comparison does not count; nothing where it is clean."""
        found = []
        if self.slower.median > MOST_SLOWER:
            found.append(f"{self.peer} is {self.slower.median:.0%} slower beside us ({self.beside_tokens_per_s:,.0f} tokens/s) "
                         f"than alone ({self.alone_tokens_per_s:,.0f})")
        if self.others_share > MOST_OTHERS:
            found.append(f"other processes used {self.others_share:.0%} of the cores")
        if self.stolen_share > MOST_OTHERS:
            found.append(f"the hypervisor gave {self.stolen_share:.0%} of the cores to other machines")
        return tuple(found)

    def plain(self) -> dict[str, Any]:
        """Return the conditions as a study stores them."""
        slower = self.slower
        return {**asdict(self), "slower": slower.median, "slower_95": [slower.low, slower.high], "unclean": list(self.unclean)}


def conditions(peer: str, alone: Sequence[Window], beside: Sequence[Window], watched: Sequence[Meanwhile],
               cores: int = CORES) -> Conditions:
    """Return the conditions of one comparison; `alone` and `beside` are windows of the peer over the same steps."""
    slower = interval([1 - b.tokens_per_s / a.tokens_per_s for a, b in zip(alone, beside, strict=True)])
    return Conditions(peer, statistics.median(window.tokens_per_s for window in alone),
                      statistics.median(window.tokens_per_s for window in beside), slower,
                      max(one.others_s / (cores * one.wall_s) for one in watched),
                      max(one.host_s / (cores * one.wall_s) for one in watched))


def refuse_busy_machine(cores: int = CORES, seconds: float = LOOK_S) -> None:
    """Watch the machine for some seconds; raises SystemExit where other processes compute."""
    with MachineWatch() as watch:
        before = _processor_s()
        time.sleep(seconds)
        after = _processor_s()
    seen = watch.seen
    if (why := busy_because(seen, cores)) is not None:
        used = sorted(((spent - before[pid][1], name) for pid, (name, spent) in after.items() if pid in before), reverse=True)
        named = ", ".join(f"{name} {spent / seen.wall_s:.0%} of a core" for spent, name in used[:NAMED_PROCESSES] if spent)
        raise SystemExit(f"{why}{f' ({named})' if named else ''}; figures from a busy machine are wrong. End the other "
                         "processes, or measure all the same with --busy: the study is then marked")


def busy_because(seen: Meanwhile, cores: int) -> str | None:
    """Return why the machine counts as busy, or None where it is idle."""
    others, stolen = seen.others_s / (cores * seen.wall_s), seen.host_s / (cores * seen.wall_s)
    if others > MOST_OTHERS:
        return f"other processes use {others:.0%} of this machine's {cores} cores"
    if stolen > MOST_OTHERS:
        return f"the hypervisor gives {stolen:.0%} of this machine's {cores} cores to other machines"
    return None


def marked(machine: Mapping[str, Any], seen: Meanwhile) -> dict[str, Any]:
    """Return a study's `machine` with what others used of it meanwhile, and why the study does not count, if so."""
    why = busy_because(seen, CORES)
    if why is not None:
        say(f"the study is marked: {why}")
    return {**machine, "others_share": seen.others_s / (CORES * seen.wall_s), "unclean": [] if why is None else [why]}


def _processor_s() -> dict[int, tuple[str, float]]:
    """Return pid -> (name, processor seconds so far) of all processes but this one."""
    found = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None and process.pid != os.getpid():
            found[process.pid] = (str(process.info["name"]), times.user + times.system)
    return found
