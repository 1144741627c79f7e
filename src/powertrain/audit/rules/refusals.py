"""Rules on what the classes of transformers and TRL refuse, or take and leave undone: tables of known.yaml, with the settings.

A condition of a table is an expression of Python. Its names are settings of the training, set or by default; `lora__r` is one
of another section, and `trainer__data_collator` what the trainer is given. A value that is not known decides nothing.
"""

import ast
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from powertrain.audit.arithmetic import WRONG, apply_operator
from powertrain.audit.commands import commands
from powertrain.audit.installed import in_force
from powertrain.audit.rules.base import Findings, code_rule, found, known
from powertrain.audit.rules.names import REMOVED, of_unsloth
from powertrain.audit.scopes import is_tried
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Shown, Subject
from powertrain.audit.syntax import argument, hides_arguments, last_name

TABLES: Mapping[str, Mapping[str, Mapping[str, str]]] = known("refusals")
ALIKE: Mapping[str, Mapping[str, Any]] = known("refusal_defaults")
FIRST = {"model": 0, "args": 1, "data_collator": 2}          # of a trainer's arguments, those with a place
ENCODERS = tuple(f"{name}.from_pretrained" for name in (
    "AutoModelForSeq2SeqLM", "MarianMTModel", "EncoderDecoderModel", *(f"{name}ForConditionalGeneration" for name in (
        "transformers.T5", "MT5", "LongT5", "Bart", "Pegasus", "M2M100", "LED"))))
PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
GATHERED = ("from_list", "from_dict", "from_generator", "from_pandas", "list")        # which count the rows of a stream
SCORING = "ForSequenceClassification.from_pretrained"
TUNED = re.compile(r"tuned|reward|sst|nli|squad|emotion|toxic|senti")    # in names of models whose heads are trained
FRESH = known("lora_families")
IN_ONE = "started as one process"
FUNCTIONS: Mapping[str, Any] = {each.__name__: each for each in (isinstance, str, list, set, len)}


def is_base(path: object) -> bool:
    """Return whether a path is of a published model that surely has no trained head for scores."""
    name = str(path).lower()
    name = name if "/" in name else f"openai-community/{name}"
    return not TUNED.search(name) and any(re.fullmatch(form, name) for form in FRESH)


class _NotKnown(Exception):
    """A condition asks for a value that only a run would tell."""


class _Values(dict[str, Any]):
    """The values of a condition's names, looked up as they are asked for."""

    def __init__(self, script: Script, subject: Subject, kind: str) -> None:
        super().__init__()
        self.script, self.subject, self.kind = script, subject, kind
        self.seen: list[Shown] = []

    def __missing__(self, name: str) -> Any:
        section, _, own = name.rpartition("__")
        if section == "trainer":
            return self._given(own)
        if name in SEEN_IN_CODE:
            return SEEN_IN_CODE[name](self.script, self.subject)
        key = f"{section or 'training'}.{own}"
        setting = self.subject.settings.get(key)
        if self.subject.is_unread(key) if setting is None else setting.name in REMOVED:
            raise _NotKnown                  # an argument that is gone ends the run before
        self.seen += [setting] if setting is not None else []
        value = setting.value if setting is not None else self._default(key, own)
        if not isinstance(value, PLAIN):
            raise _NotKnown
        return value

    def _default(self, key: str, own: str) -> Any:
        default = self.subject.effective(key)
        of_kind = next((values[own] for kinds, values in ALIKE.items() if _fits(kinds, self.kind) and own in values), None)
        return of_kind if of_kind is not None else default

    def _given(self, name: str) -> Any:
        """Return what the trainer is given: a text or number as it is, True for another object, None for nothing."""
        trainer = self.script.sections.get("trainer")
        given = argument(trainer, name, FIRST.get(name)) if trainer is not None else None
        if trainer is None or (given is None and hides_arguments(trainer)):
            raise _NotKnown
        if given is None:
            return None
        values = (self.script.assigned(given) if isinstance(given, ast.Name) else []) or [given]
        if all(isinstance(value, ast.Constant) for value in values):
            said = {value.value for value in values if isinstance(value, ast.Constant)}
            if len(said) > 1:
                raise _NotKnown
            return next(iter(said), None)
        self.seen.append(given)
        sure = [value for value in values if isinstance(value, ast.Lambda | ast.ListComp | ast.Dict | ast.List) or (
            isinstance(value, ast.Call) and self._makes(value)) or last_name(value) in self.script.functions]
        if len(sure) < len(values) or any(self.script.conditions(value) for value in values if value is not given):
            raise _NotKnown
        return True

    def _makes(self, call: ast.Call) -> bool:
        """Return whether a call surely gives an object: one of a class, or of a library that is known."""
        return last_name(call.func)[:1].isupper() or self.script.name(call).startswith(("transformers.", "datasets.", "peft."))


def _streams(script: Script, subject: Subject) -> bool:
    """Return whether the trainer's data come as a stream, whose length nobody knows."""
    trainer = script.sections.get("trainer")
    data = argument(trainer, "train_dataset") if trainer is not None else None
    calls = [node for node in script.behind(data) if isinstance(node, ast.Call)] if data is not None else []
    asked = [argument(call, "streaming") for call in calls if script.name(call) == "datasets.load_dataset"]
    return bool(asked) and all(isinstance(each, ast.Constant) and each.value is True for each in asked) and not any(
        last_name(call.func) in GATHERED for call in calls)


def _has_only_text(script: Script, subject: Subject) -> bool:
    """Return whether the script makes rows of texts, and has no word of messages, prompts or completions."""
    texts = {node.value for node in script.every(ast.Constant) if isinstance(node.value, str)}
    keys = {getattr(key, "value", None) for node in script.every(ast.Dict) for key in node.keys}
    return "text" in keys and not texts & {"messages", "conversations", "prompt", "completion", "input_ids"}


def _is_encoder_decoder(script: Script, subject: Subject) -> bool:
    """Return whether the trainer's model reads by an encoder."""
    loads = script.sections.get("model")
    return loads is not None and script.name(loads).endswith(ENCODERS) and not script.conditions(loads)


def _resumes(script: Script, subject: Subject) -> bool:
    """Return whether the script itself hands on the checkpoint that its arguments name."""
    return any(item.arg == "resume_from_checkpoint" for call in script.calls(".train") for item in call.keywords) or any(
        node.attr == "resume_from_checkpoint" for node in script.every(ast.Attribute)) or any(
        call.args for call in script.calls(".train"))


def _scorer(script: Script, subject: Subject) -> str:
    """Return "causal" for a model that gives the next token, "base" for one whose head for scores is new; else ""."""
    loads = script.sections.get("model")
    if loads is None or hides_arguments(loads) or argument(loads, "config") is not None:
        return ""
    name = script.name(loads)
    fresh = name.endswith(SCORING) and is_base(subject.value("model.path"))
    return "causal" if name == "transformers.AutoModelForCausalLM.from_pretrained" else "base" if fresh else ""


def _decodes_plainly(script: Script, subject: Subject) -> bool:
    """Return whether the script decodes predictions, and its trainer is the one that generates none."""
    return subject.trainer == "transformers.Trainer" and script.has_call(".batch_decode")


def _adapts_before(script: Script, subject: Subject) -> bool:
    """Return whether the trainer's model has its adapters already."""
    trainer = script.sections.get("trainer")
    model = argument(trainer, "model", 0) if trainer is not None else None
    made = script.assigned(model) if model is not None else []
    return any(isinstance(value, ast.Call) and script.name(value) == "peft.get_peft_model" for value in made)


SEEN_IN_CODE: dict[str, Callable[[Script, Subject], Any]] = {
    "adapts_before": _adapts_before, "scorer": _scorer, "decodes_plainly": _decodes_plainly, "streams": _streams,
    "has_only_text": _has_only_text, "is_encoder_decoder": _is_encoder_decoder, "resumes": _resumes}


def kind_of(script: Script, subject: Subject) -> str:
    """Return the name of the library's trainer, of a class of the project's that of the one above: GRPOTrainer."""
    trainer, made = script.sections.get("trainer"), script.sections.get("training")
    name = subject.trainer
    for _ in range(len(script.classes)):
        own = script.classes.get(name)
        if own is None:
            break
        name = next((script.name(base) for base in own.bases if last_name(base).endswith("Trainer")), "")
    if trainer is None and made is not None and last_name(made.func).endswith(("Config", "Arguments")):
        name = script.name(made).removesuffix("Arguments").replace("Training", "Trainer").replace("Config", "Trainer")
    return name


def _fits(kinds: str, kind: str) -> bool:
    last = kind.rpartition(".")[2]
    return kinds == "any" or (kinds == "Trainer" and last.endswith("Trainer")) or (
        last.removesuffix("Trainer") in kinds.split("|"))


@code_rule
def arguments_clash(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trainer refuses a value of its arguments, or does not do what they say."""
    made, kind = script.sections.get("training"), kind_of(script, subject)
    if not in_force("transformers", where) or (made is not None and is_tried(script, made)):
        return
    for case, tables in TABLES.items():
        for kinds, conditions in tables.items():
            foreign = kinds not in ("any", "Trainer") and kind.startswith("trl.") and (
                of_unsloth(script) or not in_force("trl", where))
            other = kinds != "any" and subject.framework not in TRAINERS
            if not _fits(kinds, kind) or foreign or other or (case == "alone" and is_launched(script)):
                continue
            for condition, says in conditions.items():
                values = _Values(script, subject, kind)
                if _holds(condition, values):
                    seen = [each for at, each in enumerate(values.seen) if each not in values.seen[:at]]
                    seen = seen or [script.sections.get("trainer") or made]
                    yield found("moderate" if case == "moderate" else "critical", *seen, says=says, case=case,
                                only=IN_ONE if case == "alone" else "")


def is_launched(script: Script) -> bool:
    """Return whether a command of the project starts the script by a launcher, which may start several processes."""
    return any(name in word for command in commands(script) for word in command.starter
               for name in ("torchrun", "accelerate", "deepspeed", "distributed"))


def _holds(condition: str, values: _Values) -> bool:
    """Return whether a condition of the tables surely holds."""
    try:
        return bool(_value(ast.parse(condition, mode="eval").body, values))
    except (_NotKnown, *WRONG):
        return False


def _value(node: ast.expr, values: _Values) -> Any:
    """Return the value of a condition, or of a part of one, of the few kinds of expression that the tables have."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return FUNCTIONS[node.id] if node.id in FUNCTIONS else values[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, values) for item in node.elts]
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, values) else node.orelse, values)
    if isinstance(node, ast.BoolOp):
        for item in node.values:
            found = _value(item, values)
            if bool(found) == isinstance(node.op, ast.Or):
                break
        return found
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _value(node.operand, values)
    if isinstance(node, ast.BinOp):
        return apply_operator(type(node.op).__name__, _value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.Compare):
        sides = [_value(side, values) for side in (node.left, *node.comparators)]
        return all(apply_operator(type(sign).__name__, *pair) for sign, pair in zip(node.ops, pairwise(sides), strict=True))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return FUNCTIONS[node.func.id](*(_value(item, values) for item in node.args))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        return str(_value(node.func.value, values)).split()
    raise NotImplementedError(f"the tables of known.yaml have no {type(node).__name__}")
