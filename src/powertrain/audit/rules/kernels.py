"""Rules on attention kernels and torch.compile."""

from __future__ import annotations

from powertrain.audit.edits import removed, set_to
from powertrain.audit.rules.base import Findings, found, rule
from powertrain.audit.subject import Circumstances, Subject

ATTENTION, MODE = "model.attn_implementation", "training.torch_compile_mode"
NEEDS = {"flash_attention_2": (8, 0), "flash_attention_3": (9, 0)}      # compute capability, from its README
RECOMPILE_LIMIT = 8          # torch._dynamo.config.recompile_limit


@rule("technique: attention_kernel; features: F5 (memory falls to O(n); the arithmetic stays O(n^2)), F6")
def attention_eager(subject: Subject, where: Circumstances) -> Findings:
    """Attention writes all its scores to memory."""
    if subject.value(ATTENTION) == "eager":
        tokens = where.data.max_length or where.data.block if where.data is not None else None
        scores_mib = 4 * where.model.heads * tokens**2 / 2**20 if where.model is not None and tokens is not None else None
        yield found("moderate", subject.settings[ATTENTION], edits=set_to(subject, ATTENTION, "sdpa"), tokens=tokens,
                    scores_mib=scores_mib)


@rule("documentation: flash-attn (Ampere and newer, fp16 and bf16 only); features: F7, F8")
def flash_attention_unfit(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for FlashAttention where it cannot run."""
    asked = str(subject.value(ATTENTION))
    reason = _reason(subject, where, asked) if asked in NEEDS else ""
    if reason:
        yield found("critical", subject.settings[ATTENTION], edits=set_to(subject, ATTENTION, "sdpa"), asked=asked,
                    reason=reason)


def _reason(subject: Subject, where: Circumstances, asked: str) -> str:
    hardware, software = where.hardware, where.software
    if hardware is not None and hardware.device != "cuda":
        return f"{hardware.name} is no NVIDIA GPU, and FlashAttention needs one"
    if hardware is not None and (hardware.compute_capability or (0, 0)) < NEEDS[asked]:
        return f"{hardware.name} has compute capability {hardware.compute_capability}, and {asked} needs {NEEDS[asked]}"
    if software is not None and asked == "flash_attention_2" and "flash_attn" in software.missing:
        return f"flash-attn cannot be used: {software.missing['flash_attn']}"
    weights = subject.weights_dtype
    plain = subject.products_dtype == "fp32" and weights is None and "model.dtype" not in subject.unread
    return "FlashAttention computes in fp16 and bf16 only, and this run in fp32" if weights == "fp32" or plain else ""


@rule("technique: torch_compile; features: X9; documentation: torch.compile (recompile_limit)",
      gives_way_to=("compile_quantised",))
def compile_changing_lengths(subject: Subject, where: Circumstances) -> Findings:
    """The model is compiled, and each batch has another shape."""
    asked, mode = subject.compiles, subject.settings.get(MODE)
    if asked is not None and subject.changes_lengths(where.data):
        yield found("moderate", asked, None if mode == asked else mode, limit=RECOMPILE_LIMIT,
                    edits=set_to(subject, "training.torch_compile", False),
                    graphs=mode is not None and mode.value in ("reduce-overhead", "max-autotune"))


@rule("documentation: torch.compile (reduce-overhead is CUDA graphs)", gives_way_to=("compile_changing_lengths",))
def reduce_overhead_without_gpu(subject: Subject, where: Circumstances) -> Findings:
    """torch.compile's mode for CUDA graphs is used without CUDA."""
    if subject.value(MODE) == "reduce-overhead" and where.hardware is not None and where.hardware.device != "cuda":
        yield found("low", subject.settings[MODE], edits=removed(subject, MODE), name=where.hardware.name)
