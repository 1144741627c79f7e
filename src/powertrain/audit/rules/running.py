"""Rules on plain Python that ends a run: names out of reach, arguments that are refused, attributes that are not there."""

import ast
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

from powertrain.audit.installed import gives, in_force, members, root
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, known
from powertrain.audit.rules.calls import object_of, of_library, own_class
from powertrain.audit.rules.elsewhere import gone_of_class
from powertrain.audit.rules.names import since
from powertrain.audit.rules.processes import RANKED
from powertrain.audit.scopes import (
    KNOWN,
    Scopes,
    bound_by,
    bound_names,
    given_to_others,
    is_annotation,
    is_open,
    is_tried,
    means,
    run_nodes,
    trees_of,
    used_before,
)
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, every, inside, last_name, parameters_of

GONE_OF_TOKENIZERS, GONE_FIELDS = (frozenset(known(name).split()) for name in ("gone_of_tokenizers", "gone_fields"))
NEVER_CALLED = frozenset(" ".join(known("never_called").values()).split())
# of tokenizers in plain Python, which models bring themselves
OF_PYTHON = ("build_inputs_with_special_tokens", "create_token_type_ids_from_sequences", "prepare_for_model")
OTHER_TOKENIZERS = ("tokenizers.", "sentencepiece.", "tiktoken.", "pytorch_pretrained_bert.", "pytorch_transformers.")
LOADED = ("MaskedLM.from_pretrained", "CausalLM.from_pretrained", "LMHeadModel.from_pretrained",
          "SequenceClassification.from_pretrained", "ConditionalGeneration.from_pretrained", "Seq2SeqLM.from_pretrained")
WRAPPERS = ("module", "isinstance", "parallel", "ddp", "dist", "world", "gpu")           # of tests whether a model is wrapped
LEAVING = (".to", ".cuda", ".train", ".eval", "get_peft_model")      # calls that give back their model
TOKENIZERS = "Tokenizer.from_pretrained"
# ends of the classes whose objects have what the class has
EXACT = ("Trainer", "Accelerator", "TrainingArguments", "ModelConfig")


@code_rule
def names_out_of_reach(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The code uses a name that only another function gives a value."""
    trees, reached = trees_of(script), set(run_nodes(script))
    for tree in trees:
        bound = bound_names(tree)
        guarded = any(module.tree is tree and "__main__" in module.text for module in script.modules)
        lost = [node for node in Scopes(tree).lost if node in reached and node.id in bound and node.id not in KNOWN
                and node.id not in script.unparsed and not is_tried(script, node)
                and not is_annotation(script, node)] if not guarded else []
        if lost:
            yield found("critical", *{node.id: node for node in reversed(lost)}.values(),
                        names=", ".join(dict.fromkeys(node.id for node in lost)))


@code_rule_once
def used_before_given(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A name is used above the line that first gives it a value."""
    trees, reached = trees_of(script), set(run_nodes(script))
    for tree in trees:
        for node, later in used_before(tree):
            if node in reached and node.id not in KNOWN and node.id not in script.unparsed and not is_tried(script, node):
                yield found("critical", node, later, name=node.id)


@code_rule_once
def given_on_one_process(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A name has a value on one process only, and all processes read it."""
    reached = set(run_nodes(script))
    for function in (node for node in reached if isinstance(node, FunctionNode)):
        nodes = list(inside(function))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        free = parameters_of(function)
        free |= {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
        leaves = any(isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break) and _of_one_process(script, node)
                     for node in nodes)
        other = {name for node in nodes for name in bound_by(node)}
        made = dict.fromkeys(node.id for node in names if not isinstance(node.ctx, ast.Load))
        for name in made if not leaves else ():
            stores = [node for node in names if node.id == name and not isinstance(node.ctx, ast.Load)]
            both = any(isinstance(around, ast.If) and any(script.is_within(node, each) for each in around.orelse)
                       for node in stores for around in script.ancestors(node))
            if both or name in free | other or not all(_of_one_process(script, node) for node in stores):
                continue
            read = next((node for node in names if node.id == name and isinstance(node.ctx, ast.Load)
                         and node.lineno > stores[0].lineno and not _of_one_process(script, node)
                         and not is_tried(script, node)), None)
            if read is not None:
                yield found("critical", read, stores[0], name=name)


def _of_one_process(script: Script, node: ast.AST) -> bool:
    """Return whether a node stands under a condition on the process's number."""
    tests = [around.test for around in script.ancestors(node) if isinstance(around, ast.If | ast.IfExp)]
    return any(word in script.words(test).lower() for test in tests for word in RANKED)


@code_rule_once
def rank_as_device(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The number of the process among all is taken for the number of its GPU."""
    if script.says("LOCAL_RANK", "local_rank", "local_process_index"):
        return
    for call in script.calls("torch.cuda.set_device", "torch.device", ".to"):
        whole = script.name(call) == "torch.cuda.set_device"
        if not call.args or not (whole or isinstance(call.args[0], ast.JoinedStr | ast.Name)):
            continue
        behind = script.behind(call.args[0])
        ranks = [node for node in behind if (isinstance(node, ast.Call) and last_name(node.func) == "get_rank") or (
            isinstance(node, ast.Constant) and node.value == "RANK")]
        divided = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in behind)
        if ranks and not divided:
            yield found("moderate", call, ranks[0])


@code_rule
def arguments_refused(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A call of the project's own function or class has other arguments than it takes."""
    project = _own(script)
    for call in run_nodes(script):
        own = project.called(call) if isinstance(call, ast.Call) else None
        if own is None or not isinstance(call, ast.Call) or is_tried(script, call) or any(
                isinstance(item, ast.Starred) for item in call.args):
            continue
        name, spec, bound = own
        names = [item.arg for item in (*spec.posonlyargs, *spec.args)][bound:]
        allowed = {*names, *(item.arg for item in spec.kwonlyargs)}
        refused = [str(item.arg) for item in call.keywords if item.arg and spec.kwarg is None and item.arg not in allowed]
        extra = len(call.args) > len(names) and spec.vararg is None
        required = names[len(call.args):max(len(call.args), len(names) - len(spec.defaults))]
        of_class = bound == 1 and isinstance(call.func, ast.Name)        # missing_arguments says it of functions
        lacks = [each for each in required if each not in {item.arg for item in call.keywords}] if of_class and all(
            item.arg for item in call.keywords) else []
        if refused or extra or lacks:
            said = f"does not take {', '.join(refused)}" if refused else f"needs {', '.join(lacks)}" if lacks else (
                f"takes {len(names)} arguments, and gets {len(call.args)}")
            yield found("critical", call.func, name=name, said=said)


class _Own:
    """The project's own functions and classes, as far as their names are bound once in the whole project."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.times: Counter[str] = Counter()             # how often each name is bound, by any statement but an import
        self.definitions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = {}
        for node in ast.walk(script.tree):
            if isinstance(node, FunctionNode | ast.ClassDef):
                self.times[node.name] += 1
                self.definitions[node.name] = node
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self.times[node.id] += 1
            elif isinstance(node, ast.arg):
                self.times[node.arg] += 1

    def called(self, call: ast.Call) -> tuple[str, ast.arguments, int] | None:
        """Return (name, arguments, how many of them are bound) of the function or class that a call surely means."""
        if isinstance(call.func, ast.Name):
            name, node = call.func.id, self.definition(call.func)
            if isinstance(node, ast.ClassDef):
                spec = self._made_with(node)
                return (name, spec, 1) if spec is not None else None
            return (name, node.args, 0) if node is not None and not node.decorator_list else None
        function = self.method(call)
        kind = self.script.parents.get(function) if function is not None else None
        if function is not None and isinstance(kind, ast.ClassDef) and not function.decorator_list and function.args.args[:1] \
                and function.args.args[0].arg == "self":
            return f"{kind.name}.{function.name}", function.args, 1
        return None

    def method(self, call: ast.Call) -> FunctionNode | None:
        """Return the method that a call surely means."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        plain = isinstance(owner, ast.Name) and (owner.id == "self" or len(self.script.kinds.get(owner.id, ())) == 1)
        function = self.script.called(call) if plain else None
        return function if function is not None and self.times[function.name] == 1 else None

    def definition(self, name: ast.Name) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
        """Return the only function or class of this name, where the name surely means it."""
        node = self.definitions.get(name.id) if self.times[name.id] == 1 else None
        return node if node is not None and means(self.script, name, node) else None

    def _made_with(self, kind: ast.ClassDef) -> ast.arguments | None:
        """Return the arguments of the `__init__` of a class, or of the nearest own class above it; None if not known."""
        if kind.decorator_list or kind.keywords or any(
                isinstance(item, FunctionNode) and item.name == "__new__" for item in kind.body):
            return None
        own = next((item for item in kind.body if isinstance(item, FunctionNode) and item.name == "__init__"), None)
        if own is not None:
            return own.args if not own.decorator_list else None
        first = kind.bases[0] if len(kind.bases) == 1 else None
        above = self.definition(first) if isinstance(first, ast.Name) else None
        return self._made_with(above) if isinstance(above, ast.ClassDef) and above is not kind else None


@lru_cache(maxsize=2)
def _own(script: Script) -> _Own:
    return _Own(script)


@code_rule
def unpacked_wrongly(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """As many names are filled from a function as it does not give back."""
    project = _own(script)
    for node in run_nodes(script):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        call = node.value if isinstance(node, ast.Assign) else None
        if not isinstance(target, ast.Tuple) or not isinstance(call, ast.Call) or any(
                isinstance(item, ast.Starred) for item in target.elts) or is_tried(script, node):
            continue
        function = project.definition(call.func) if isinstance(call.func, ast.Name) else project.method(call)
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            continue
        sizes = _returned(function)
        if sizes and len(target.elts) not in sizes:
            yield found("critical", target, function, name=function.name, asked=len(target.elts), given=max(sizes))


@code_rule_once
def outputs_unpacked(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The output of a model of transformers is unpacked, which gives the names of its parts."""
    if not in_force("transformers", where) or script.says("return_dict", "to_tuple", "torchscript"):
        return
    for node in run_nodes(script):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        call = node.value if isinstance(node, ast.Assign) else None
        kinds = script.kinds.get(last_name(call.func), frozenset()) if isinstance(call, ast.Call) else frozenset()
        of_theirs = bool(kinds) and all(kind.startswith("transformers.") and kind.endswith(LOADED) for kind in kinds)
        starred = isinstance(target, ast.Tuple) and any(isinstance(item, ast.Starred) for item in target.elts)
        if isinstance(target, ast.Tuple) and of_theirs and not starred and not is_tried(script, node):
            yield found("critical", node, names=script.words(target))


def _returned(function: ast.FunctionDef) -> set[int]:
    """Return the lengths of the tuples that a function gives back; none where it may give something else."""
    sizes = set[int]()
    for node in inside(function):
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return set()
        if isinstance(node, ast.Return):
            if not isinstance(node.value, ast.Tuple) or any(isinstance(item, ast.Starred) for item in node.value.elts):
                return set()
            sizes.add(len(node.value.elts))
    return sizes


def _file(script: Script, node: ast.AST) -> Path | None:
    module = script.module(node)
    return module.file if module is not None else None


@code_rule_once
def names_not_of_module(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A module of the project is asked for a name that it does not have."""
    trees = {module.file: module for module in script.modules if module.file.name != "__init__.py"}
    stored = {node.attr for node in every(ast.Attribute, script.tree) if isinstance(node.ctx, ast.Store)}
    imported = {}
    for (node, name), file in script.project.items():
        for item in getattr(node, "names", ()):
            if item.name == name and name not in sys.stdlib_module_names and file in trees and (item.asname or "." not in name):
                imported[_file(script, node), item.asname or item.name] = trees[file]
    times = _own(script).times
    for node in run_nodes(script):
        owner = node.value if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) else None
        module = imported.get((_file(script, node), owner.id)) if isinstance(owner, ast.Name) else None
        if module is None or not isinstance(node, ast.Attribute) or not isinstance(owner, ast.Name) or times[owner.id] \
                or module.file == _file(script, node):
            continue
        names = bound_names(module.tree)
        if not is_open(module.tree) and node.attr not in names | stored and not node.attr.startswith("__") \
                and "__getattr__" not in names and "__main__" not in module.text and not is_tried(script, node):
            yield found("critical", node, name=node.attr, module=module.path.name)


@code_rule
def attributes_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """An object is asked for an attribute that nothing gives it."""
    attributes = every(ast.Attribute, script.tree)
    given = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    given |= {str(node.value) for node in every(ast.Constant, script.tree)}
    given |= {name for kind in script.classes.values() for name in bound_names(ast.Module(kind.body, []))}
    if any(node.attr == "__dict__" for node in attributes) or any(
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
        kind = script.class_around(node)
        of_self = kind is not None and getattr(owner, "id", "") == "self"
        if kind is not None and of_self and kind not in kinds:
            kinds[kind] = _members(script, kind, where)
        has = kinds[kind] if kind is not None and of_self else None
        lacks = has is not None and node.attr not in has
        if (node.attr in given and not (lacks and node.attr in given_to_others(script, kind))) or (
                kind is not None and kind.name in mixed_in) or _is_elsewhere(script, node, kind):
            continue
        if isinstance(owner, ast.Attribute) and script.words(owner) == "self.args":
            ours = node.attr in GONE_FIELDS and in_force("transformers", where)
            if ours and kind is not None and _is_a_trainer(script, kind):
                lost[node.attr] = (node, "TrainingArguments")
        elif _lost_of_tokenizers(script, node, where):
            lost[node.attr] = (node, "the tokenizer")
        elif not isinstance(owner, ast.Name):
            continue
        elif owner.id == "self":
            if kind is not None and lacks:
                lost[node.attr] = (node, kind.name)
        elif owner.id in script.classes and owner.id not in script.shared_names and means(
                script, owner, script.classes[owner.id]):
            has = _members(script, script.classes[owner.id], where)
            if has is not None and node.attr not in has | frozenset(dir(type)):
                lost[node.attr] = (node, owner.id)
        elif _lost_of_library(script, owner, node.attr, where):
            lost[node.attr] = (node, owner.id)
    for name, (node, whose) in lost.items():
        if not _is_of_a_switch(script, node):
            yield found("critical", node, name=name, whose=whose)


def _is_of_a_switch(script: Script, node: ast.AST) -> bool:
    """Return whether code of a class only runs where an attribute of its object is on, or not None, which may never be."""
    function = script.function(node)
    asked = [test.test for test in script.conditions(node)]
    asked += [each.test for each in (function.body if function is not None else []) if isinstance(each, ast.If)
              and isinstance(each.body[-1], ast.Return) and "is None" in script.words(each.test) and each.lineno < getattr(
                  node, "lineno", 0)]
    if any(script.words(test.left if isinstance(test, ast.Compare) else test).startswith("self.") and not isinstance(
            test, ast.Call) for test in asked):
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
    if made and all(name in gone_of_class(each) for each in made):
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
