"""The checks of a diagnosis, in the order in which they are asked: each is a function in a topic file."""

from powertrain.diagnosis.checks import machine, recipe
from powertrain.records.findings import rules_of

CHECKS = rules_of(machine, recipe)
