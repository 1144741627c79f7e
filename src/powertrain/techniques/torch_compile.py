"""torch.compile: fuse the elementwise work of a block into a few loops, compiled once for all blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from powertrain.cost.estimate import COMPILER_PARTS
from powertrain.cost.fitting import longest_example
from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique, name_of

if TYPE_CHECKING:
    from torch import Tensor

    from powertrain.models.decoder import Block
    from powertrain.models.kernels.attention import Attention
    from powertrain.models.model import Rotary, RunBlock

COMPILE_S = {"cpu": 20.0, "cuda": 40.0}      # guess: one block, forward and backward, nothing cached
GAIN = {"cpu": (0.9, 1.0), "cuda": (0.7, 0.95)}
BASIS = {"cpu": "study: 2026-11-21_cpu-compile", "cuda": "guess: not measured yet"}
DROPOUT_STUDY = "2026-11-21_cpu-compile-dropout"   # on a CPU the compiled dropout is slower than torch's own


@dataclass(frozen=True)
class CompiledBlocks:
    """Runs blocks compiled for one shape of batch; any other shape, and evaluation, runs uncompiled.

    So nothing is ever recompiled in the middle of a run: a shorter last batch costs a plain pass, not half a minute.
    """

    inner: RunBlock
    lengths: tuple[int, ...]
    compiled: Callable[..., Tensor] = field(compare=False)

    def __call__(self, block: Block, index: int, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...],
                 attention: Attention) -> Tensor:
        import torch

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
    does = "compiles each block's elementwise work into a few loops"
    needs_whole_weights = True
    decides: ClassVar = {"compiled": True}
    choices: ClassVar = {"mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")}
    native_only = True
    exactness = Exactness.ROUNDING
    touches = frozenset({"run_block"})
    acts_on = frozenset({"products", "attention", "elementwise"})
    slots = frozenset({"blocks"})
    source = "torch.compile (Ansel et al. 2024, ASPLOS); regional compilation recipe of PyTorch"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        device = run.hardware.device
        if run.data.kind != "blocks":
            return cls.refuse(Why.DOES_NOT_APPLY, f"examples differ in length (up to {longest_example(run.data):,} tokens), so "
                              "almost every pass would need a new compilation")
        if device not in COMPILER_PARTS:
            return cls.refuse(Why.HARDWARE_LACKS, f"torch.compile is not tested on {device!r}")
        if device == "cpu" and run.model.dropout and cls.without_parts(run, COMPILER_PARTS[device]) is None:
            return cls.refuse(Why.WOULD_NOT_PAY, "with dropout, compiled blocks were slower on a CPU (study: "
                                                 f"{DROPOUT_STUDY})", cls())
        claim = Effect(GAIN[device], 0, basis=BASIS[device], guessed=device == "cuda")
        return cls.if_compiling_pays(run, claim, COMPILE_S[device], COMPILER_PARTS[device])

    def compiles(self) -> bool:
        return True

    def apply(self, setup: Setup) -> Setup:
        import torch

        from powertrain.models.kernels.compiler_caches import own_compiler_caches

        own_compiler_caches()
        inner = setup.run_block

        def run(block: Block, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...], attention: Attention) -> Tensor:
            return inner(block, 0, x, rotary, lengths, attention)

        compiled = torch.compile(run, dynamic=False, mode=None if self.mode == "default" else self.mode)
        return replace(setup, run_block=CompiledBlocks(inner, setup.prepare(0)[0].lengths, compiled))

    def confirm(self, setup: Setup) -> None:
        """Compile the blocks, by one forward and backward pass of the first micro-batch."""
        from powertrain.models.kernels.fused.compiled import is_compiled

        found = setup.runner(CompiledBlocks)
        if found is None:
            raise NotApplied(f"torch_compile: blocks are run by {name_of(setup.run_block)}")
        with warnings.catch_warnings():
            # the caches that it sees are of pure functions of the documents' lengths, which are fixed here
            warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
            setup.run_one_pass()
        if not is_compiled(found.compiled):
            raise NotApplied("torch_compile: no graph was compiled; torch fell back to running eagerly")
