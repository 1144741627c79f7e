"""Rules on what a script reads from the configs of its project."""

from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.scopes import is_tried
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records.findings import Evidence, Place


@code_rule_once
def key_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script reads a key that its config does not have."""
    for node, file, key in script.missing:
        if script.is_reached(node) and not is_tried(script, node):
            yield found("critical", node, Evidence(file.rpartition("/")[2], Place(file, 1)), key=key)


@code_rule
def number_is_text(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """PyYAML reads a number of the config as a text, because it has no dot before its exponent."""
    if script.texts:
        yield found("critical", *script.texts, names=", ".join(setting.name for setting in script.texts))
