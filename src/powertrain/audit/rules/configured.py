"""Rules on what a script reads from the configs of its project."""

from powertrain.audit.reading_calls import section_of
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.scopes import is_tried
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.values import TextNumber
from powertrain.records.findings import Evidence, Place

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
