"""FlashAttention asked for where it cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import dtype_named, products_dtype, value
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

KEY = "model.attn_implementation"
NEEDS = {"flash_attention_2": (8, 0), "flash_attention_3": (9, 0)}      # compute capability, from its README


class FlashAttentionUnfit(Rule):
    name = "flash_attention_unfit"
    rests_on = "documentation: flash-attn (Ampere and newer, fp16 and bf16 only); features: F7, F8"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        asked = subject.value(KEY)
        if asked not in NEEDS:
            return
        reason = _reason(subject, where, str(asked))
        if reason:
            yield cls.found("critical", f"{asked} cannot run here", f"{reason}; transformers' default, sdpa, chooses a flash "
                            "kernel of torch's own where there is one",
                            subject.settings[KEY], expected=Expected("the run starts",
                                                                                                          "none"),
                            cure=Cure('Use attn_implementation="sdpa"', set_to(subject, KEY, "sdpa"),
                                      ("techniques.attention_kernel=on",)))


def _reason(subject: Subject, where: Circumstances, asked: str) -> str:
    hardware, software = where.hardware, where.software
    if hardware is not None and hardware.device != "cuda":
        return f"{hardware.name} is no NVIDIA GPU, and FlashAttention runs on nothing else"
    if hardware is not None and (hardware.compute_capability or (0, 0)) < NEEDS[asked]:
        return f"{hardware.name} has compute capability {hardware.compute_capability}, and it needs {NEEDS[asked]}"
    if software is not None and asked == "flash_attention_2" and "flash_attn" in software.missing:
        return f"flash-attn is not usable: {software.missing['flash_attn']}"
    if dtype_named(value(subject, "model.dtype")) == "fp32" or (
            products_dtype(subject) == "fp32" and dtype_named(value(subject, "model.dtype")) is None):
        return "it computes in fp16 and bf16 only, and this run in fp32"
    return ""
