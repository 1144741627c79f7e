"""Fused blocks: a block's forward and backward pass written by hand, its elementwise work compiled into a few loops."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from powertrain.cost.compiling import bargain
from powertrain.cost.memory import peak_memory
from powertrain.cost.passes import longest_example
from powertrain.cost.workload import Workload
from powertrain.records import Effect, Facts, ModelFacts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.models.attention import Attention
    from powertrain.models.decoder import Block, Rotary
    from powertrain.models.fused.block import HandWritten
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

COMPILE_S = {"cpu": 15.0, "cuda": 30.0}      # guess: four functions, nothing cached
GAIN = {"cpu": (0.83, 0.97), "cuda": (0.6, 0.95)}
BASIS = {"cpu": "study: 2026-11-21_fused-blocks-docstrings", "cuda": "guess: not measured yet"}
COMPILED_STUDY = "2026-11-21_fused-or-compiled-default"          # blocks of one length
ROOM = 0.8                                   # share of the free memory that a plan may count on
NEEDED = {"cpu": ("c++ compiler", "python headers"), "cuda": ("triton",)}
NOT_BY_HAND = {"magnitude": "DoRA", "log_sigma": "LS-LoRA"}      # adapters, by a weight that only they have


@dataclass(frozen=True)
class ByHand:
    """Runs every block with the passes written by hand."""

    blocks: tuple[HandWritten, ...] = field(repr=False)

    def __call__(self, block: Block, index: int, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...],
                 attention: Attention) -> Tensor:
        return self.blocks[index](x, rotary, lengths, attention)


@dataclass(frozen=True)
class FusedBlocks(Technique):
    """Autograd keeps what each operator read and runs them one by one; a block as one function does neither.

    It keeps the least that spares every product, works out no gradient that nobody needs, and gives the compiler the
    stretches between two products whole: norm, positions, activation, residual and their gradients each become one loop
    over the batch, for any number of tokens. The products are those of before, in the same precision.
    """

    name = "fused_blocks"
    exactness = Exactness.ROUNDING
    touches = frozenset({"run_block"})
    acts_on = frozenset({"products", "attention", "elementwise"})
    slot = "blocks"
    source = "performance.md sections 2.5, 3.2 and 8; regions compiled by Inductor (Ansel et al. 2024, ASPLOS)"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        device, missing, model = facts.hardware.device, facts.software.missing, facts.model
        if model.provider != "native":
            return cls.refuse(f"the model is computed by {model.provider}, whose blocks are not ours to write")
        if (kind := _not_by_hand(model)) is not None:
            return cls.refuse(f"the backward pass of {kind} adapters is not written by hand")
        if model.adapter_dropout:
            return cls.refuse("with dropout of their own each adapter reads another input, and products cannot be shared")
        if recipe.techniques.get("activation_checkpointing", "off") != "off":
            return cls.refuse("the recipe asks for activation_checkpointing, which computes again what this keeps")
        if facts.data.kind == "blocks":
            return cls.refuse("passes of equal lengths can have whole blocks compiled for them, which was faster "
                              f"(study: {COMPILED_STUDY})", possible=cls())
        if (short := _short_of_memory(facts)) is not None:
            return cls.refuse(short, possible=cls())
        if device not in NEEDED:
            return cls.refuse(f"not known to work on {device!r}")
        for part in NEEDED[device]:
            if part in missing:
                return cls.refuse(f"compiling needs the part {part!r}, which is {missing[part]}")
        found = bargain(facts, GAIN[device], COMPILE_S[device], train_time_s=recipe.train_time_s, max_steps=recipe.max_steps,
                        epochs=recipe.num_train_epochs)
        if not found.pays:
            return cls.refuse(found.shown, possible=cls())
        return Proposal(cls(), because=found.shown, claim=Effect(GAIN[device], 0, basis=BASIS[device]))

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, fused_blocks=True)

    def apply(self, setup: Setup) -> Setup:
        from powertrain.models.decoder import Block, Decoder
        from powertrain.models.fused.block import Functions, HandWritten
        from powertrain.models.fused.compiled import CompiledPart
        from powertrain.models.fused.parts import Parts
        from powertrain.models.fused.weights import Weights

        assert isinstance(setup.model, Decoder)
        functions = Functions.of(Parts(setup.model.config), CompiledPart)
        blocks = [block for block in setup.model.blocks if isinstance(block, Block)]
        return replace(setup, run_block=ByHand(tuple(HandWritten(Weights(block), functions) for block in blocks)))

    def confirm(self, setup: Setup) -> None:
        """One forward and backward pass of a few tokens, which compiles; every block that trains has to be in it."""
        found = setup.run_block
        while not isinstance(found, ByHand) and hasattr(found, "inner"):
            if getattr(found, "recomputes", False):
                raise NotApplied("fused_blocks: blocks keep what spares every product, so nothing in them would be computed "
                                 "again; leave out activation_checkpointing, or this")
            found = found.inner
        if not isinstance(found, ByHand):
            raise NotApplied(f"fused_blocks: blocks are run by {setup.run_block!r}")
        loss = setup.batch_loss(setup.few_tokens().to(setup.device))
        recorded = _blocks_recorded(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        setup.model.zero_grad(set_to_none=True)
        training = [block for block in found.blocks if block.weights.trained]
        if recorded < len(training):
            raise NotApplied(f"fused_blocks: {recorded} of {len(training)} blocks that train are recorded as one function")
        parts = (found.blocks[0].functions.leave, found.blocks[0].functions.leave_back)
        if not all(getattr(part, "is_compiled", False) for part in parts):
            raise NotApplied("fused_blocks: nothing was compiled; torch fell back to running the parts as they are")


def _blocks_recorded(loss: Tensor) -> int:
    """How many blocks the loss depends on by one function each."""
    seen, open_nodes, count = set(), [loss.grad_fn], 0
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        count += node.name() == "_BlockBackward"
        open_nodes += [following for following, _ in node.next_functions]
    return count


def _not_by_hand(model: ModelFacts) -> str | None:
    """The kind of the model's adapters, where it is one that has no hand-written backward pass."""
    return next((kind for name, kind in NOT_BY_HAND.items() if any(shape.endswith(f".{name}") for shape in model.shapes)), None)


def _short_of_memory(facts: Facts) -> str | None:
    """Why keeping what spares every product does not fit, even for one example at a time."""
    room_bytes, tokens = int(ROOM * facts.hardware.free_memory_bytes), longest_example(facts.data)
    needed_bytes = sum(peak_memory(facts.model, Workload(facts.data.train_batch_size, tokens, micro_batch=1)).values())
    if needed_bytes <= room_bytes:
        return None
    return (f"one example of {tokens:,} tokens at a time needs {needed_bytes / 2**30:.2f} GiB where nothing is computed again, "
            f"and {room_bytes / 2**30:.1f} are there")
