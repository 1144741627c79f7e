"""Prompts trained like answers: labels that are a copy of prompt and answer together."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.editing import removed
from powertrain.audit.labels import is_copied
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Edit, Evidence, Finding, Risk

KEY = "training.assistant_only_loss"
ASKED = {"axolotl": "train_on_inputs", "llama-factory": "train_on_prompt"}       # how their configs ask for it
PROMPTS = frozenset({"instruction", "prompt", "question", "query", "document", "article", "context"})
ANSWERS = frozenset({"output", "response", "answer", "answers", "completion", "summary", "target", "chosen"})
MASKING = ("-100", "ignore_index", "CompletionOnly", "completion_only_loss", "assistant_only_loss", "train_on_responses_only",
           "loss_mask", "IGNORE")


class PromptsTrained(Rule):
    name = "prompts_trained"
    rests_on = "features: 2.2 and 5.2 (completion-only loss); documentation: TRL SFTConfig.completion_only_loss"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None:
            if subject.framework in ASKED and subject.value(KEY) is False and not _is_plain_text(subject):
                yield cls._finding(subject.settings[KEY].evidence, edits=removed(subject, KEY),
                                   says=f"Leave {ASKED[subject.framework]} at its default, false")
            return
        if any(word in script.text for word in MASKING):
            return
        copied = next((node for node in ast.walk(script.tree) if is_copied(script, node)), None)
        joined = next((node for node in ast.walk(script.tree) if _joins(node)), None)
        if copied is None and subject.framework == "trl" and subject.value("training.packing") is not True:
            copied = script.sections.get("training")
        if copied is not None and joined is not None:
            yield cls._finding(script.evidence(joined), script.evidence(copied), says="Give the prompt's tokens the label -100 "
                               "(TRL: columns `prompt` and `completion`, which it masks by itself)")

    @classmethod
    def _finding(cls, *seen: Evidence, says: str, edits: tuple[Edit, ...] = ()) -> Finding:
        return cls.found(
            "moderate", "prompts are trained like answers", "The labels are the whole text, prompt included: part of every "
            "update teaches the model to write questions, and with long prompts most of it", *seen, expected=NO_SPEED,
            risk=Risk("none", "low", "low"), cure=Cure(says, edits, ("data.format=auto",)))


def _is_plain_text(subject: Subject) -> bool:
    """Whether the data is text to go on with, which has no prompts."""
    return subject.value("training.stage") == "pt" or "completion" in str(subject.value("data.format"))


def _joins(node: ast.AST) -> bool:
    """Whether an expression puts a prompt and an answer into one text."""
    if not isinstance(node, (ast.JoinedStr, ast.BinOp, ast.Call)):
        return False
    if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Attribute) and node.func.attr == "format"):
        return False
    names = {str(item.slice.value) for item in ast.walk(node) if isinstance(item, ast.Subscript)
             and isinstance(item.slice, ast.Constant)}
    names |= {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    names |= {item.arg for item in ast.walk(node) if isinstance(item, ast.keyword) and item.arg}
    return bool(names & PROMPTS) and bool(names & ANSWERS)
