"""torch.compile: fuse the elementwise work of a block into a few loops, compiled once for all blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.models.decoder import Block, RunBlock
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

COMPILE_S = {"cpu": 40.0, "cuda": 30.0}      # one block, forward and backward, cold
GAIN = {"cpu": (0.7, 1.0), "cuda": (0.7, 0.95)}


@dataclass(frozen=True)
class CompiledBlocks:
    """Runs blocks compiled for one shape of batch; any other shape, and evaluation, runs uncompiled.

    So nothing is ever recompiled in the middle of a run: a shorter last batch costs a plain pass, not half a minute.
    """

    inner: RunBlock
    lengths: tuple[int, ...]
    compiled: Callable[..., Tensor] = field(compare=False)

    def __call__(self, block: Block, index: int, x: Tensor, rotary: Any, lengths: tuple[int, ...], attention: Any) -> Tensor:
        if lengths != self.lengths or not torch.is_grad_enabled():
            return self.inner(block, index, x, rotary, lengths, attention)
        return self.compiled(block, x, rotary, lengths, attention)


@dataclass(frozen=True)
class TorchCompile(Technique):
    """Blocks are compiled, not the model: all have the same code, so one compilation serves every layer.

    Compiling takes tens of seconds; a run that is too short to earn them back is refused with the break-even step.
    """

    mode: str = "default"

    name = "torch_compile"
    exactness = Exactness.ROUNDING
    touches = frozenset({"run_block"})
    source = "torch.compile (Ansel et al. 2024, ASPLOS); regional compilation recipe of PyTorch"

    def __post_init__(self) -> None:
        modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
        if self.mode not in modes:
            raise ValueError(f"techniques.torch_compile.mode={self.mode!r} is none of {', '.join(modes)}")

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        missing = facts.software.missing
        needed = "c++ compiler" if facts.hardware.device == "cpu" else "triton"
        if needed in missing:
            return cls.refuse(f"it needs a {needed}: {missing[needed]}")
        return cls.refuse("not measured yet", possible=cls())

    def apply(self, setup: Setup) -> Setup:
        inner = setup.run_block

        def run(block: Block, x: Tensor, rotary: Any, lengths: tuple[int, ...], attention: Any) -> Tensor:
            return inner(block, 0, x, rotary, lengths, attention)

        compiled = torch.compile(run, dynamic=False, mode=None if self.mode == "default" else self.mode)
        return replace(setup, run_block=CompiledBlocks(inner, setup.prepare(0)[0].lengths, compiled))

    def confirm(self, setup: Setup) -> None:
        """Compiles, by one forward and backward pass of the first micro-batch."""
        found = setup.run_block
        while not isinstance(found, CompiledBlocks) and hasattr(found, "inner"):
            found = found.inner
        if not isinstance(found, CompiledBlocks):
            raise NotApplied(f"torch_compile: blocks are run by {setup.run_block!r}")
        before = _graphs()
        with warnings.catch_warnings():
            # the caches that it sees are of pure functions of the documents' lengths, which are fixed here
            warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
            setup.batch_loss(setup.prepare(0)[0].to(setup.device)).backward()  # type: ignore[no-untyped-call]
        setup.model.zero_grad(set_to_none=True)
        if _graphs() == before:
            raise NotApplied("torch_compile: no graph was compiled; torch fell back to running eagerly")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, compiled=True)


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
