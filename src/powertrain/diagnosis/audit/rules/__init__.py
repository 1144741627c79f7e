"""The rules of the audit, one file each, in the order in which they are asked."""

from __future__ import annotations

from powertrain.diagnosis.audit.rules.base import Circumstances, Rule

RULES: tuple[type[Rule], ...] = ()

__all__ = ["RULES", "Circumstances", "Rule"]
