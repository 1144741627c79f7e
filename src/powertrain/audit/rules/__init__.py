"""The rules of the audit, in topic files; their sentences stand in findings.yaml. A new rule is a function and its entry."""

from __future__ import annotations

from powertrain.audit.rules import (
                 adapters,
                 checkpoints,
                 data,
                 distributed,
                 good,
                 kernels,
                 labels,
                 loader,
                 loop,
                 memory,
                 names,
                 optimizer,
                 precision,
                 schedule,
)
from powertrain.records.findings import rules_of

RULES = rules_of(names, labels, optimizer, schedule, precision, memory, data, loader, loop, adapters, kernels, distributed,
                 checkpoints, good)

__all__ = ["RULES"]
