"""fp16 matrix products with loss scaling, for GPUs that multiply no bf16 fast."""

from dataclasses import dataclass
from typing import ClassVar

from powertrain.cost.precision import GPU_SINCE, WORTH_IT, bf16_pays, gain_of, unit_of
from powertrain.records import Effect, Proposal, Refusal, Why
from powertrain.techniques.base import HalfPrecision, PlannedRun

STEPS_OVER_OVERFLOW = (2, 13)                # torch: since then fused updates on a Mac leave out what has overflowed


@dataclass(frozen=True)
class Fp16(HalfPrecision):
    """Matrix products run in fp16 under autocast; weights, optimizer, norms and softmax stay fp32.

    fp16 has 5 exponent bits: gradients under 6e-8 vanish and products over 65504 overflow. So the loss is multiplied by
    a scale before the backward pass and gradients are divided by it after; a step whose gradients overflowed is skipped
    and the scale halved. The scale is part of the checkpoint.
    """

    name = "fp16"
    decides: ClassVar = {"dtype": "fp16"}
    does = "multiplies matrices in float16, with loss scaling"
    needs_whole_weights = True
    torch_dtype = "float16"
    scales_loss = True
    acts_on = frozenset({"products", "attention", "loss", "elementwise", "optimizer"})
    source = "Micikevicius et al. 2018, arXiv:1710.03740; torch.amp.GradScaler"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        capability = run.hardware.compute_capability
        if run.hardware.architecture and (unit := unit_of(run.hardware, "fp16")) is not None:
            return cls.refuse(Why.NOT_NEEDED, f"the {unit} multiply bf16 as fast, without loss scaling", cls())
        if run.hardware.device == "mps":
            return cls._on_a_mac(run)
        if run.hardware.device != "cuda" or capability is None:
            return cls.refuse(Why.HARDWARE_LACKS, f"{run.hardware.name} has no fp16 matrix units; NVIDIA GPUs have them "
                                                  "from compute capability 7.0 on, AMD's since MI200 and RX 7000")
        found = "{}.{}".format(*capability)
        if capability >= GPU_SINCE["bf16"]:
            return cls.refuse(Why.NOT_NEEDED, f"this GPU (compute capability {found}) has bf16 at the same speed, without loss "
                                              "scaling", cls())
        if capability < GPU_SINCE["fp16"]:
            return cls.refuse(Why.HARDWARE_LACKS, f"this GPU (compute capability {found}) has no tensor cores; fp16 is faster "
                                                  "from 7.0 on")
        return cls().on(f"the tensor cores of this GPU (compute capability {found}) multiply fp16 and not bf16",
                        Effect((0.2, 0.7), 0, basis="guess: not measured yet", guessed=True))

    @classmethod
    def _on_a_mac(cls, run: PlannedRun) -> Proposal | Refusal:
        hardware = run.hardware
        if run.software.release("torch") < STEPS_OVER_OVERFLOW:
            return cls.refuse(Why.PART_MISSING, "on a Mac torch before 2.13 updates weights by gradients that have "
                              "overflowed (pytorch#186360)")
        unit, gain = unit_of(hardware, "fp16"), gain_of(hardware, "fp16")
        if unit is None or gain is None:
            return cls.refuse(Why.HARDWARE_LACKS, f"products in fp16 and fp32 are not both measured on this {hardware.name}; "
                              "`powertrain facts --measure` there measures them", cls())
        if bf16_pays(hardware):
            return cls.refuse(Why.NOT_NEEDED, f"bf16 is {gain_of(hardware, 'bf16'):.2f} times as fast as fp32 here, fp16 "
                              f"{gain:.2f} times, and bf16 needs no loss scaling", cls())
        if gain < WORTH_IT:
            return cls.refuse(Why.WOULD_NOT_PAY, f"fp16 is not faster on this machine: {gain:.2f} times the speed of fp32",
                              cls(), numbers={"gain": gain})
        return cls().on(f"{unit}, {gain:.2f} times as fast as fp32", Effect((1 / gain, (1 + 1 / gain) / 2), 0, basis=(
            "formula: fp32 over fp16 GEMM speed; the high end assumes half the step is other work")), numbers={"gain": gain})
