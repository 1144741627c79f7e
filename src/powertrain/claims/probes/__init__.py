"""Experiments that are not two arms of `train`. Add a file with `measure(context, **settings) -> Measured`, add a line."""

from collections.abc import Callable, Mapping

from powertrain.claims.probes import (
    activations,
    adapter_rank,
    attention_kernels,
    attention_memory,
    attention_share,
    compression,
    data_loading,
    data_parallel,
    dropped_examples,
    epochs,
    four_bit_bytes,
    loading,
    loop_habit,
    matmul,
    memory_rule,
    memory_trace,
    optimizer_step,
    saving,
    sharding,
    start_up,
    target_loss,
    tokenising,
    unlike_runs,
    unused_columns,
    utilisation,
    whole_runs,
)
from powertrain.claims.probes.probe import Context, Measured, OutOfTime

PROBES: Mapping[str, Callable[..., Measured]] = {
    "activations": activations.measure, "adapter_rank": adapter_rank.measure, "attention_kernels": attention_kernels.measure,
    "attention_memory": attention_memory.measure, "attention_share": attention_share.measure,
    "compression": compression.measure, "data_loading": data_loading.measure, "data_parallel": data_parallel.measure,
    "dropped_examples": dropped_examples.measure, "epochs": epochs.measure, "four_bit_bytes": four_bit_bytes.measure,
    "loading": loading.measure, "loop_habit": loop_habit.measure, "matmul": matmul.measure, "memory_rule": memory_rule.measure,
    "memory_trace": memory_trace.measure, "optimizer_step": optimizer_step.measure, "saving": saving.measure,
    "sharding": sharding.measure, "start_up": start_up.measure, "target_loss": target_loss.measure,
    "tokenising": tokenising.measure, "unlike_runs": unlike_runs.measure, "unused_columns": unused_columns.measure,
    "utilisation": utilisation.measure, "whole_runs": whole_runs.measure,
}

__all__ = ["PROBES", "Context", "Measured", "OutOfTime"]
