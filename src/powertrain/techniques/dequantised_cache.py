"""Dequantised cache: as many blocks of a 4-bit base as fit are made whole once, and not for each product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from powertrain.cost.fitting import longest_example
from powertrain.cost.memory import peak_memory
from powertrain.cost.precision import planned_dtype
from powertrain.cost.workload import Workload
from powertrain.models.kernels.quantised import keep_whole, whole_blocks
from powertrain.records import Facts, Proposal, Refusal
from powertrain.shapes import DTYPE_BYTES, FOUR_BIT
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

ROOM = 0.4                   # share of the free memory that plan and cache together may take: passes want the rest


@dataclass(frozen=True)
class DequantisedCache(Technique):
    """A 4-bit weight is made wide for its product, and again for the gradient of its input: each time all its bytes move.

    Made once and kept, it costs two bytes more (in bf16), and the products meet the very same numbers. The last blocks are
    kept: whatever is trained, they have a backward pass.
    """

    blocks: int = 1

    name = "dequantised_cache"
    does = "keeps some 4-bit blocks unpacked"
    exactness = Exactness.BITWISE
    touches = frozenset({"runtime"})
    acts_on = frozenset({"products", "elementwise"})
    source = "performance.md sections 3.3 and 6b; Dettmers et al. 2023, arXiv:2305.14314 (QLoRA)"

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"techniques.dequantised_cache.blocks={self.blocks} must be at least 1")

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        model, hardware = facts.model, facts.hardware
        if model.provider != "native":
            return cls.refuse(f"the model is computed by {model.provider}, whose 4-bit weights are not ours to keep")
        if model.frozen_dtype not in FOUR_BIT or not model.adapter_parameters:
            return cls.refuse("no weight is in 4 bits, so there is none to be made whole")
        item = DTYPE_BYTES[planned_dtype(hardware, recipe.techniques)]
        each_bytes = item * model.matmul_parameters // model.layers
        one = Workload(facts.data.train_batch_size, longest_example(facts.data), micro_batch=1)
        room_bytes = int(ROOM * hardware.free_memory_bytes) - sum(peak_memory(model, one).values())
        fitting = min(model.layers, room_bytes // each_bytes)
        if fitting < 1:
            return cls.refuse(f"a block made whole takes {each_bytes / 2**20:,.1f} MiB, and beside a step of one example "
                              f"{max(0, room_bytes) / 2**20:,.1f} are there for it")
        cache_bytes = fitting * each_bytes
        return cls.refuse(f"{fitting} of {model.layers} blocks could be kept whole for {cache_bytes / 2**20:,.1f} MiB, with "
                          "the same bits in every result; what it saves is not measured yet, so it is left to a pin",
                          possible=cls(fitting))

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, runtime=setup.runtime.also(
            partial(keep_whole, setup.model, self.blocks, setup.precision.compute_dtype)))

    def confirm(self, setup: Setup) -> None:
        dtype = setup.precision.compute_dtype
        found = whole_blocks(setup.model, dtype)
        wanted = min(self.blocks, len(list(setup.model.get_submodule("blocks").children())))
        if found != wanted:
            raise NotApplied(f"dequantised_cache: {found} blocks are kept whole in {dtype}, not {wanted}")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, whole_blocks=self.blocks)
