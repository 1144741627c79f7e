"""Rules on the configs of Axolotl, LLaMA-Factory and torchtune."""

import re
from collections import Counter

from powertrain.audit.rules.base import Findings, found, known, rule
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records.findings import Evidence, Place

TEMPLATE = "tokenizer.chat_template"
TEMPLATES, FAMILIES = known("templates"), known("families")
MOVED = known("moved_components")
EVALUATING = ("training.eval_steps", "training.evals_per_epoch")


@rule
def template_of_other_model(subject: Subject, where: Circumstances) -> Findings:
    """The chat template is that of another family of models."""
    template, path = str(subject.value(TEMPLATE)), str(subject.value("model.path") or "").lower()
    own = TEMPLATES.get(template)
    others = [name for name in FAMILIES if name in path]
    if subject.framework == "llama-factory" and own and others and not any(name in path for name in own):
        yield found("critical", TEMPLATE, "model.path", template=template)


@rule
def data_given_twice(subject: Subject, where: Circumstances) -> Findings:
    """The same data is listed twice."""
    listed = subject.value("data.source")
    again = [name for name, times in Counter(map(str, listed)).items() if times > 1] if isinstance(listed, list) else []
    if subject.framework == "llama-factory" and again:
        yield found("moderate", "data.source", names=", ".join(again))


@rule
def placeholder_left(subject: Subject, where: Circumstances) -> Findings:
    """A path is still the placeholder of the example that the config was made from."""
    left = [setting for setting in subject.settings.values() if isinstance(setting.value, str) and "path/to/" in setting.value]
    if left and subject.script is None:
        yield found("critical", *left, path=left[0].value)


@rule
def components_moved(subject: Subject, where: Circumstances) -> Findings:
    """Components are named where torchtune no longer has them."""
    if subject.framework != "torchtune":
        return
    lines = subject.path.read_text(encoding="utf-8", errors="replace").splitlines()
    gone = [(number, name) for number, line in enumerate(lines, 1) for name in MOVED
            if re.search(rf"_component_:\s*[\"']?{re.escape(name)}", line)]
    if gone:
        names = ", ".join(f"{name.rstrip('.')}... (now {MOVED[name].rstrip('.')}...)" for name in {name: 0 for _, name in gone})
        yield found("critical", *(Evidence(lines[number - 1].strip(), Place(str(subject.path), number)) for number, _ in gone),
                    names=names)


@rule
def evaluation_never(subject: Subject, where: Circumstances) -> Findings:
    """Evaluations are asked for, and no data is held out for them."""
    asked = next((key for key in EVALUATING if subject.value(key)), None)
    others = any("test_datasets" in key for key in (*subject.settings, *subject.unknown, *subject.unread))
    held_out = subject.value("data.validation_share") or subject.is_unread("data.validation_share") or others
    if subject.framework == "axolotl" and asked is not None and not held_out:
        yield found("moderate", asked, subject.settings.get("data.validation_share"))


@rule
def format_gone(subject: Subject, where: Circumstances) -> Findings:
    """The data has a type that Axolotl no longer knows."""
    if subject.framework == "axolotl" and str(subject.value("data.format")).startswith("sharegpt"):
        yield found("critical", "data.format")
