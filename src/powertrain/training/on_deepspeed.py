"""Optimizer state and gradients divided among the processes of a run by DeepSpeed's ZeRO, stages 1 and 2.

Every process has whole weights. Each pass goes through DeepSpeed's engine, whose hooks sum gradients over the processes; the
engine's optimizer updates a process's part of one flat buffer and gathers the weights. Checkpoints are our own: moments are
read out weight by weight.
Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO), sections 5.1 and 5.2; deepspeed.runtime.zero.stage_1_and_2, 0.19.
"""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from powertrain.records import Batch
from powertrain.shapes import BUCKET_BYTES
from powertrain.training.objective import Sums
from powertrain.training.ranks import ALONE, Ranks
from powertrain.training.setup import Lap, Setup
from powertrain.training.sharded import ShardedRanks, Sharding
from powertrain.training.updates import Moments, RunOptimizer

FP32_BYTES = 4


@dataclass(frozen=True)
class DeepSpeedSharding(Sharding):
    """How DeepSpeed divides a run. It holds the engine of the newest optimizer; `leave` undoes it."""

    engines: list[Any] = field(default_factory=list, compare=False)      # one at most

    def divide(self, model: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """Let DeepSpeed join torch's default group. Weights stay whole."""
        with _deepspeed() as deepspeed:
            deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)

    def ranks(self, model: nn.Module, plain: Ranks) -> "DeepSpeedRanks":
        given = {one.name: getattr(plain, one.name) for one in fields(plain)}
        return DeepSpeedRanks(**given, model=model, division=self)

    def optimizer(self, setup: Setup, plain: RunOptimizer) -> RunOptimizer:
        """Return DeepSpeed's optimizer around the plain one, and take over the backward passes."""
        self.leave()
        with _deepspeed() as deepspeed:
            engine, *_ = deepspeed.initialize(model=_OnePass(setup), optimizer=plain, config=self._config(),
                                              dist_init_required=False)
        self.engines.append(engine)
        return DeepSpeedOptimizer(engine)

    def leave(self) -> None:
        """Take DeepSpeed's hooks off the weights."""
        while self.engines:
            self.engines.pop().destroy()

    def run_pass(self, setup: Setup, batch: Batch, units: float, scaler: torch.amp.GradScaler, lap: Lap) -> Sums:
        """Add the gradients of one pass's loss to DeepSpeed's; return its loss and metrics. See setup.run_eagerly."""
        engine, = self.engines
        loss = engine(setup, batch, units)
        lap("forward")
        engine.backward(loss)
        lap("backward")
        return {name: value.detach() for name, value in engine.module.means.items()}

    def _config(self) -> dict[str, Any]:
        return {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,       # counted by us, not by it
                "gradient_allreduce_op": "sum",      # not the mean: a pass's loss is divided by the step's units already
                "zero_optimization": {"stage": self.stage, "reduce_bucket_size": BUCKET_BYTES // FP32_BYTES,
                                      "contiguous_gradients": False, "overlap_comm": False},
                "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9}


@dataclass(frozen=True)
class DeepSpeedRanks(ShardedRanks):
    """One process of a group whose gradients DeepSpeed sums."""

    @property
    def shard(self) -> tuple[int, int] | None:
        return (0, 1) if self.is_writer else None

    def begin_pass(self, *, is_last: bool) -> None:
        for engine in self.division.engines:  # type: ignore[attr-defined]
            engine.set_gradient_accumulation_boundary(is_last)


class DeepSpeedOptimizer(RunOptimizer):
    """The optimizer of a DeepSpeed engine. Its groups are those of the plain optimizer inside, whose weights are flat parts."""

    def __init__(self, engine: Any):
        self.zero = engine.optimizer         # a DeepSpeedZeroOptimizer
        self.inside: torch.optim.Optimizer = self.zero.optimizer
        self.weights: list[nn.Parameter] = [weight for group in self.zero.bit16_groups for weight in group]
        super().__init__(self.weights, self.inside.defaults)
        self.param_groups, self.state = self.inside.param_groups, self.inside.state

    @property
    def own_elements(self) -> int:
        """Return the elements of the weights, padding included, that this process updates."""
        return sum(flat.numel() for flat in self.zero.single_partition_of_fp32_groups)

    def clip(self, max_grad_norm: float, ranks: Ranks = ALONE) -> Tensor:
        """Return the norm of all gradients, () fp32; DeepSpeed scales larger ones down as it updates, by the same rule.

        Where it is not finite, it is infinite here, and DeepSpeed leaves weights and moments as they are.
        """
        self.zero.clip_grad = max_grad_norm
        norm: Tensor = self.zero.scaled_global_norm()
        return norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update this process's part, and gather the weights of all."""
        assert closure is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)   # DeepSpeed calls an exchange by the name that torch gives up
            self.zero.step()

    def step_unless(self, bad: Tensor) -> None:
        """Update as `step` does. DeepSpeed itself passes over gradients that are not finite, and clears what it has summed."""
        if bad:
            for gradient in (one for group in self.zero.averaged_gradients.values() for one in group or ()):
                gradient.fill_(torch.nan)
        self.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero.zero_grad(set_to_none)

    def moments(self) -> Moments:
        """Return the state by weight, whole, on the host of the first process; nothing on the others, which take part."""
        from deepspeed.utils import safe_get_full_optimizer_state

        found: dict[nn.Parameter, dict[str, Tensor]] = {weight: {} for weight in self.weights}
        first = torch.distributed.get_rank() == 0
        self._link()
        for flat, group in zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True):
            for key, part in self.state.get(flat, {}).items():
                for weight in group:
                    whole = part.clone() if key == "step" else safe_get_full_optimizer_state(weight, key)
                    if first:
                        found[weight][key] = whole.cpu()
        return found

    def restore(self, moments: Moments) -> None:
        """Put the state that `moments` gave back, and the model's weights into the parts that are updated."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self.state.clear()
        for flat, group in zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True):
            if any(found := moments.get(group[0], {})):
                self.state[flat] = {key: value.clone() if key == "step" else torch.zeros_like(flat, requires_grad=False)
                                    for key, value in found.items()}
        self._link()
        for weight in self.weights:
            safe_set_full_fp32_param(weight, weight.detach())
            for key, value in moments.get(weight, {}).items():
                if key != "step":
                    safe_set_full_optimizer_state(weight, value.to(weight.device), key)

    def _link(self) -> None:
        """Let each weight know its part of the state. DeepSpeed 0.19 does it in the first update, of the first group alone."""
        self.zero._hp_optimizer_states_linked = False
        if self.state:
            self.zero._lazy_init_hp_params_optimizer_state()


class _OnePass(nn.Module):
    """The loss of one pass as a module, so that DeepSpeed's hooks are around it."""

    def __init__(self, setup: Setup):
        super().__init__()
        self.model = setup.model
        self.means: Sums = {}

    def forward(self, setup: Setup, batch: Batch, units: float) -> Tensor:
        self.means = {name: value / units for name, value in setup.sums(batch).items()}
        return self.means["loss"]


@contextlib.contextmanager
def _deepspeed() -> Iterator[Any]:
    """Yield DeepSpeed, which inside logs errors only, and compiles no C++.

    On a CPU it would compile sums over shared memory, for minutes, as soon as it joins a group. Without them it uses torch's.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        deepspeed = importlib.import_module("deepspeed")
        communication: Any = importlib.import_module("deepspeed.comm.torch")
        build, communication.build_shm_op = communication.build_shm_op, lambda: None
        try:
            yield deepspeed
        finally:
            communication.build_shm_op = build
    finally:
        logging.disable(before)
