"""Padding trained like text: labels that are a copy of the tokens, with padding among them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.labels import is_copied
from powertrain.audit.resolved import examples_per_pass
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.rules.labels_shifted_twice import MODELS
from powertrain.audit.script import Script
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

TO_THE_LONGEST = (True, "longest")           # of a batch: of one example there is nothing to pad
LEFT_OUT = ("-100", "ignore_index", "IGNORE", "loss_mask")       # how a script takes padding out of the labels
OWN_LABELS = (".DataCollatorForLanguageModeling", ".DataCollatorForCompletionOnlyLM", ".SFTTrainer")     # made by themselves


class PaddingTrained(Rule):
    name = "padding_trained"
    rests_on = "documentation: torch.nn.CrossEntropyLoss (ignore_index is -100: every other label counts); features: F10"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script, padding = subject.script, subject.settings.get("data.padding")
        if script is None or padding is None or padding.value not in (*TO_THE_LONGEST, "max_length"):
            return
        if any(word in script.text for word in LEFT_OUT) or script.has_call(*OWN_LABELS):
            return
        if padding.value in TO_THE_LONGEST and examples_per_pass(subject) == 1:
            return
        copied = next((node for node in ast.walk(script.tree) if is_copied(script, node) or _gives(script, node)), None)
        if copied is not None:
            pad = subject.settings.get("tokenizer.pad_token")
            ends = ", which is the end of text here," if pad is not None and pad.value == "eos_token" else ""
            yield cls.found(
                "moderate", "padding is trained like text", "The labels are a copy of the tokens, and the loss counts all "
                f"labels but -100: it asks for the padding token{ends} after every example's end, of which short ones are "
                "full, and the loss that is shown falls as that is learned", script.evidence(copied), padding,
                expected=NO_SPEED, risk=Risk("none", "low", "low"),
                cure=Cure("Set the labels to -100 where the attention mask is 0: labels[attention_mask == 0] = -100"))


def _gives(script: Script, node: ast.AST) -> bool:
    """`model(input_ids, labels=input_ids)`: the same tokens as what is read and what is to be said."""
    if not isinstance(node, ast.Call) or not script.is_made_by(node.func, *MODELS):
        return False
    named = {keyword.arg: script.words(keyword.value) for keyword in node.keywords if keyword.arg}
    tokens = named.get("input_ids") or (script.words(node.args[0]) if node.args else "")
    return bool(tokens) and named.get("labels", "").removesuffix(".clone()") == tokens
