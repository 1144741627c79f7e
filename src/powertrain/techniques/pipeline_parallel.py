"""Pipeline parallelism: each process holds some consecutive blocks, and every pass goes through all processes."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from powertrain.cost.pipeline import bubble, stage_bytes
from powertrain.cost.sharding import standing_bytes
from powertrain.records import NotApplied, Refusal, Why
from powertrain.techniques.base import GIB, TOO_LARGE, Exactness, PlannedRun, Setup, Technique
from powertrain.training.objectives import objective_of


@dataclass(frozen=True)
class PipelineParallel(Technique):
    """Each process keeps layers / processes blocks, with their gradients and moments; activations go from one to the next.

    Passes follow each other through the stages, forward and backward in turn (1F1B). Little is exchanged, so slow links
    do; but a process waits while the first passes come and the last ones go. The update is that of one process up to rounding.
    """

    processes: int = 2

    name = "pipeline_parallel"
    does = "divides the blocks among the processes of the run, and sends each pass through all"
    decides_by: ClassVar = {"stages": "processes"}
    native_only = True
    for_several = TOO_LARGE
    needs_all_trained = True
    asked_first = True                       # techniques that need all blocks in a process refuse beside it
    exactness = Exactness.ROUNDING
    touches = frozenset({"as_stage", "runtime"})
    slots = frozenset({"processes"})
    source = "Narayanan et al. 2021, arXiv:2104.04473 (1F1B); torch.distributed.pipelining.Schedule1F1B"

    @classmethod
    def propose(cls, run: PlannedRun) -> Refusal:
        stages = run.hardware.processes
        if (reason := _cannot_be_staged(run, stages)) is not None:
            return cls.refuse(Why.CONFLICT, reason)
        passes = replace(run, decided=replace(run.decided, stages=stages)).least_passes
        idle, needed = bubble(stages, passes), standing_bytes(run.model, run.optimizer)
        held = stage_bytes(run.model, run.optimizer, stages)
        return cls.refuse(
            Why.NOT_NEEDED, f"with about {passes} passes a step, each of {stages} processes would wait for {idle:.0%} of the "
            f"step; weights, gradients and optimizer state would take {held / GIB:.2f} GiB of a process in place of "
            f"{needed / GIB:.2f}, and sharding divides these without the wait", cls(stages),
            numbers={"bubble_share": idle, "passes": passes, "stage_bytes": held, "needed_bytes": needed})

    def unmet(self, run: PlannedRun) -> Refusal | None:
        passes = run.decided.micro_batches
        if passes >= self.processes:
            return None
        cure = f"techniques.micro_batch.examples={max(1, run.data.train_batch_size // self.processes)}"
        if run.decided.packs:
            cure = f"techniques.packing.tokens={run.data.train_batch_size * run.data.block // (2 * self.processes)}"
        return self.refuse(Why.CONFLICT, f"a step has {passes} pass{'es' * (passes != 1)}, fewer than the {self.processes} "
                           f"stages; use {cure}", cure=(cure,))

    def apply(self, setup: Setup) -> Setup:
        from powertrain.training.pipeline import as_stage

        return replace(setup, as_stage=as_stage, runtime=(*setup.runtime, partial(self._divide, setup)))

    def _divide(self, setup: Setup) -> None:
        """Compute a few passes with the whole model, for `confirm`, and leave this process its blocks."""
        from powertrain.training.pipeline import into_stages

        alone = _figures_alone(setup, self.processes)
        into_stages(setup.model).alone = alone

    def confirm(self, setup: Setup) -> None:
        """Look at what this process holds, and compare a step's loss and the first block's norm with those before dividing."""
        from powertrain.training.loop import check_alike
        from powertrain.training.pipeline import Staged, stage_of
        from powertrain.training.ranks import joined_as_planned

        ranks, model = joined_as_planned(self.name, self.processes), setup.model
        if not isinstance(model, Staged) or setup.as_stage is None:
            raise NotApplied("pipeline_parallel: the blocks are not divided")
        wrong = [name for name, weight in model.named_parameters()
                 if stage_of(name, model.config.layers, ranks.world) != ranks.rank]
        wrong += [name for name, part in model.elsewhere.items() if not all(weight.is_meta for weight in part.parameters())]
        if wrong:
            raise NotApplied(f"pipeline_parallel: this process holds {', '.join(wrong[:3])} of other stages")
        check_alike("pipeline_parallel: a step in stages", "the norm of the first block's gradients", model.alone,
                    _figures_staged(setup, self.processes))


def _cannot_be_staged(run: PlannedRun, stages: int) -> str | None:
    """Return why the blocks of this run cannot be divided, or None."""
    model, lora = run.model, run.recipe.lora
    if run.decided.replayed:
        return "cuda_graph replays recorded passes, and the exchanges between stages are not in the recording"
    if model.layers % stages:
        return f"{model.layers} blocks do not divide into {stages} equal stages; use a number of processes that divides " \
               f"{model.layers}"
    if model.tied_head:
        return "the head is the embedding, and the first and last process would each need it; use sharding, or " \
               "model.tied_head=false for a new model"
    if model.dropout or model.adapter_dropout or objective_of(run.recipe).is_random:
        return "what dropout and noise draw would depend on how the blocks are divided; use model.dropout=0, lora.dropout=0 " \
               "and objective.embedding_noise=0"
    if (objective := objective_of(run.recipe)).rows != "answers":
        return f"the objective {objective.name} compares documents, and a stage sees no whole pass; use sharding"
    if model.method == "qlora":
        return "blocks of a base packed in 4 bits are not divided yet; method=lora keeps it in 16"
    if model.adapter_parameters and lora.kind != "lora":
        return f"adapters of kind {lora.kind} have a penalty on whole weights; use lora.kind=lora"
    if model.adapter_parameters and len({layer * stages // model.layers for layer in model.adapted_layers}) < stages:
        return "a stage without adapters has nothing to train; adapt all layers"
    return None


def _figures_alone(setup: Setup, examples: int) -> tuple[float, float]:
    """Return loss and the norm of the first trained block's gradients of a few examples, by the whole model."""
    import torch

    from powertrain.training.loop import first_passes

    batches, units = first_passes(setup, examples)
    weights = _first_trained(setup)
    loss, sums = 0.0, [torch.zeros_like(weight) for weight in weights]
    for batch in batches:
        mean = setup.batch_loss(batch) / units
        loss += float(mean.detach())
        for held, gradient in zip(sums, torch.autograd.grad(mean, weights), strict=True):
            held += gradient
    return loss, float(torch.nn.utils.get_total_norm(sums))


def _figures_staged(setup: Setup, examples: int) -> tuple[float, float]:
    """Return the same of the same examples, in stages."""
    import torch

    from powertrain.training.loop import backward, first_passes
    from powertrain.training.ranks import joined

    part = setup.shared_by(joined())
    batches, units = first_passes(part, examples)
    means = backward(part, torch.amp.GradScaler(setup.device.type, enabled=False), batches, units)
    own = _first_trained(setup) if part.ranks.is_writer else []
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in own if weight.grad is not None])
    setup.model.zero_grad(set_to_none=True)
    found = part.ranks.total(float(means["loss"]), float(norm))
    return found[0], found[1]


def _first_trained(setup: Setup) -> list[Any]:
    return [weight for weight in setup.model.get_submodule("blocks.0").parameters() if weight.requires_grad]
