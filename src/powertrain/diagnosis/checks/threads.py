"""Threads against cores: fewer leave cores idle, more make them wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Expected, Finding


class Threads(Check):
    name = "threads"
    rests_on = "technique: threads"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        hardware = where.prepared.facts.hardware
        if hardware.device != "cpu":
            return
        pinned = [step.technique for step in where.prepared.plan.steps if step.technique.name == "threads"]
        threads, cores = int(getattr(pinned[0], "threads", 0)) if pinned else where.machine.threads, hardware.cores
        seen = f"{threads} threads, {cores} cores ({hardware.sources.get('cores', 'counted')})"
        words = (f"techniques.threads.threads={cores}",)
        if threads < cores:
            yield cls.says("moderate", f"{cores - threads} of {cores} cores stay idle", "products divide among threads, and "
                           "there are fewer threads than cores", seen=seen, cure="compute with one thread for each core",
                           words=words, expected=Expected(f"at most {cores / threads:.2g} times as fast",
                                                          "formula: cores over threads", (1.0, cores / threads)))
        elif threads > cores:
            yield cls.says("moderate", "more threads than cores", "threads of one parallel region wait for the one that has no "
                           "core", seen=seen, cure="compute with one thread for each core", words=words)
        else:
            yield cls.says("good", "a thread for each core", "all cores compute", seen=seen)
