"""The checks of a diagnosis, in the order in which they are asked. Add a file, add a line."""

from __future__ import annotations

from powertrain.diagnosis.checks.accelerator import Accelerator
from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.checks.batch import Batch
from powertrain.diagnosis.checks.battery import Battery
from powertrain.diagnosis.checks.busy import Busy
from powertrain.diagnosis.checks.data_limits import DataLimits
from powertrain.diagnosis.checks.data_size import DataSize
from powertrain.diagnosis.checks.disk import Disk
from powertrain.diagnosis.checks.held_out import HeldOut
from powertrain.diagnosis.checks.intervals import Intervals
from powertrain.diagnosis.checks.memory import Memory
from powertrain.diagnosis.checks.no_effect import NoEffect
from powertrain.diagnosis.checks.output_folder import OutputFolder
from powertrain.diagnosis.checks.pins import Pins
from powertrain.diagnosis.checks.precision import Precision
from powertrain.diagnosis.checks.provider import Provider
from powertrain.diagnosis.checks.quantisation import Quantisation
from powertrain.diagnosis.checks.redundancy import Redundancy
from powertrain.diagnosis.checks.run_length import RunLength
from powertrain.diagnosis.checks.schedule import Schedule
from powertrain.diagnosis.checks.software import Software
from powertrain.diagnosis.checks.stability import Stability
from powertrain.diagnosis.checks.threads import Threads
from powertrain.diagnosis.checks.truncation import Truncation
from powertrain.diagnosis.surroundings import Situation

CHECKS: tuple[type[Check], ...] = (
    Accelerator, Busy, Battery, Threads, Memory, Disk, OutputFolder, Software,              # the machine
    DataLimits, DataSize, Truncation, HeldOut, Redundancy,                                  # the data
    Batch, Schedule, Stability, Precision, Quantisation, Provider, Pins, Intervals, NoEffect, RunLength)     # the recipe

__all__ = ["CHECKS", "Check", "Situation"]
