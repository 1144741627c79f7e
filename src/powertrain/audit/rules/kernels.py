"""Rules on attention kernels and torch.compile."""

from __future__ import annotations

from powertrain.audit.editing import removed, set_to
from powertrain.audit.resolved import changes_lengths, compile_mode, compile_seen, dtype_named, products_dtype, value
from powertrain.audit.rules.base import STARTS, Findings, found
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records.findings import UNMEASURED, Expected, rule

ATTENTION = "model.attn_implementation"
NEEDS = {"flash_attention_2": (8, 0), "flash_attention_3": (9, 0)}      # compute capability, from its README
RECOMPILE_LIMIT = 8          # torch._dynamo.config.recompile_limit
KERNEL = ("techniques.attention_kernel=on",)


@rule("technique: attention_kernel; features: F5 (memory falls to O(n); the arithmetic stays O(n^2)), F6")
def attention_eager(subject: Subject, where: Circumstances) -> Findings:
    """Attention writes all its scores to memory."""
    if subject.value(ATTENTION) != "eager":
        return
    model, here = where.model, ""
    if model is not None and where.data is not None:
        tokens = where.data.max_length or where.data.block
        here = f": {4 * model.heads * tokens**2 / 2**20:.0f} MiB a layer for one example of {tokens} tokens, in fp32"
    yield found("moderate", "Each head writes the scores of all tokens with all tokens, reads them for the softmax and keeps "
                f"them for the backward pass{here}", subject.settings[ATTENTION], breaking="low",
                expected=Expected("memory linear in the length instead of quadratic; how much faster depends on the length",
                "study: 2026-11-21_claims (002-01a, 002-02)"), words=KERNEL,
                cure='Use attn_implementation="sdpa", transformers\' default', edits=set_to(subject, ATTENTION, "sdpa"))


@rule("documentation: flash-attn (Ampere and newer, fp16 and bf16 only); features: F7, F8")
def flash_attention_unfit(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for FlashAttention where it cannot run."""
    asked = str(subject.value(ATTENTION))
    reason = _reason(subject, where, asked) if asked in NEEDS else ""
    if reason:
        yield found("critical", f"{reason}. transformers' default, sdpa, uses torch's own flash kernel if there is one",
                    subject.settings[ATTENTION], expected=STARTS, cure='Use attn_implementation="sdpa"',
                    edits=set_to(subject, ATTENTION, "sdpa"), words=KERNEL, title=f"{asked} cannot run here")


def _reason(subject: Subject, where: Circumstances, asked: str) -> str:
    hardware, software = where.hardware, where.software
    if hardware is not None and hardware.device != "cuda":
        return f"{hardware.name} is no NVIDIA GPU, and FlashAttention needs one"
    if hardware is not None and (hardware.compute_capability or (0, 0)) < NEEDS[asked]:
        return f"{hardware.name} has compute capability {hardware.compute_capability}, and {asked} needs {NEEDS[asked]}"
    if software is not None and asked == "flash_attention_2" and "flash_attn" in software.missing:
        return f"flash-attn cannot be used: {software.missing['flash_attn']}"
    if dtype_named(value(subject, "model.dtype")) == "fp32" or (
            products_dtype(subject) == "fp32" and dtype_named(value(subject, "model.dtype")) is None
            and "model.dtype" not in subject.unread):
        return "FlashAttention computes in fp16 and bf16 only, and this run in fp32"
    return ""


@rule("technique: torch_compile; features: X9; documentation: torch.compile (recompile_limit)",
      gives_way_to=("compile_quantised",))
def compile_changing_lengths(subject: Subject, where: Circumstances) -> Findings:
    """The model is compiled, and each batch has another shape."""
    seen = compile_seen(subject)
    if seen is None or not changes_lengths(subject, where):
        return
    mode = compile_mode(subject)
    graphs = "; a mode with CUDA graphs records one more for each shape" if mode is not None and mode.value in (
        "reduce-overhead", "max-autotune") else ""
    yield found("moderate", "Batches are as long as their longest example. torch compiles the graph again for new lengths, "
                f"then for any length, and after {RECOMPILE_LIMIT} times no more{graphs}", seen,
                None if mode is None or mode.evidence == seen else mode.evidence, expected=UNMEASURED, breaking="low",
                difficulty="medium", cure="Give all batches one length (examples cut from packed text), or do not compile",
                edits=set_to(subject, "training.torch_compile", False), words=("techniques.torch_compile=off",))


@rule("documentation: torch.compile (reduce-overhead is CUDA graphs)", gives_way_to=("compile_changing_lengths",))
def reduce_overhead_without_gpu(subject: Subject, where: Circumstances) -> Findings:
    """torch.compile's mode for CUDA graphs is used without CUDA."""
    mode, hardware = compile_mode(subject), where.hardware
    if mode is not None and mode.value == "reduce-overhead" and hardware is not None and hardware.device != "cuda":
        yield found("low", f"The mode records CUDA graphs; {hardware.name} has none, so this is the default mode", mode,
                    expected=Expected("none here: study 2026-11-21_claims, 000-16-speed, cannot tell it from no effect",
                    "study: 2026-11-21_claims"), cure="Leave the mode out on this machine",
                    edits=removed(subject, "training.torch_compile_mode"))
