"""Attention kernel: the same attention, by the library routine that is fastest for these shapes on this device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from powertrain.cost.estimate import bargain
from powertrain.cost.fitting import longest_example
from powertrain.cost.precision import VARLEN_SINCE, bf16_unit, planned_dtype
from powertrain.models.kernels.attention import (
    Attention,
    bmm_attention,
    find_varlen,
    math_attention,
    ragged_attention,
    sdpa_attention,
    varlen_attention,
)
from powertrain.models.kernels.ragged import build
from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

KERNELS: Mapping[str, Attention] = {
    "math": math_attention, "bmm": bmm_attention, "ragged": ragged_attention, "sdpa": sdpa_attention,
    "varlen": varlen_attention}
# the step's time with bmm over that with sdpa, for documents of one length and of all lengths, and with ragged over bmm
CPU_STUDY, CPU_GAIN = "2026-11-21_cpu-attention-kernels", (0.79, 0.86)
LENGTHS_STUDY, LENGTHS_GAIN = "2026-11-21_ablation-docstrings", (0.76, 0.83)
RAGGED_STUDY, RAGGED_GAIN = "2026-11-22_cpu-ragged-attention", (0.75, 0.86)
SAVE_SCORES = ("math",)
COMPILE_S = 6.0              # guess: of the ragged kernel, once on a machine
VARLEN_WIDTH = 256           # of a head, at most, and a multiple of 8


@dataclass(frozen=True)
class AttentionKernel(Technique):
    """All kernels compute softmax(Q K^T / sqrt(d)) V inside each document, causally; they differ in what they store.

    None but `math` holds the T x T weights of a document, and none has a mask over a whole batch. On a CPU the backward
    pass of `sdpa` is slow, and batched products over causal tiles that compute the weights again (`bmm`) beat it; `ragged`,
    in C++ that has to be compiled once on a machine, does the same without a copy, a filled-up document or a call for each
    length. On a GPU `sdpa` is the flash kernel, and `varlen` is the same for documents of all lengths at once.
    """

    kernel: str = "sdpa"

    name = "attention_kernel"
    does = "computes attention with the fastest kernel for these lengths"
    exactness = Exactness.ROUNDING
    touches = frozenset({"attention"})
    acts_on = frozenset({"attention"})
    slot = "attention"
    source = "Dao et al. 2022, arXiv:2205.14135 (flash attention); torch.nn.functional.scaled_dot_product_attention"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"techniques.attention_kernel.kernel={self.kernel!r} is none of {', '.join(KERNELS)}")

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        data, device = facts.data, facts.hardware.device
        if facts.model.provider != "native":
            return cls.refuse(f"the model is computed by {facts.model.provider}, with its own attention")
        ragged = data.kind != "blocks"
        shown = f"documents of {data.block} tokens" + (f" on average and {longest_example(data)} at most" if ragged else "")
        if device == "cpu":
            study, (low, high) = (LENGTHS_STUDY, LENGTHS_GAIN) if ragged else (CPU_STUDY, CPU_GAIN)
            reason, pays = _why_no_ragged(facts, recipe)
            if reason is None:
                because = f"{shown}, read where they lie, in causal tiles that fit the caches; {pays}"
                gain = round(low * RAGGED_GAIN[0], 2), round(high * RAGGED_GAIN[1], 2)
                return Proposal(cls("ragged"), because=because,
                                claim=Effect(gain, 0, basis=f"study: {RAGGED_STUDY}, times that of bmm in {study}"))
            return Proposal(cls("bmm"), because=f"{shown}: causal tiles that fit the caches, many documents "
                                                f"{'of similar length ' if ragged else ''}in one product; not our own kernel, "
                                                f"because {reason}",
                            claim=Effect((low, high), 0, basis=f"study: {study}"))
        claim = Effect((0.5, 0.95), 0, basis="guess: not measured yet")
        if not ragged:
            return Proposal(cls("sdpa"), because=f"{shown}, all of one length: torch's flash kernels", claim=claim)
        if (reason := _why_no_varlen(facts, recipe)) is not None:
            return Proposal(cls("sdpa"), because=f"{shown}: a call for each length that occurs; no kernel for all lengths at "
                                                 f"once, because {reason}", claim=claim)
        return Proposal(cls("varlen"), because=f"{shown}: one FlashAttention call for all lengths, without a mask", claim=claim)

    @classmethod
    def variants(cls, facts: Facts, recipe: Recipe) -> Sequence[Technique | None]:
        """`math` is what runs without it."""
        if facts.model.provider != "native":
            return ()
        cannot = {"math", *(["varlen"] if _why_no_varlen(facts, recipe) is not None else []),
                  *(["ragged"] if _never_ragged(facts, recipe) is not None else [])}
        return None, *(cls(name) for name in KERNELS if name not in cannot)

    def apply(self, setup: Setup) -> Setup:
        if self.kernel == "ragged":
            try:
                build.load()
            except build.CannotBuild as error:
                raise NotApplied(f"attention_kernel: the ragged kernel could not be compiled: {error}; "
                                 "techniques.attention_kernel.kernel=bmm needs no compiler") from None
        return replace(setup, attention=KERNELS[self.kernel])

    def confirm(self, setup: Setup) -> None:
        if setup.attention is not KERNELS[self.kernel]:
            raise NotApplied(f"attention_kernel: attention runs by {setup.attention!r}, not {self.kernel!r}")
        if self.kernel == "varlen" and setup.precision.compute_dtype is torch.float32:
            raise NotApplied("attention_kernel: varlen attention needs bf16 or fp16, and the setup computes in fp32")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, attention_saves_scores=self.kernel in SAVE_SCORES, kernel=self.kernel)


def _never_ragged(facts: Facts, recipe: Recipe) -> str | None:
    """What keeps our own kernel from running here at all, or None."""
    dtype, missing = planned_dtype(facts.hardware, recipe.techniques), facts.software.missing
    if facts.hardware.device != "cpu":
        return "it is for CPUs"
    if "c++ compiler" in missing:
        return f"compiling it needs the part 'c++ compiler', which is {missing['c++ compiler']}"
    if dtype == "bf16" and bf16_unit(facts.hardware) is None:
        return "this CPU multiplies no bf16"
    if dtype not in ("bf16", "fp32"):
        return f"it computes in bf16 and fp32, and products are computed in {dtype}"
    return f"it takes heads of an even width, not of {facts.model.head_width}" if facts.model.head_width % 2 else None


def _why_no_ragged(facts: Facts, recipe: Recipe) -> tuple[str | None, str]:
    """What keeps our own kernel from running here, or None; and what its compiling costs."""
    if (reason := _never_ragged(facts, recipe)) is not None:
        return reason, ""
    if build.is_built():
        return None, "the kernel is compiled already"
    found = bargain(facts, RAGGED_GAIN, COMPILE_S, train_time_s=recipe.train_time_s, max_steps=recipe.max_steps,
                    epochs=recipe.num_train_epochs)
    if not found.pays:
        return found.shown, ""
    try:
        build.load()                         # now, so that a compiler that fails costs the kernel and not the run
    except build.CannotBuild as error:
        return f"it could not be compiled: {error}", ""
    return None, found.shown


def _why_no_varlen(facts: Facts, recipe: Recipe) -> str | None:
    """What keeps FlashAttention over documents of any lengths from running here, or None."""
    model, capability = facts.model, facts.hardware.compute_capability
    dtype = planned_dtype(facts.hardware, recipe.techniques)
    if facts.hardware.device != "cuda" or capability is None or capability < VARLEN_SINCE:
        return f"it needs an NVIDIA GPU of compute capability {VARLEN_SINCE[0]}.{VARLEN_SINCE[1]} or higher"
    if dtype not in ("bf16", "fp16"):
        return f"it needs bf16 or fp16, and products are computed in {dtype}"
    if model.dropout:
        return f"it cannot drop attention weights, and dropout is {model.dropout:g}"
    if model.head_width > VARLEN_WIDTH or model.head_width % 8:
        return f"heads of {model.head_width} are no multiple of 8 up to {VARLEN_WIDTH}"
    return None if find_varlen() is not None else f"torch {torch.__version__} does not have it"
