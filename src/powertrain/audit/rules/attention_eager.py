"""Attention that writes all its scores to memory."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding, Risk

KEY = "model.attn_implementation"


class AttentionEager(Rule):
    name = "attention_eager"
    rests_on = "technique: attention_kernel; features: F5 (memory falls to O(n); the arithmetic stays O(n^2)), F6"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.value(KEY) != "eager":
            return
        model = where.model
        here = ""
        if model is not None and where.data is not None:
            tokens = where.data.max_length or where.data.block
            here = f": {4 * model.heads * tokens**2 / 2**20:.0f} MiB a layer for one example of {tokens} tokens here, in fp32"
        yield cls.found("moderate", "attention in its plain form", "Each head's scores, all tokens by all tokens, are "
                        f"written out, read for the softmax and kept for the backward pass{here}", subject.settings[KEY],
                        expected=Expected("memory linear in the length instead of quadratic; how much faster depends on the "
                                          "length",
                                          "study: 2026-11-21_claims (002-01a, 002-02)"), risk=Risk("low", "none", "low"),
                        cure=Cure('Use attn_implementation="sdpa", transformers\' default',
                                  set_to(subject, KEY, "sdpa"), ("techniques.attention_kernel=on",)))
