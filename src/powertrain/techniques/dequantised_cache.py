"""Dequantised cache: as many blocks of a 4-bit base as fit are made whole once, and not for each product."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from powertrain.cost.fitting import total_bytes
from powertrain.records import NotApplied, Proposal, Refusal, Why
from powertrain.shapes import DTYPE_BYTES, FOUR_BIT
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique

ROOM = 0.4                   # share of the free memory that plan and cache together may take: passes want the rest


@dataclass(frozen=True)
class DequantisedCache(Technique):
    """A 4-bit weight is dequantised for its product, and again for the gradient of its input; each time all its bytes move.

    Dequantised once and kept, a weight costs two bytes more (in bf16), and products have the same inputs. The last blocks are
    kept, because they always have a backward pass.
    """

    blocks: int = 1

    name = "dequantised_cache"
    does = "keeps some 4-bit blocks unpacked"
    needs_whole_weights = True
    decides_by: ClassVar = {"whole_blocks": "blocks"}
    native_only = True
    exactness = Exactness.BITWISE
    touches = frozenset({"runtime"})
    acts_on = frozenset({"products", "elementwise"})
    source = "Dettmers et al. 2023, arXiv:2305.14314 (QLoRA)"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        model = run.model
        if model.frozen_dtype not in FOUR_BIT or not model.adapter_parameters:
            return cls.refuse(Why.DOES_NOT_APPLY, "no weight is in 4 bits")
        each_bytes = DTYPE_BYTES[run.decided.dtype] * model.matmul_parameters // model.layers
        room_bytes = int(ROOM * run.hardware.free_memory_bytes) - total_bytes(model, run.one_example())
        fitting = min(model.layers, room_bytes // each_bytes)
        if fitting < 1:
            return cls.refuse(Why.NO_ROOM, f"a dequantised block takes {each_bytes / 2**20:,.1f} MiB, and beside a step of one "
                              f"example {max(0, room_bytes) / 2**20:,.1f} MiB are free for it",
                              numbers={"needed_bytes": each_bytes, "room_bytes": room_bytes})
        return cls.refuse(Why.NOT_MEASURED, f"{fitting} of {model.layers} blocks could be kept dequantised in "
                          f"{fitting * each_bytes / 2**20:,.1f} MiB, with the same results; the time saved is not measured yet",
                          cls(fitting), numbers={"needed_bytes": fitting * each_bytes})

    def apply(self, setup: Setup) -> Setup:
        from powertrain.models.kernels.quantised import keep_whole

        keep = partial(keep_whole, setup.model, self.blocks, setup.precision.compute_dtype)
        return replace(setup, runtime=(*setup.runtime, keep))

    def confirm(self, setup: Setup) -> None:
        from powertrain.models.kernels.quantised import whole_blocks

        dtype = setup.precision.compute_dtype
        found = whole_blocks(setup.model, dtype)
        wanted = min(self.blocks, len(list(setup.model.get_submodule("blocks").children())))
        if found != wanted:
            raise NotApplied(f"dequantised_cache: {found} blocks are kept dequantised in {dtype}, not {wanted}")
