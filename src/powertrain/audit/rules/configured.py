"""Rules on what a script reads from the configs of its project."""

import ast

from powertrain.audit.reading_calls import section_of
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.scopes import is_tried
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import last_name, names_in, parameters_of
from powertrain.audit.values import TextNumber
from powertrain.records.findings import Evidence, Place

UNSURE = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp)     # which may not come to it
CONVERTING = ("set_defaults", "add_implicit_resolver", "BaseModel", "float(self.")      # that make numbers of texts


@code_rule_once
def key_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script reads a key that its config does not have."""
    for node, file, key in script.missing:
        if script.is_reached(node) and not is_tried(script, node):
            yield found("critical", node, Evidence(file.rpartition("/")[2], Place(file, 1)), key=key)


@code_rule
def number_is_text(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """PyYAML reads a number of the config as a text, because it has no dot before its exponent."""
    lost = [setting for made in subject.calls if section_of(made) in ("training", "optimizer")
            for setting in made.named.values() if isinstance(setting.value, TextNumber)]
    if lost and not any(word in script.text for word in CONVERTING):
        yield found("critical", *lost, names=", ".join(setting.name for setting in lost))


@code_rule_once
def operands_refused(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A text and a number are added, subtracted or compared, which Python refuses."""
    clocks = [node for node in script.every(ast.BinOp) if isinstance(node.op, ast.Sub) and all(
        isinstance(side, ast.Call) and last_name(side.func) == "strftime" for side in (node.left, node.right))]
    for node in (*script.refused, *clocks):
        function = script.function(node)
        free = function is None or bool(script.callers(function)) or not names_in(node) & parameters_of(function)
        unsure = any(isinstance(each, UNSURE) for each in script.ancestors(node))
        if free and not unsure and script.is_reached(node) and not is_tried(script, node):
            yield found("critical", node)
