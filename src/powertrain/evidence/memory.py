"""Predicted memory beside the real peak of a step: the findings of a study of kind `memory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts
from powertrain.run.fits import workload_of_step
from powertrain.training.ledger import measured_step_bytes
from powertrain.training.loop import State
from powertrain.training.setup import Setup


def memory_row(what: str, model: ModelFacts, workload: Workload, setup: Setup, state: State) -> Mapping[str, Any]:
    """One row of the findings; takes one step of `setup`, or two where the optimizer has no state yet.

    `workload` is that of the plan in force in `setup`; it is predicted for the very documents of the step that is measured.
    """
    step = state.step if state.optimizer.state else state.step + 1
    predicted = peak_memory(model, workload_of_step(workload, setup, step))
    measured_bytes = measured_step_bytes(setup, state)["allocated"]
    return {"what": what, "predicted": dict(predicted), "measured_bytes": measured_bytes,
            "error": sum(predicted.values()) / measured_bytes - 1}
