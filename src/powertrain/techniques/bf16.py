"""bf16 matrix products: half the bytes and the fast matrix units, with fp32's range."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from powertrain.records import Effect, Facts, Hardware, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique
from powertrain.training.setup import Precision

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

NATIVE_SINCE = (8, 0)        # compute capability; torch.cuda.is_bf16_supported() also says yes where it is emulated
CPU_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
WORTH_IT = 1.2               # measured bf16 over fp32 below which conversions eat the gain


@dataclass(frozen=True)
class Bf16(Technique):
    """Matrix products run in bf16 under autocast; weights, gradients, optimizer, norms and softmax stay fp32.

    bf16 keeps fp32's 8 exponent bits, so nothing overflows and no loss scaling is needed; it keeps 8 bits of mantissa,
    so each product is rounded to about 0.4 %. The update itself is applied to fp32 master weights, so small steps count.
    """

    name = "bf16"
    exactness = Exactness.ROUNDING
    touches = frozenset({"precision"})
    slot = "precision"
    source = "Micikevicius et al. 2018, arXiv:1710.03740 (mixed precision); Kalamkar et al. 2019, arXiv:1905.12322 (bf16)"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        hardware = facts.hardware
        reason = _native_unit(hardware)
        if reason is None:
            return cls.refuse(_why_not(hardware), possible=cls() if hardware.device == "cpu" else None)
        measured = hardware.peak_flops_per_s
        if "bf16" not in measured or "fp32" not in measured:
            claim = Effect((0.3, 0.9), 0, basis="guess: the GEMM peaks of this machine are not measured yet")
            return Proposal(cls(), because=reason, claim=claim)
        ratio = measured["bf16"] / measured["fp32"]
        numbers = f"{measured['bf16'] / 1e12:.2f} against {measured['fp32'] / 1e12:.2f} TFLOP/s in fp32, measured"
        if ratio < WORTH_IT:
            return cls.refuse(f"bf16 products are no faster here: {numbers}", possible=cls())
        claim = Effect((1 / ratio, (1 + 1 / ratio) / 2), 0,
                       basis="formula: fp32 over bf16 GEMM speed; the high end if half the step is not matrix products")
        return Proposal(cls(), because=f"{reason}: {numbers}", claim=claim)

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, precision=Precision(torch.bfloat16))

    def confirm(self, setup: Setup) -> None:
        if (found := setup.product_dtype()) is not torch.bfloat16:
            raise NotApplied(f"bf16: matrix products come out in {found}")
        if (master := next(setup.model.parameters()).dtype) is not torch.float32:
            raise NotApplied(f"bf16: the master weights are {master}, not fp32")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, dtype="bf16")


def _native_unit(hardware: Hardware) -> str | None:
    """What multiplies bf16 here in hardware, or None."""
    if hardware.device == "cuda":
        capability = hardware.compute_capability
        return f"tensor cores of compute capability {capability[0]}.{capability[1]}" \
            if capability and capability >= NATIVE_SINCE else None
    if hardware.device == "cpu":
        return next((f"the CPU has {unit}" for unit in CPU_UNITS if unit in hardware.instructions), None)
    return None


def _why_not(hardware: Hardware) -> str:
    if hardware.device == "cuda" and hardware.compute_capability:
        found = "{}.{}".format(*hardware.compute_capability)
        return f"compute capability {found} only emulates bf16; it is native from 8.0 (Ampere) on"
    if hardware.device == "cpu":
        return f"{hardware.name} has none of {', '.join(CPU_UNITS)}: bf16 would be emulated"
    return f"not known to be faster on {hardware.device!r}"
