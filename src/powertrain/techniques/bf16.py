"""bf16 matrix products: half the bytes and the fast matrix units, with fp32's range."""

from dataclasses import dataclass
from typing import ClassVar

from powertrain.cost.precision import CPU_UNITS, GPU_SINCE, WORTH_IT, gain_of, unit_of
from powertrain.records import Effect, Hardware, Proposal, Refusal, Why
from powertrain.techniques.base import HalfPrecision, PlannedRun


@dataclass(frozen=True)
class Bf16(HalfPrecision):
    """Matrix products run in bf16 under autocast; trained weights, gradients, optimizer, norms and softmax stay fp32.

    bf16 keeps fp32's 8 exponent bits, so nothing overflows and no loss scaling is needed; it keeps 8 bits of mantissa,
    so each product is rounded to about 0.4 %. The update itself is applied to fp32 master weights, so small steps count.
    """

    name = "bf16"
    decides: ClassVar = {"dtype": "bf16"}
    does = "multiplies matrices in bfloat16"
    torch_dtype = "bfloat16"
    acts_on = frozenset({"products", "attention", "loss", "elementwise"})
    source = "Micikevicius et al. 2018, arXiv:1710.03740 (mixed precision); Kalamkar et al. 2019, arXiv:1905.12322 (bf16)"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        hardware, reason, gain = run.hardware, unit_of(run.hardware, "bf16"), gain_of(run.hardware, "bf16")
        if reason is None:
            return cls.refuse(Why.HARDWARE_LACKS, _why_not(hardware), cls() if hardware.device in ("cpu", "mps") else None)
        if gain is None:
            claim = Effect((0.3, 0.9), 0, basis="guess: the GEMM peaks of this machine are not measured yet", guessed=True)
            return cls().on(reason, claim)
        bf16, fp32 = (hardware.peak(dtype) / 1e12 for dtype in ("bf16", "fp32"))
        numbers = f"{hardware.basis}: bf16 {bf16:.3g} TFLOP/s, fp32 {fp32:.3g} TFLOP/s"
        if gain < WORTH_IT:
            return cls.refuse(Why.WOULD_NOT_PAY, f"bf16 is not faster on this machine; {numbers}", cls(),
                              numbers={"gain": gain})
        claim = Effect((1 / gain, (1 + 1 / gain) / 2), 0,
                       basis="formula: fp32 over bf16 GEMM speed; the high end assumes half the step is other work")
        return cls().on(f"{reason}; {numbers}", claim, numbers={"gain": gain})


def _why_not(hardware: Hardware) -> str:
    if hardware.device == "cuda" and hardware.compute_capability:
        found = "{}.{}".format(*hardware.compute_capability)
        since = "{}.{}".format(*GPU_SINCE["bf16"])
        return f"this GPU (compute capability {found}) emulates bf16; GPUs compute it from {since} on"
    if hardware.architecture:
        return f"this GPU ({hardware.architecture}) has no matrix cores; AMD's GPUs have them since MI200 and RX 7000"
    if hardware.device == "cpu":
        gain = gain_of(hardware, "bf16")
        measured = "" if gain is None else f", measured at {gain:.2f} times the speed of fp32"
        return (f"{hardware.name} has none of {', '.join(CPU_UNITS['bf16'])}, so it would emulate bf16{measured}; products and "
                "saved activations stay fp32")
    return f"products in bf16 are not measured on this {hardware.name}; `powertrain facts --measure` there measures them"
