"""Blocks run by hand without a compiler, for tests of what goes on around them or inside: a tenth of the time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from powertrain.models.decoder import Block, Decoder
from powertrain.models.kernels.fused.block import Functions, HandWritten
from powertrain.models.kernels.fused.parts import Parts
from powertrain.records import NotApplied
from powertrain.techniques.fused_blocks import ByHand, FusedBlocks
from powertrain.training.setup import Setup


@dataclass(frozen=True)
class NotCompiled(FusedBlocks):
    """FusedBlocks with its parts as they are."""

    def apply(self, setup: Setup) -> Setup:
        assert isinstance(setup.model, Decoder)
        functions = Functions.of(Parts(setup.model.config))
        blocks = tuple(HandWritten(block, functions) for block in setup.model.blocks if isinstance(block, Block))
        return replace(setup, run_block=ByHand(blocks))

    def confirm(self, setup: Setup) -> None:
        """All else that FusedBlocks asks for is there."""
        with pytest.raises(NotApplied, match="nothing was compiled"):
            super().confirm(setup)
