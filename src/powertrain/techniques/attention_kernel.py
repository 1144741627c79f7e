"""Attention kernel: the same attention, by the library routine that is fastest for these shapes on this device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from powertrain.cost.fitting import longest_example
from powertrain.cost.precision import VARLEN_SINCE, unit_of
from powertrain.cost.workload import Workload, attention_of
from powertrain.models.kernels import build
from powertrain.records import Effect, NotApplied, Proposal, Refusal
from powertrain.shapes import gpu_attention
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique, name_of

KERNELS = ("math", "bmm", "ragged", "sdpa", "varlen")        # the function of each is NAME_attention, in models/kernels
# the step's time with bmm over that with sdpa, for documents of one length and of all lengths, and with ragged over bmm
CPU_STUDY, CPU_GAIN = "2026-11-21_cpu-attention-kernels", (0.79, 0.86)
LENGTHS_STUDY, LENGTHS_GAIN = "2026-11-21_ablation-docstrings", (0.76, 0.83)
RAGGED_STUDY, RAGGED_GAIN = "2026-11-22_cpu-ragged-attention", (0.75, 0.86)
SAVE_SCORES = ("math",)
COMPILE_S = 6.0              # guess: of the ragged kernel, once on a machine
VARLEN_TORCH = (2, 12)       # the first with fewer heads of keys and values than of queries
CUDNN_MAJORS = (9, 10)       # capabilities on which torch prefers cuDNN's kernel; on an H100 a step took 9 % less with it
VARLEN_WIDTH = 256           # of a head, at most, and a multiple of 8


@dataclass(frozen=True)
class AttentionKernel(Technique):
    """All kernels compute softmax(Q K^T / sqrt(d)) V inside each document, causally; they differ in what they store.

    Only `math` holds the T x T weights of a document, and no kernel has a mask over a whole batch. On a CPU the backward
    pass of `sdpa` is slow. `bmm` is faster: batched products over causal tiles, which compute the weights again. `ragged` does
    the same in C++, compiled once on a machine, without a copy, padding or a call for each length. On a GPU `sdpa` is the
    flash kernel, and `varlen` is the same for documents of all lengths at once.
    """

    kernel: str = "sdpa"

    name = "attention_kernel"
    does = "computes attention with the fastest kernel for these lengths"
    choices: ClassVar = {"kernel": KERNELS}
    native_only = True
    exactness = Exactness.ROUNDING
    touches = frozenset({"attention"})
    acts_on = frozenset({"attention"})
    slots = frozenset({"attention"})
    source = "Dao et al. 2022, arXiv:2205.14135 (flash attention); torch.nn.functional.scaled_dot_product_attention"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        data, device = run.data, run.hardware.device
        ragged = not data.of_one_length
        shown = f"documents of {data.block} tokens" + (f" on average and {longest_example(data)} at most" if ragged else "")
        if device == "cpu":
            study, (low, high) = (LENGTHS_STUDY, LENGTHS_GAIN) if ragged else (CPU_STUDY, CPU_GAIN)
            reason, cost = _why_no_ragged(run)
            if reason is None:
                gain = round(low * RAGGED_GAIN[0], 2), round(high * RAGGED_GAIN[1], 2)
                return cls("ragged").on(f"{shown}, whose causal tiles fit the CPU caches and need no copies; {cost}",
                                        Effect(gain, 0, basis=f"study: {RAGGED_STUDY}, times the gain of bmm in {study}"))
            return cls("bmm").on(f"{shown}, many {'of similar length ' if ragged else ''}in one product, in causal tiles that "
                                 f"fit the CPU caches; the ragged kernel is not used because {reason}",
                                 Effect((low, high), 0, basis=f"study: {study}"))
        claim = Effect((0.5, 0.95), 0, basis="guess: not measured yet", guessed=True)
        if not ragged:
            return cls("sdpa").on(f"{shown}, all of one length; {_by_torch(run)}", claim)
        if (reason := _why_no_varlen(run)) is not None:
            return cls("sdpa").on(f"{shown}, one call for each length; {_by_torch(run)}; the varlen kernel is not used because "
                                  f"{reason}", claim)
        return cls("varlen").on(f"{shown}: one FlashAttention call for all lengths, without a mask", claim)

    @classmethod
    def variants(cls, run: PlannedRun) -> Sequence[Technique | None]:
        """Return each kernel that can run here; None is without the technique, which runs `math`."""
        if run.model.provider != "native":
            return ()
        cannot = {"math", *(["varlen"] if _why_no_varlen(run) is not None else []),
                  *(["ragged"] if _never_ragged(run) is not None else [])}
        return None, *(cls(name) for name in KERNELS if name not in cannot)

    def compiles(self) -> bool:
        return self.kernel == "ragged"

    def build(self) -> None:
        if self.compiles():
            self.build_kernels((build.RAGGED,), "the ragged kernel", "techniques.attention_kernel.kernel=bmm needs no compiler",
                               replace(self, kernel="bmm"))

    def apply(self, setup: Setup) -> Setup:
        self.build()
        return replace(setup, attention=self._function())

    def _function(self) -> Any:
        from powertrain.models.kernels import attention

        return getattr(attention, f"{self.kernel}_attention")

    def confirm(self, setup: Setup) -> None:
        import torch

        from powertrain.models.kernels.attention import torch_falls_back

        dtype, config = setup.precision.compute_dtype, getattr(setup.model, "config", None)
        if setup.attention is not self._function():
            raise NotApplied(f"attention_kernel: attention runs by {name_of(setup.attention)}, not {self.kernel!r}")
        if self.kernel == "varlen" and dtype is torch.float32:
            raise NotApplied("attention_kernel: varlen attention needs bf16 or fp16, and the setup computes in fp32")
        if self.kernel == "sdpa" and config is not None:
            device = next(setup.model.parameters()).device
            if device.type == "cuda" and torch_falls_back(device, dtype, config.head_width, masked=config.window is not None):
                raise NotApplied(
                    f"attention_kernel: torch has no fused attention for {dtype} and heads of {config.head_width} on this GPU, "
                    "so sdpa would store the attention weights of all pairs of tokens, which the plan does not count; set "
                    "techniques.attention_kernel.kernel=math to go on with them")

    def reckon(self, workload: Workload) -> Workload:
        plain = self.kernel == "sdpa" and not workload.fused_attention
        return replace(workload, attention_saves_scores=plain or self.kernel in SAVE_SCORES, kernel=self.kernel)


def _never_ragged(run: PlannedRun) -> str | None:
    """Return why the ragged kernel cannot run here at all, or None."""
    dtype, missing = run.decided.dtype, run.software.missing
    if run.hardware.device != "cpu":
        return "it runs on CPUs only"
    if "c++ compiler" in missing:
        return f"there is no C++ compiler ({missing['c++ compiler']})"
    if dtype == "bf16" and unit_of(run.hardware, "bf16") is None:
        return "this CPU has no bf16 units"
    if dtype not in ("bf16", "fp32"):
        return f"it computes in bf16 or fp32, and this run in {dtype}"
    return f"it needs heads of an even width, and these have {run.model.head_width}" if run.model.head_width % 2 else None


def _why_no_ragged(run: PlannedRun) -> tuple[str | None, str]:
    """Return why the ragged kernel is not used here, or None; and the cost of compiling the kernel. Nothing is compiled."""
    if (reason := _never_ragged(run)) is not None:
        return reason, ""
    if build.is_built(build.RAGGED):
        return None, "the kernel is compiled already"
    pays, shown = run.bargain(RAGGED_GAIN, COMPILE_S)
    if not pays:
        return shown, ""
    return None, f"the kernel will be compiled as the run starts, in about {COMPILE_S:.0f} s"


def _by_torch(run: PlannedRun) -> str:
    """Return a clause: which of torch's attention kernels runs on this GPU."""
    model, fused = run.model, attention_of(run.hardware)
    masked = model.window is not None and model.window < longest_example(run.data)
    nbytes = 4 if run.decided.dtype == "fp32" else 2
    kernel = gpu_attention(fused, nbytes, model.head_width, masked=masked)
    if kernel == "flash":
        cudnn = (run.hardware.compute_capability or (0, 0))[0] in CUDNN_MAJORS
        return "cuDNN's flash kernel runs, or torch's where cuDNN is older" if cudnn else "torch's flash kernel runs"
    where = "on MPS" if run.hardware.device == "mps" else f"for heads of {model.head_width} in {run.decided.dtype} on this GPU"
    if kernel == "math":
        return f"torch has no fused attention {where}, so the attention weights of all pairs of tokens are stored"
    why = "a sliding window needs a mask" if masked else "it computes in fp32" if nbytes == 4 else "flash needs a newer GPU"
    repeated = "; keys and values are repeated for each query head" if model.kv_heads < model.heads else ""
    return f"torch's memory-efficient kernel runs, because {why}{repeated}"


def _why_no_varlen(run: PlannedRun) -> str | None:
    """Return why FlashAttention over documents of any lengths cannot run here, or None."""
    model, capability, dtype = run.model, run.hardware.compute_capability, run.decided.dtype
    if run.hardware.device != "cuda" or capability is None or capability < VARLEN_SINCE:
        return f"it needs an NVIDIA GPU of compute capability {VARLEN_SINCE[0]}.{VARLEN_SINCE[1]} or higher"
    if dtype not in ("bf16", "fp16"):
        return f"it needs bf16 or fp16, and this run computes in {dtype}"
    if model.dropout:
        return f"it has no dropout, and model.dropout is {model.dropout:g}"
    if model.head_width > VARLEN_WIDTH or model.head_width % 8:
        return f"it needs heads whose width is a multiple of 8 up to {VARLEN_WIDTH}, and these have {model.head_width}"
    found, needed = run.software.versions.get("torch", ""), ".".join(map(str, VARLEN_TORCH))
    is_new = run.software.release("torch") >= VARLEN_TORCH
    return None if is_new else f"it needs torch {needed} or newer, and this is torch {found}"
