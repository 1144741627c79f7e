"""Labels moved by one in the data, for a model that moves them by one itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_text
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.script import Script
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Edit, Finding, Risk

MODELS = ("from_pretrained", "from_config", "ForCausalLM", "LMHeadModel")
LABELS = ("labels", "label", "targets", "target", "target_ids", "y")


class LabelsShiftedTwice(Rule):
    name = "labels_shifted_twice"
    rests_on = "documentation: transformers/loss/loss_utils.py, ForCausalLMLoss (shifts the labels); features: 4.4 and 5.2"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None:
            return
        shifted = next((node for node in ast.walk(script.tree) if _shifts_labels(script, node)), None)
        again = _shifts_too(script, subject.framework) if shifted is not None else None
        if shifted is not None and again is not None:
            yield cls.found(
                "critical", "labels are shifted twice", "The data moves the labels to the next token, and the loss moves them "
                "again: the model is trained to guess the token after the next one. Its loss falls all the same, and what it "
                "writes is broken", script.evidence(shifted), script.evidence(again), expected=NO_SPEED,
                risk=Risk("none", "none", "low"),
                cure=Cure("Give input_ids and labels the same tokens, and let the model shift them",
                          _unshifted(script, shifted)))


def _shifts_labels(script: Script, node: ast.AST) -> bool:
    """`"labels": ids[1:]` or `labels = ids[:, 1:]`, unless beside logits that lose their last: then that is the only shift."""
    name, value = _labels(node)
    if value is None or name not in LABELS or not any(_from_the_second(item) for item in ast.walk(value)):
        return False
    function = script.function(node)
    beside = [other for other in ast.walk(function or script.tree) if isinstance(other, ast.Subscript)]
    return not any("logits" in script.words(other) and _to_the_last(other) for other in beside)


def _labels(node: ast.AST) -> tuple[str, ast.AST | None]:
    """What a node gives to a name or key, if it does."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        if isinstance(target, ast.Name):
            return target.id, node.value
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            return str(target.slice.value), node.value
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "labels":
                return "labels", value
    return "", None


def _slice(node: ast.AST) -> ast.Slice | None:
    if not isinstance(node, ast.Subscript):
        return None
    last = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
    return last if isinstance(last, ast.Slice) else None


def _from_the_second(node: ast.AST) -> bool:
    """`x[1:]`, `x[:, 1:]`, `x[i + 1:i + n + 1]`."""
    found = _slice(node)
    if found is None or found.lower is None:
        return False
    if isinstance(found.lower, ast.Constant):
        return found.lower.value == 1
    return isinstance(found.lower, ast.BinOp) and isinstance(found.lower.op, ast.Add) and isinstance(
        found.lower.right, ast.Constant) and found.lower.right.value == 1 and found.upper is not None


def _to_the_last(node: ast.Subscript) -> bool:
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return any(isinstance(item, ast.Slice) and item.upper is not None and ast.unparse(item.upper) == "-1" for item in items)


def _shifts_too(script: Script, framework: str) -> ast.AST | None:
    """What moves the labels again: a model of transformers that is given labels, or logits that lose their last by hand."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Call) and script.is_made_by(node.func, *MODELS) and any(
                keyword.arg == "labels" or (keyword.arg is None and "batch" in script.words(keyword.value))
                for keyword in node.keywords):
            return node
        if (isinstance(node, ast.Subscript) and isinstance(node.value, (ast.Name, ast.Attribute))
                and "logits" in script.words(node.value) and _to_the_last(node)):
            return node
    trainers = ("transformers.Trainer", "transformers.trainer.Trainer")
    return next(script.calls(*trainers), None) if framework == "transformers" else None


def _unshifted(script: Script, shifted: ast.AST) -> tuple[Edit, ...]:
    """`{"input_ids": ids[:-1], "labels": ids[1:]}` with the same tokens in both."""
    if not isinstance(shifted, ast.Dict):
        return ()
    edits: list[Edit] = []
    for value in shifted.values:
        found = next((item for item in ast.walk(value) if _from_the_second(item) or (
            isinstance(item, ast.Subscript) and _to_the_last(item))), None)
        if isinstance(found, ast.Subscript) and not isinstance(found.slice, ast.Tuple):
            edits += with_text(script, found, script.words(found.value))
    return tuple(edits)
