"""Attention kernel: the same attention, by the library routine that is fastest for these shapes on this device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powertrain.models.attention import Attention, bmm_attention, math_attention, sdpa_attention, varlen_attention
from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

KERNELS: Mapping[str, Attention] = {
    "math": math_attention, "bmm": bmm_attention, "sdpa": sdpa_attention, "varlen": varlen_attention}
CPU_STUDY = "2026-11-21_cpu-attention-kernels"
SAVE_SCORES = ("math",)


@dataclass(frozen=True)
class AttentionKernel(Technique):
    """All kernels compute softmax(Q K^T / sqrt(d)) V inside each document, causally; they differ in what they store.

    None but `math` holds the T x T weights of a whole batch. On a CPU the backward pass of `sdpa` is slow, and batched
    products over causal tiles that compute the weights again (`bmm`) beat it; on a GPU `sdpa` is the flash kernel.
    """

    kernel: str = "sdpa"

    name = "attention_kernel"
    exactness = Exactness.ROUNDING
    touches = frozenset({"attention"})
    slot = "attention"
    source = "Dao et al. 2022, arXiv:2205.14135 (flash attention); torch.nn.functional.scaled_dot_product_attention"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"techniques.attention_kernel.kernel={self.kernel!r} is none of {', '.join(KERNELS)}")

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        block, device = facts.data.block, facts.hardware.device
        if device == "cpu":
            return Proposal(cls("bmm"), because=f"documents of {block} tokens: causal tiles that fit the caches, "
                                                "many documents in one product",
                            claim=Effect((0.79, 0.86), 0, basis=f"study: {CPU_STUDY}"))
        return Proposal(cls("sdpa"), because=f"documents of {block} tokens, all of one length: torch's flash kernels",
                        claim=Effect((0.5, 0.95), 0, basis="guess: not measured yet"))

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, attention=KERNELS[self.kernel])

    def confirm(self, setup: Setup) -> None:
        if setup.attention is not KERNELS[self.kernel]:
            raise NotApplied(f"attention_kernel: attention runs by {setup.attention!r}, not {self.kernel!r}")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, attention_saves_scores=self.kernel in SAVE_SCORES)
