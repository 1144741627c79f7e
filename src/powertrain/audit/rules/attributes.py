"""Rules on attributes that an object does not have, or that hold something else since a release: of classes, of arguments."""

import ast

from powertrain.audit.commands import commands, project_files, text_of
from powertrain.audit.installed import gives, in_force, members, root
from powertrain.audit.rules.base import Findings, code_rule, found, known
from powertrain.audit.rules.calls import object_of, of_library, own_class
from powertrain.audit.rules.elsewhere import gone_of_objects, plain
from powertrain.audit.rules.names import since
from powertrain.audit.rules.processes import RANKED
from powertrain.audit.scopes import (
    bound_names,
    given_to_others,
    is_tried,
    means,
    names_of_class,
    run_nodes,
)
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, every, last_name, parameters_of

GONE_OF_TOKENIZERS, GONE_FIELDS = (frozenset(known(name).split()) for name in ("gone_of_tokenizers", "gone_fields"))
NEVER_CALLED = frozenset(" ".join(known("never_called").values()).split())
# of tokenizers in plain Python, which models bring themselves
OF_PYTHON = ("build_inputs_with_special_tokens", "create_token_type_ids_from_sequences", "prepare_for_model")
OTHER_TOKENIZERS = ("tokenizers.", "sentencepiece.", "tiktoken.", "pytorch_pretrained_bert.", "pytorch_transformers.")
WRAPPERS = ("module", "isinstance", "parallel", "ddp", "dist", "world", "gpu")           # of tests whether a model is wrapped
OF_SETTINGS = ("config", "cfg", "args")      # names of objects that no class of the project reads as `self`
LEAVING = (".to", ".cuda", ".train", ".eval", "get_peft_model")      # calls that give back their model
OF_OLD_VLLM = "llm_engine.model_executor"    # which stands in a process of its own since vLLM's V1 engine, but with these:
IN_PROCESS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V1", "external_launcher")
TOKENIZERS = "Tokenizer.from_pretrained"
# ends of the classes whose objects have what the class has
EXACT = ("Trainer", "Accelerator", "TrainingArguments", "ModelConfig")


@code_rule
def attributes_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """An object is asked for an attribute that nothing gives it."""
    attributes = every(ast.Attribute, script.tree)
    given = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    given |= {str(node.value) for node in every(ast.Constant, script.tree)}
    given |= {name for kind in script.classes.values() for name in names_of_class(kind)}
    if any(node.attr == "__dict__" and last_name(node.value) not in OF_SETTINGS for node in attributes) or any(
            len(call.args) > 1 and not isinstance(call.args[1], ast.Constant) for call in script.calls("setattr")):
        given |= bound_names(script.tree)
    # what is put beside another class has that one's attributes too
    mixed_in = {last_name(base) for each in every(ast.ClassDef, script.tree) if len(each.bases) > 1 for base in each.bases}
    kinds: dict[ast.ClassDef, frozenset[str] | None] = {}
    lost: dict[str, tuple[ast.Attribute, str]] = {}
    for node in run_nodes(script):
        owner = node.value if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) else None
        if not isinstance(node, ast.Attribute) or node.attr.startswith("__") or is_tried(script, node):
            continue
        if node.attr == "module" and isinstance(owner, ast.Name) and _is_plain_model(script, owner):
            lost[node.attr] = (node, owner.id)
        kind, name = script.class_around(node), getattr(owner, "id", "")
        named = script.classes[name] if isinstance(owner, ast.Name) and name in script.classes and (
            name not in script.shared_names) and means(script, owner, script.classes[name]) else None
        asked = kind if name == "self" else named
        if asked is not None and asked not in kinds:
            kinds[asked] = _members(script, asked, where)
        has = kinds[asked] if asked is not None else None
        lacks = has is not None and node.attr not in has | (frozenset(dir(type)) if asked is named else frozenset())
        if (node.attr in given and not (lacks and node.attr in given_to_others(script, asked))) or (
                kind is not None and kind.name in mixed_in) or _is_elsewhere(script, node, kind):
            continue
        if isinstance(owner, ast.Attribute) and script.words(owner) == "self.args":
            ours = node.attr in GONE_FIELDS and in_force("transformers", where)
            if ours and kind is not None and _is_a_trainer(script, kind):
                lost[node.attr] = (node, "TrainingArguments")
        elif isinstance(owner, ast.Attribute) and script.words(owner) == "self.trainer" and kind is not None and any(
                plain(script.name(base)).startswith("pytorch_lightning.") for base in kind.bases):
            if node.attr in gone_of_objects("pytorch_lightning.Trainer") and since(where) == "critical":
                lost[node.attr] = (node, "the Trainer of Lightning")
        elif script.words(node).endswith(OF_OLD_VLLM) and "vllm.LLM" in script.all_imported and since(where) == "critical":
            if not any(word in text_of(file) for file in project_files(script) for word in IN_PROCESS):
                lost[node.attr] = (node, script.words(node.value))
        elif _lost_of_tokenizers(script, node, where):
            lost[node.attr] = (node, "the tokenizer")
        elif not isinstance(owner, ast.Name):
            continue
        elif owner.id == "self":
            if kind is not None and lacks:
                lost[node.attr] = (node, kind.name)
        elif named is not None:
            if lacks:
                lost[node.attr] = (node, owner.id)
        elif _lost_of_library(script, owner, node.attr, where) or (node.attr in GONE_FIELDS and in_force(
                "transformers", where) and _holds_arguments(script, owner.id)):
            lost[node.attr] = (node, owner.id)
    for name, (node, whose) in lost.items():
        if not _is_of_a_switch(script, node):
            yield found("critical", node, name=name, whose=whose)


def _holds_arguments(script: Script, name: str) -> bool:
    """Return whether a name such as `training_args` only ever holds the arguments of transformers, whatever hands them on."""
    made = script.kinds.get(name, frozenset())
    return "train" in name and len(made) == 1 and all(
        each.startswith("transformers.") and each.endswith("TrainingArguments") for each in made)


@code_rule
def fields_changed(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A field of the arguments is read as an earlier release of transformers filled it: the process's rank, or a text."""
    if not in_force("transformers", where) or not subject.trainer:
        return
    given = any("deepspeed" in word or "distributed.launch" in word for command in commands(script) for word in command.starter)
    for test in (node for node in run_nodes(script) if isinstance(node, ast.If) and not given):
        needed = test.test.values if isinstance(test.test, ast.BoolOp) and isinstance(test.test.op, ast.And) else [test.test]
        saves = [call for call in every(ast.Call, ast.Module(test.body, [])) if "save" in last_name(call.func)]
        for each in needed if saves else ():
            left = (each.left, *script.assigned(each.left)) if isinstance(each, ast.Compare) else ()
            if script.words(each).endswith("== 0") and any(_is_field(script, node, "local_rank") for node in left):
                yield found("critical", each, saves[0], case="rank")
    for call in (node for node in run_nodes(script) if isinstance(node, ast.Call) and script.words(node.func) == "len"):
        asked = any(isinstance(around, ast.BoolOp) and isinstance(around.op, ast.And) and call not in ast.walk(around.values[0])
                    and "fsdp" in script.words(around.values[0]) for around in script.ancestors(call))
        if call.args and _is_field(script, call.args[0], "fsdp") and not asked and not is_tried(script, call):
            around = [each for each in script.conditions(call) if call not in ast.walk(each.test)]
            yield found("critical", call, case="fsdp", only=f"{script.words(around[0].test)} holds" if around else "")


def _is_field(script: Script, node: ast.AST, name: str) -> bool:
    """Return whether code reads a field of transformers' arguments: `training_args.fsdp`, `trainer.args.fsdp`."""
    return isinstance(node, ast.Attribute) and node.attr == name and (
        script.words(node.value) in ("trainer.args", "self.trainer.args") or _holds_arguments(script, last_name(node.value)))


def _is_of_a_switch(script: Script, node: ast.AST) -> bool:
    """Return whether code of a class only runs where an attribute of its object is on, or not None, which may never be."""
    function = script.function(node)
    asked = [test.test for test in script.conditions(node) if script.words(node) not in script.words(test.test)]
    asked += [each.test for each in (function.body if function is not None else []) if isinstance(each, ast.If)
              and isinstance(each.body[-1], ast.Return) and "is None" in script.words(each.test) and each.lineno < getattr(
                  node, "lineno", 0)]
    if any(script.words(test.left if isinstance(test, ast.Compare) else test).startswith("self.") and not isinstance(
            test, ast.Call) and not any(word in script.words(test).lower() for word in RANKED) for test in asked):
        return True
    callers = script.callers(function) if function is not None and script.class_around(function) is not None else []
    return bool(callers) and all(script.function(each) is not function and _is_of_a_switch(script, each) for each in callers)


def _is_elsewhere(script: Script, node: ast.Attribute, kind: ast.ClassDef | None) -> bool:
    """Return whether code runs on a condition alone, for another object, or never: in a method that TRL no longer calls."""
    around, function = script.parents.get(node), script.function(node)
    with_self = next((each for each in script.ancestors(node) if isinstance(each, FunctionNode)
                      and "self" in parameters_of(each)), None)
    foreign = kind is not None and with_self is not None and script.parents.get(with_self) is not kind
    uncalled = kind is not None and function is not None and function.name in NEVER_CALLED and _is_a_trainer(script, kind)
    return (isinstance(around, ast.IfExp) and node is not around.test) or foreign or uncalled


def _lost_of_tokenizers(script: Script, node: ast.Attribute, where: Circumstances) -> bool:
    """Return whether a tokenizer is asked for a method that no tokenizer of transformers, in the release in force, has."""
    if node.attr not in GONE_OF_TOKENIZERS or not last_name(node.value).endswith("tokenizer"):
        return False
    remote = node.attr in OF_PYTHON and script.says("trust_remote_code")
    others = remote or any("tokenizer" in name.lower() for name in script.classes) or any(
        name.startswith(OTHER_TOKENIZERS) for name in (*script.all_imported, *script.kinds.get(last_name(node.value), ())))
    theirs = any(name.startswith("transformers.") and "Tokenizer" in name for name in script.all_imported)
    return theirs and not others and in_force("transformers", where)


def _is_plain_model(script: Script, name: ast.Name) -> bool:
    """Return whether a name only ever holds a model as transformers loads it, without a wrapper that has a `module`."""
    stored = [node for node in every(ast.Name, script.tree) if node.id == name.id and not isinstance(node.ctx, ast.Load)]
    values = script.assigned(name)
    around = list(script.ancestors(name))
    given = any(isinstance(each, FunctionNode) and name.id in parameters_of(each) for each in around)
    asks = any(isinstance(each, ast.IfExp | ast.BoolOp | ast.While) or (isinstance(each, ast.If) and any(
        word in script.words(each.test).lower() for word in WRAPPERS)) for each in around)
    return len(stored) == len(values) > 0 and not given and not asks and all(
        script.name(value).endswith(("from_pretrained", *LEAVING)) for value in values)


def _is_a_trainer(script: Script, kind: ast.ClassDef) -> bool:
    """Return whether an own class derives from a Trainer of transformers or TRL alone, directly or through others."""
    above = own_class(script, kind.bases[0]) if len(kind.bases) == 1 else None
    names = [script.name(base) for base in kind.bases]
    return (len(names) == 1 and names[0].startswith(("transformers.", "trl.")) and names[0].endswith("Trainer")) or (
        above is not None and above is not kind and _is_a_trainer(script, above))


def _members(script: Script, kind: ast.ClassDef, where: Circumstances) -> frozenset[str] | None:
    """Return what the libraries' classes that an own class derives from have; None where one of them is not known."""
    has = frozenset(dir(object))
    if kind.decorator_list or kind.keywords or any(isinstance(item, FunctionNode) and item.name in (
            "__getattr__", "__getattribute__") for item in kind.body):
        return None
    for base in kind.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        own = next((each for each in every(ast.ClassDef, script.tree) if each.name == last_name(inner)),
                   None) if isinstance(inner, ast.Name) else None
        more = _members(script, own, where) if own is not None and own is not kind else members(
            of_library(script, inner, where))
        if more is None and script.name(inner) in ("abc.ABC", "object", "typing.Generic"):
            more = frozenset()
        if more is None:
            return None
        has |= more
    return has


def _lost_of_library(script: Script, owner: ast.Name, name: str, where: Circumstances) -> bool:
    """Return whether an object of a library is asked for what its class, in the release in force, does not have."""
    made = script.kinds.get(owner.id, frozenset())
    if made and all(name in gone_of_objects(each) for each in made):
        return since(where) == "critical"
    kind = object_of(script, owner, where)
    if kind is None:
        return False
    if any(made.endswith(TOKENIZERS) for made in script.kinds.get(owner.id, ())):
        remote = script.says("trust_remote_code", "add_tokens_method")
        return not remote and root("transformers") is not None and not gives("transformers", "tokenization_*.py", name) \
            and not gives("transformers", "models/*/tokenization_*.py", name)
    has = members(kind) if kind.node.name.endswith(EXACT) else None
    return has is not None and name not in has
