"""Powertrain trains language models as fast as the machine allows, and proves every gain on that machine."""

__version__ = "0.1.0"
