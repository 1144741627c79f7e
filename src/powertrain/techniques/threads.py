"""Threads: as many as there are physical cores for this process, no more."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique

FEW_CORES = 4                # up to here every number of threads is worth a try
MOST_THREADS = 4096          # of a process, on any machine
MOST_A_CORE = 16             # of threads that only wait for each other: 250 a core do not finish a step in minutes


@dataclass(frozen=True)
class Threads(Technique):
    """Matrix products saturate a core's arithmetic, so a second thread on the same core only adds waiting.

    A container may also be given fewer cores than the machine has; threads beyond them are stopped by the kernel in the
    middle of a parallel region. Sums are split differently, so the last bits can differ.
    """

    threads: int = 1

    name = "threads"
    does = "uses one thread for each physical core"
    decides_by: ClassVar = {"threads": "threads"}
    most: ClassVar = {"threads": MOST_THREADS}
    exactness = Exactness.ROUNDING
    touches = frozenset({"runtime"})
    source = "PyTorch performance tuning guide, CPU: torch.set_num_threads = physical cores"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        cores = run.hardware.cores
        now = run.hardware.default_threads or cores
        if run.hardware.device != "cpu":
            return cls.refuse(Why.DOES_NOT_APPLY, f"{run.hardware.name} computes, not CPU threads", cls(max(1, now)))
        if now == cores:
            return cls.refuse(Why.NOT_NEEDED, f"torch already uses {now} threads for the {cores} cores of this "
                                              "process", cls(now),
                              numbers={"threads": now, "cores": cores})
        return cls(cores).on(f"this process has {cores} core{'s' * (cores != 1)}, and torch would use {now}",
                             Effect((0.6, 1.0), 0, basis="guess: not measured yet", guessed=True),
                             numbers={"threads": now, "cores": cores})

    @classmethod
    def variants(cls, run: PlannedRun) -> Sequence[Technique | None]:
        cores = run.hardware.cores
        if run.hardware.device != "cpu":
            return ()
        counts = range(1, cores + 1) if cores <= FEW_CORES else (cores // 4, cores // 2, 3 * cores // 4, cores)
        return None, *(cls(count) for count in counts if count != run.hardware.default_threads)

    def unmet(self, run: PlannedRun) -> Refusal | None:
        """Return why this machine cannot run so many threads, or None."""
        cores = max(run.hardware.cores, run.hardware.default_threads or 0, 1)
        if self.threads <= MOST_A_CORE * cores:
            return None
        on = f"{cores} core{'s' * (cores != 1)}"
        return self.refuse(Why.HARDWARE_LACKS, f"{self.threads} threads on {on} would only wait for each other; at most "
                           f"{MOST_A_CORE} a core, here {MOST_A_CORE * cores}, are started",
                           cure=(f"techniques.threads.threads={cores}",))

    def apply(self, setup: Setup) -> Setup:
        import torch

        return replace(setup, runtime=(*setup.runtime, partial(torch.set_num_threads, self.threads)))

    def confirm(self, setup: Setup) -> None:
        import torch

        found = torch.get_num_threads()
        wanted = [setting for setting in setup.runtime
                  if getattr(setting, "func", None) is torch.set_num_threads]
        if found != self.threads or not wanted:
            raise NotApplied(f"threads: torch uses {found}, and the run sets {len(wanted)} thread counts")
