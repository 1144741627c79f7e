"""fp8 base: frozen weights in 8-bit floating point, multiplied as such."""

from dataclasses import dataclass

from powertrain.cost.precision import GPU_SINCE
from powertrain.records import Refusal, Why
from powertrain.techniques.base import InEightBits, PlannedRun

WITHOUT_SCALED_ROWS = ((12, 0), (12, 1))     # Blackwell's GeForce and workstation GPUs


@dataclass(frozen=True)
class Fp8Base(InEightBits):
    """Both products with a frozen matrix, forward and for the gradient of its input, are made of fp8 (e4m3) numbers.

    Ada and Hopper make twice as many of these as of bf16 ones, and a weight takes one byte. Every token has a scale of its
    own, in gradients too, so they need not e5m2's range and keep e4m3's third bit. Unlike int8, 3 bits round small and large
    numbers alike, so outliers harm less and everything else is rounded more. Weights are rounded once, not at each step.
    Adapters, norms, embedding and head stay as they are. This changes results slightly, so only a recipe turns it on.
    """

    name = "fp8_base"
    does = "stores and multiplies the frozen weights in 8-bit floats"
    needs_whole_weights = True
    stored = "fp8"
    units = "fp8 units; NVIDIA GPUs have them from compute capability {}.{} (Ada) on".format(*GPU_SINCE["fp8"])
    of_amd = ("8-bit floats of AMD's MI300 have another format than torch.float8_e4m3fn, and no one has tried those of other "
              "AMD GPUs here")
    rounded = "fp8 weights and inputs (3 bits of mantissa)"
    source = "Micikevicius et al. 2022, arXiv:2209.05433 (FP8 formats); torch._scaled_mm with a scale for each row"

    @classmethod
    def propose(cls, run: PlannedRun) -> Refusal:
        answer, dtype = super().propose(run), run.decided.dtype
        if answer.possible is not None and run.hardware.compute_capability in WITHOUT_SCALED_ROWS:
            return cls.refuse(Why.HARDWARE_LACKS, f"torch has no fp8 product with a scale for each row on {run.hardware.name} "
                              "(pytorch#192707)")
        if answer.possible is None or dtype == "bf16":
            return answer
        return cls.refuse(Why.CONFLICT, f"fp8 products give bf16 results, and this run computes in {dtype}", rival=dtype)
