"""A laptop on its battery clocks down."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding


class Battery(Check):
    name = "battery"
    rests_on = "fact: psutil.sensors_battery"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        if where.machine.on_battery:
            yield cls.says("moderate", "the machine runs on its battery", "most machines clock down then, and the battery may "
                           "end before the run", seen="power_plugged is False", cure="plug it in")
