"""What a plan expects of a run, before any step: time, work and memory from facts alone."""

from __future__ import annotations

import dataclasses

from powertrain.cost.gradients import checkpointed_layers
from powertrain.cost.memory import peak_memory
from powertrain.cost.roofline import efficiency, expected_step_s, step_floor
from powertrain.cost.stored import as_held
from powertrain.cost.work import Work, step_work
from powertrain.cost.workload import Workload
from powertrain.records import Estimate, Hardware, ModelFacts, UnknownFact

FUSED_SHARE = 1 / 3                          # guess: chains of about three elementwise operators become one


def estimate(model: ModelFacts, workload: Workload, hardware: Hardware, steps: int) -> Estimate:
    """The expectation for `steps` optimizer steps of `workload`.

    Raises UnknownFact if `hardware` has no measured peak for the workload's dtype, or no measured bandwidth, and for a
    model whose operations are another library's.
    """
    if model.provider != "native":
        raise UnknownFact(f"what {model.provider} does in a step is not counted here")
    work = workload_work(model, workload)
    floor_s, bound_by = step_floor(work, hardware)
    return Estimate(
        step_s=expected_step_s(work, hardware, micro_batch_tokens=workload.micro_batch_tokens, width=model.width),
        floor_s=floor_s, bound_by=bound_by, flops_per_step=work.flops, flops_per_token=work.flops_per_token,
        dtype=work.dtype, peak_flops_per_s=hardware.peak(work.dtype), tokens_per_step=work.tokens, steps=steps,
        memory_bytes=peak_memory(model, workload),
        basis=f"floor: formula, at measured peaks; step: {efficiency(hardware).basis}; memory: formula",
    )


def workload_work(model: ModelFacts, workload: Workload) -> Work:
    """The work of one optimizer step of `workload`: every document has `block` tokens."""
    model = as_held(model, workload.base_dtype)
    full, rest = divmod(workload.examples, workload.micro_batch)
    sizes = [workload.micro_batch] * full + ([rest] if rest else [])
    work = step_work(model, [[workload.block] * size for size in sizes], workload.dtype,
                     checkpointed_layers=checkpointed_layers(model, workload.checkpoint_every),
                     head_share=workload.head_share, moment_bytes=workload.moment_bytes)
    return _compiled(work) if workload.compiled else work


def _compiled(work: Work) -> Work:
    """The same mathematics with the operators between products fused, so that about a third of their bytes move."""
    return dataclasses.replace(work, elementwise_bytes=work.elementwise_bytes * FUSED_SHARE,
                               operators=round(work.operators * FUSED_SHARE))
