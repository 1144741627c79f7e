"""Probes: experiments that are not two arms of `train`, as functions in topic files. To add one, write it and name it here."""

from collections.abc import Callable, Mapping

from powertrain.claims.probes import files, kernels, loops, memory, processes, runs
from powertrain.claims.probes.probe import Context, Measured, in_own_process

PROBES: Mapping[str, Callable[..., Measured]] = {
    **{probe.__name__: in_own_process(probe) for probe in (
        memory.memory_trace, kernels.attention_kernels, kernels.attention_memory, kernels.attention_share, kernels.matmul,
        kernels.optimizer_step, kernels.data_parallel, kernels.sharding, loops.loop_habit, loops.data_loading,
        loops.dropped_examples, loops.unused_columns, loops.utilisation, loops.unlike_runs, files.compression, files.saving,
        files.loading, runs.epochs, runs.start_up, runs.target_loss)},
    # these start processes of their own, or measure nothing
    **{probe.__name__: probe for probe in (
        memory.step_memory, memory.memory_rule, memory.four_bit_bytes, files.tokenising, processes.shared_steps,
        runs.whole_runs)},
}

__all__ = ["PROBES", "Context", "Measured"]
