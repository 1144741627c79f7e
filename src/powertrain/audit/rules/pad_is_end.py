"""The end of text used for padding, where padding is kept out of the loss: the end is never learned."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.script import Script
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

COLLATOR = ("transformers.DataCollatorForLanguageModeling", "transformers.data.data_collator.DataCollatorForLanguageModeling")
OLD_TRAINER = ("tokenizer", "max_seq_length", "packing")     # arguments of SFTTrainer that TRL had while it used that collator


class PadIsEnd(Rule):
    name = "pad_is_end"
    rests_on = "features: F29; documentation: transformers #23530 (the collator takes every pad token out of the labels)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script, pad = subject.script, subject.settings.get("tokenizer.pad_token")
        if script is None or pad is None or pad.value != "eos_token":
            return
        masks = _masking(script)
        if masks is not None:
            yield cls.found(
                "critical", "the model never learns to stop", "Padding is the end-of-text token here, and what equals the "
                "padding token is taken out of the labels: so is the true end of every example. The trained model goes on "
                "writing until it is cut off", pad, script.evidence(masks), expected=NO_SPEED,
                risk=Risk("low", "none", "low"),
                cure=Cure("Give the tokenizer a padding token of its own (an unused or unknown token, or a new one with the "
                          "embeddings resized), or mask by attention_mask instead of by the token"))


def _masking(script: Script) -> ast.AST | None:
    """What keeps padding out of the loss by its token: transformers' collator, TRL while it used that, or the script."""
    for call in script.calls(*COLLATOR):
        given = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "mlm")]
        if any(isinstance(item, ast.Constant) and item.value is False for item in given):
            return call
    for call in script.calls("trl.SFTTrainer"):
        if any(keyword.arg in OLD_TRAINER for keyword in call.keywords):
            return call
    for node in ast.walk(script.tree):
        words = script.words(node) if isinstance(node, (ast.Assign, ast.Return, ast.Expr)) else ""
        if "-100" in words and ("pad_token_id" in words or "pad_id" in words):
            return node
    return None
