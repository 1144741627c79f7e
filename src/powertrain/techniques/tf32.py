"""TF32: let tensor cores multiply fp32 matrices, rounding their inputs to 10 bits of mantissa."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from powertrain.cost.precision import unit_of
from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique


@dataclass(frozen=True)
class Tf32(Technique):
    """TF32 changes fp32 products only. Under bf16 or fp16 no fp32 products are left, so the three share a slot."""

    name = "tf32"
    does = "multiplies float32 matrices on tensor cores"
    decides: ClassVar = {"dtype": "tf32"}
    exactness = Exactness.ROUNDING
    touches = frozenset({"runtime"})
    acts_on = frozenset({"products", "attention", "loss"})
    slots = frozenset({"precision"})
    source = "PyTorch notes on CUDA semantics, TensorFloat-32; torch.set_float32_matmul_precision"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        capability = run.hardware.compute_capability
        if run.hardware.architecture:
            return cls.refuse(Why.HARDWARE_LACKS, "no one has tried TF32 on an AMD GPU here")
        if run.hardware.device != "cuda" or capability is None:
            return cls.refuse(Why.HARDWARE_LACKS, f"{run.hardware.name} has no TF32 units; NVIDIA GPUs have them since "
                                                  "Ampere")
        found = f"compute capability {capability[0]}.{capability[1]}"
        if unit_of(run.hardware, "tf32") is None:
            return cls.refuse(Why.HARDWARE_LACKS, f"this GPU ({found}) has no TF32 units; GPUs have them from 8.0 on")
        if (dtype := run.decided.dtype) != "fp32":
            return cls.refuse(Why.NOT_NEEDED, f"products are computed in {dtype}, so no fp32 products are left", cls(),
                              rival=dtype)
        return cls().on(f"this GPU ({found}) has TF32 units",
                        Effect((0.3, 0.95), 0, basis="guess: not measured yet", guessed=True))

    def apply(self, setup: Setup) -> Setup:
        import torch

        # sets both of torch's switches; with the newer one alone, torch's compiler fails where it reads the older one
        allow = partial(torch.set_float32_matmul_precision, "high")
        return replace(setup, runtime=(*setup.runtime, allow))

    def confirm(self, setup: Setup) -> None:
        import torch

        found = torch.backends.cuda.matmul.fp32_precision
        if found != "tf32":
            raise NotApplied(f"tf32: fp32 products are computed in {found!r}")
        if setup.precision.compute_dtype is not torch.float32:
            raise NotApplied(f"tf32: no fp32 products are left under {setup.precision.compute_dtype}")
