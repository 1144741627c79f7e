"""A number of threads that is not this machine's."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import processes
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding, Severity

KEYS = ("environment.OMP_NUM_THREADS", "environment.MKL_NUM_THREADS")


class ThreadsFixed(Rule):
    name = "threads_fixed"
    rests_on = "technique: threads; features: F21 (physical cores divided by processes)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        hardware = where.hardware
        for key in KEYS:
            asked = subject.settings.get(key)
            if asked is None or hardware is None or not str(asked.value).isdigit():
                continue
            threads, fair = int(str(asked.value)), max(1, hardware.cores // processes(subject))
            on_cpu = hardware.device == "cpu"
            if threads > fair or (threads < fair and on_cpu):
                severity: Severity = "moderate" if on_cpu else "low"
                many = threads > fair
                yield cls.found(severity, f"too {'many' if many else 'few'} threads", f"{threads} threads for each process, "
                                f"and {fair} "
                                + ("cores for it: they wait for each other at the end of every operator" if many else
                                   "cores for it: the others stand idle"), asked, expected=Expected(
                                    "too many were harmful in study 2026-11-21_claims (001-10-threads)", "study: "
                                    "2026-11-21_claims")
                                if many and on_cpu else UNMEASURED,
                                cure=Cure(f"Leave it unset, or set {key.partition('.')[2]}={fair}", (),
                                          (f"techniques.threads.threads={fair}",)))
                return
