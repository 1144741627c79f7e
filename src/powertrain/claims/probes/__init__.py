"""Probes: experiments that are not two arms of `train`, as functions in topic files. To add one, write it and name it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from powertrain.claims.probes import data, devices, files, habits, kernels, memory, runs
from powertrain.claims.probes.probe import Context, Measured, OutOfTime

PROBES: Mapping[str, Callable[..., Measured]] = {function.__name__: function for function in (
    memory.memory_trace, memory.activations, memory.adapter_rank, memory.memory_rule, memory.four_bit_bytes,
    kernels.attention_kernels, kernels.attention_memory, kernels.attention_share, kernels.matmul, kernels.optimizer_step,
    habits.loop_habit, habits.dropped_examples, habits.unused_columns, habits.utilisation,
    devices.data_parallel, devices.sharding,
    data.data_loading, data.tokenising,
    files.compression, files.saving, files.loading,
    runs.epochs, runs.start_up, runs.target_loss, runs.unlike_runs, runs.whole_runs,
)}

__all__ = ["PROBES", "Context", "Measured", "OutOfTime"]
