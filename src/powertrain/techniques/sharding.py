"""Sharding: several processes divide weights, gradients and optimizer state among them, and gather weights block by block."""

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

from powertrain.cost.fitting import planned_room_bytes
from powertrain.cost.sharding import standing_bytes
from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import TOO_LARGE, Exactness, Need, PlannedRun, Setup, Technique
from powertrain.training.optimizers import OPTIMIZERS

DIVIDED = "sharding: a divided step"
STAGES = (1, 2, 3)           # of ZeRO: the optimizer's state is divided; gradients too; weights too
NO_DEEPSPEED = ("techniques.sharding.engine='deepspeed' needs DeepSpeed, which is not installed here; "
                'pip install "powertrain[deepspeed]", or use techniques.sharding.engine=fsdp')
ONLY_FSDP = ("techniques.sharding.engine='deepspeed' divides in stages 1 and 2 without replicas: in stage 3 DeepSpeed "
             "takes means of gradients, not sums; set techniques.sharding.stage=2, or use techniques.sharding.engine=fsdp")


@dataclass(frozen=True)
class Sharding(Technique):
    """Each process keeps 1 / processes of every weight, gradient and moment; what it computes with is gathered and freed.

    The passes of a step are dealt out by their tokens, and gradients are sums over all processes, so the update is that of one
    process up to rounding. Stage 1 divides the optimizer's state, 2 gradients too, 3 weights too: each step saves memory and
    gathers more often. With `replicas`, that many groups of processes hold the whole model each. The engine is torch's FSDP2,
    or DeepSpeed for stages 1 and 2.
    """

    processes: int = 2
    stage: int = 3
    replicas: int = 1
    engine: str = "fsdp"

    name = "sharding"
    does = "divides weights, gradients and optimizer state among the processes of the run"
    decides_by: ClassVar = {"shards": "shards", "sharded_stage": "stage", "replicas": "replicas"}
    choices: ClassVar = {"engine": ("fsdp", "deepspeed")}
    native_only = True
    for_several = TOO_LARGE
    asked_first = True                       # techniques that need whole weights refuse beside it
    exactness = Exactness.ROUNDING
    touches = frozenset({"sharding", "runtime", "run_pass"})
    slots = frozenset({"processes"})
    source = "Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO); torch.distributed.fsdp.fully_shard"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == "deepspeed" and find_spec("deepspeed") is None:
            raise ValueError(NO_DEEPSPEED)
        if self.engine == "deepspeed" and (self.stage == 3 or self.replicas > 1):
            raise ValueError(ONLY_FSDP)
        if self.stage not in STAGES:
            raise ValueError(f"techniques.sharding.stage={self.stage} is none of 1, 2 and 3")
        if self.processes % self.replicas or self.shards < 2:
            raise ValueError(f"techniques.sharding.replicas={self.replicas} does not divide {self.processes} processes into "
                             "groups of 2 or more")

    @property
    def shards(self) -> int:
        """Return the processes that each weight is divided among."""
        return self.processes // self.replicas

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        processes = run.hardware.processes
        if (reason := _cannot_be_divided(run)) is not None:
            return cls.refuse(Why.CONFLICT, reason)
        if run.recipe.ema.decay is not None and cls.pinned_setting(run, "engine") == "deepspeed":
            return cls.refuse(Why.CONFLICT, "DeepSpeed updates parts of flat buffers, of which no average is kept "
                                            f"(ema.decay={run.recipe.ema.decay:g}); use techniques.sharding.engine=fsdp")
        held = Need(needed := standing_bytes(run.model, run.optimizer), planned_room_bytes(run.hardware))
        shown, numbers = f"weights, gradients and optimizer state take {held}", held.numbers
        whole = run.need(run.one_example(attention_saves_scores=False))
        fits = held.is_met and whole.is_met
        stage, replicas = (1, 1) if fits else _least_exchanged(run)
        if fits or (held.is_met and stage == STAGES[-1]):        # stage 3 gathers weights in every pass
            return cls.refuse(Why.NOT_NEEDED, f"{shown}, so each process can hold them", cls(processes), numbers=numbers)
        if held.is_met:
            shown = f"a step in passes of one example needs {whole}"
        shards = processes // replicas
        among = f"{processes} processes divide them (stage {stage})" if replicas == 1 else (
            f"the {shards} processes of each of {replicas} nodes divide them (stage {stage}), so only sums of gradients pass "
            "between nodes")
        return cls(processes, stage, replicas).on(f"{shown}; {among}", Effect(
            (1 / processes, 2.0), -(needed - needed // shards), basis="guess: time not measured yet, memory by formula",
            guessed=True), numbers)

    def apply(self, setup: Setup) -> Setup:
        from powertrain.training.sharded import Sharding as Division

        division = Division(self.stage, self.replicas)
        if self.engine == "deepspeed":
            from powertrain.training.on_deepspeed import DeepSpeedSharding

            division = DeepSpeedSharding(self.stage)
            setup = replace(setup, run_pass=division.run_pass)
        return replace(setup, sharding=division, runtime=(*setup.runtime, partial(division.divide, setup.model)))

    def confirm(self, setup: Setup) -> None:
        """Look at what this process holds, and compare a divided step's loss and a block's norm with those of one process."""
        from powertrain.training.loop import check_alike
        from powertrain.training.ranks import joined_as_planned
        from powertrain.training.sharded import parts_of

        joined_as_planned(self.name, self.processes)
        if self.engine == "deepspeed":
            _confirm_deepspeed(setup, self.processes)
            return
        whole = [name for name, weight in setup.model.named_parameters() if not hasattr(weight, "to_local")]
        if whole or not parts_of(setup.model):
            raise NotApplied(f"sharding: {len(whole)} weights are not divided ({', '.join(whole[:3])})")
        too_long = [name for name, weight in setup.model.named_parameters()
                    if weight.to_local().shape[0] > -(-weight.shape[0] // self.shards)]  # type: ignore[attr-defined]
        if too_long:
            raise NotApplied(f"sharding: this process holds more than 1 / {self.shards} of {', '.join(too_long[:3])}")
        check_alike(DIVIDED, "the norm of a block's gradients", _alone(setup, self.processes), _divided(setup, self.processes))


def _confirm_deepspeed(setup: Setup, processes: int) -> None:
    """Look at the part of the state that this process updates, and compare loss and norm with those of one process."""
    from powertrain.training.loop import check_alike, new_state, run_first_passes
    from powertrain.training.ranks import joined
    from powertrain.training.setup import run_eagerly
    from powertrain.training.sharded import total_norm

    trained = [weight for weight in setup.model.parameters() if weight.requires_grad]
    loss = run_first_passes(replace(setup, run_pass=run_eagerly), processes)
    expected = loss, total_norm(trained).item()
    setup.model.zero_grad(set_to_none=True)
    optimizer: Any = new_state(setup, 0.0).optimizer
    found = run_first_passes(setup.shared_by(joined()), processes), optimizer.clip(0.0).item()
    held, most = optimizer.own_elements, sum(weight.numel() for weight in trained) / processes
    setup.sharding.leave()  # type: ignore[union-attr]
    setup.model.zero_grad(set_to_none=True)
    if held > most + 4 * processes:          # groups are filled up to a multiple of 2 * processes
        raise NotApplied(f"sharding: this process updates {held:,} elements, and 1 / {processes} are {most:,.0f}")
    check_alike(DIVIDED, "the norm of all gradients", expected, found)


def _least_exchanged(run: PlannedRun) -> tuple[int, int]:
    """Return the stage and the replicas with which a step fits: one replica a node if a node can hold the run, else one in all.

    Where nothing fits, that is stage 3 among all processes.
    """
    processes, nodes = run.hardware.processes, run.hardware.nodes
    a_node = [nodes] if 1 < nodes < processes and processes % nodes == 0 else []
    for replicas in (*a_node, 1):
        for stage in STAGES:
            divided = {"shards": processes // replicas, "sharded_stage": stage, "replicas": replicas}
            if run.need(run.one_example(attention_saves_scores=False, **divided)).is_met:
                return stage, replicas
    return STAGES[-1], 1


def _cannot_be_divided(run: PlannedRun) -> str | None:
    """Return why the weights or the update of this run cannot be divided, or None."""
    if run.decided.replayed:
        return "cuda_graph replays recorded passes, and the exchanges of weights are not in the recording"
    model, row = run.model, OPTIMIZERS.named(run.optimizer.name)
    if model.method == "qlora":
        return "the frozen base is packed in 4 bits, and a part of it cannot be gathered; method=lora keeps it in 16"
    if not row.can_be_flat:
        return f"the recipe's optimizer {row.name} does not update each weight's elements one by one; use optimizer=adamw"
    if model.adapter_parameters and run.recipe.lora.kind != "lora":
        return f"adapters of kind {run.recipe.lora.kind} have a penalty on whole weights; use lora.kind=lora"
    return None


def _alone(setup: Setup, examples: int) -> tuple[float, float]:
    """Return loss and the norm of the last block's gradients of a few examples, of which this process computes all passes."""
    from powertrain.training.loop import run_first_passes
    from powertrain.training.sharded import total_norm

    block = _last_trained_block(setup)
    block.set_requires_gradient_sync(False, recurse=False)  # its gradients stay whole, and this process's own
    block.set_reshard_after_backward(False, recurse=False)
    loss = run_first_passes(setup, examples)
    norm = total_norm(list(block.parameters())).item()
    for weight in block.parameters():
        weight.grad = None
    block.reshard()
    block.set_requires_gradient_sync(True, recurse=False)
    block.set_reshard_after_backward(True, recurse=False)
    setup.model.zero_grad(set_to_none=True)
    return loss, norm


def _divided(setup: Setup, examples: int) -> tuple[float, float]:
    """Return the same of the same examples, whose passes all processes share."""
    from powertrain.training.loop import run_first_passes
    from powertrain.training.ranks import joined
    from powertrain.training.sharded import total_norm

    loss = run_first_passes(setup.shared_by(joined()), examples)
    norm = total_norm(list(_last_trained_block(setup).parameters())).item()
    setup.model.zero_grad(set_to_none=True)
    return loss, norm


def _last_trained_block(setup: Setup) -> Any:
    return [block for block in setup.model.get_submodule("blocks").children()
            if any(weight.requires_grad for weight in block.parameters())][-1]
