"""Rules on calls of the installed libraries: what they take and need, and what their objects are."""

import ast
import re
from collections.abc import Iterator, Sequence

from powertrain.audit.installed import LIBRARIES, Defined, defined, in_force, method, parameters, places, required
from powertrain.audit.reading_calls import OF_THE_CONFIG
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, known
from powertrain.audit.rules.elsewhere import gone_of_class, is_pinned, plain
from powertrain.audit.rules.labels import lacks, path_of_tokenizer
from powertrain.audit.rules.names import REMOVED, SINCE, UNSLOTH, is_guarded, is_taken_twice, of_unsloth, since
from powertrain.audit.scopes import run_nodes
from powertrain.audit.script import Script, Setting
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, argument, every, hides_arguments, last_name, owner_of, parameters_of, reads_of

# calls that open an object -> the class of what they give, or one that it derives from
OPENED = (("transformers", "Tokenizer.from_pretrained", "PreTrainedTokenizerBase"), ("peft", "get_peft_model", "PeftModel"),
          ("peft", "PeftModel.from_pretrained", "PeftModel"), ("transformers", "LM.from_pretrained", "PreTrainedModel"))
# what functions that are compiled, or not installed here, have to be given, as installed.required returns it
COMPILED = {f"torch.{name}": (("input", "dim"), frozenset[str]()) for name in ("softmax", "log_softmax")} | {
    f"torchmetrics.{name}": (("task",), frozenset[str]()) for name in known("need_task").split()}
BARE_T5 = frozenset(f"transformers.{name}Model.from_pretrained" for name in ("T5", "MT5", "UMT5", "LongT5"))
T5 = BARE_T5 | {name.replace("Model", "ForConditionalGeneration") for name in BARE_T5}
BEFORE = ("input_ids", "attention_mask")      # of what a T5 takes, before what its decoder reads
WRITTEN = frozenset({"decoder_input_ids", "decoder_inputs_embeds", "encoder_outputs"})
LAUNCHER = "accelerate.notebook_launcher"    # which needs num_processes, but not in a notebook of Colab or Kaggle
DTYPES = ("dtype", "torch_dtype", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
OF_TENSORS = ("shape", "ne", "eq", "size", "dim", "squeeze", "unsqueeze", "tolist", "cuda", "cpu", "clone", "repeat")
PARSED = ("parse_args_into_dataclasses", "parse_json_file", "parse_yaml_file", "parse_dict", "parse_args_and_config")
SAID_OF_KEYS = ("transformers.TrainingArguments", "trl.SFTConfig")       # whose unknown arguments unknown_keys says


def of_library(script: Script, node: ast.AST, where: Circumstances) -> Defined | None:
    """Return the class or function of a library that a name stands for, in the release in force."""
    module, _, name = script.name(node).rpartition(".")
    library = module.partition(".")[0]
    module = "trl" if module.startswith("trl.trainer.") else module      # of which trl takes its names
    ours = library in LIBRARIES and in_force(library, where) and not (library == "trl" and of_unsloth(script))
    return defined(module, name) if ours and not is_taken_twice(script, node) else None


@code_rule
def arguments_not_taken(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A call of a library has arguments that its release in force does not take."""
    said = {id(item) for section in ("training", "trainer") if section in script.sections
            for item in script.sections[section].keywords if item.arg in REMOVED or item.arg in OF_THE_CONFIG}
    unknown = {key.rpartition(".")[2] for key in subject.unknown}
    followed = {made.node for made in subject.calls}
    wrong: list[tuple[ast.AST | Setting, str, ast.Call]] = []
    for call in run_nodes(script):
        if not isinstance(call, ast.Call) or not (call.keywords or call.args) or is_guarded(script, call):
            continue
        if script.name(call).startswith("trl.") and of_unsloth(script):
            continue                         # which puts its own versions in their place
        if script.name(call.func).endswith(SAID_OF_KEYS) and (call in followed or "training" in script.sections):
            said |= {id(item) for item in call.keywords if item.arg in REMOVED or item.arg in unknown}
        called = _called(script, call, where)
        taken, name = parameters(called), plain(script.name(call))
        gone = gone_of_class(name) if since(where) == "critical" and not is_pinned(script, name.partition(".")[0]) else ()
        if taken is not None or gone:
            wrong += [(node, name, call) for node, name in passed(script, call)
                      if (name in gone if taken is None else name not in taken) and id(node) not in said
                      and not (is_guarded(script, node) if isinstance(node, ast.AST) else name in REMOVED or name in unknown)]
        order = places(called)
        if order is None or any(isinstance(item, ast.Starred) for item in call.args):
            continue
        if len(call.args) > len(order):
            wrong.append((call.args[len(order)], f"argument {len(order) + 1}", call))
        moved = [(item, f"{item.id} in the place of {name}", call) for item, name in zip(call.args, order, strict=False)
                 if isinstance(item, ast.Name) and item.id in order and item.id != name]
        wrong += moved if len(moved) > 2 else []             # in the order of an older release
    if wrong:
        says = ", ".join(dict.fromkeys(f"{name} of {last_name(call.func)}" for _, name, call in wrong))
        nodes = [node for node, _, _ in wrong]
        yield found("critical", *nodes, names=says, only=only_if(script, nodes))


@code_rule
def arguments_lacking(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A call of a library lacks an argument that it has to have."""
    for call in run_nodes(script):
        if not isinstance(call, ast.Call) or is_guarded(script, call) or hides_arguments(call):
            continue
        placed, alone = COMPILED.get(script.name(call.func)) or required(_called(script, call, where))
        given = {item.arg for item in call.keywords}
        lost = [name for name in (*placed[len(call.args):], *sorted(alone)) if name not in given]
        if script.name(call) == LAUNCHER and script.path.suffix == ".py" and len(call.args) < 3 and not {
                "num_processes"} & given and not script.says("colab", "KAGGLE", "get_ipython"):
            lost.append("num_processes")
        if len(call.args) < len(BEFORE) and not given & WRITTEN and _writes_by_decoder(script, call, given):
            lost.append("decoder_input_ids")
        if lost:
            yield found("critical", call, names=", ".join(lost), function=last_name(call.func))


def _writes_by_decoder(script: Script, call: ast.Call, given: set[str | None]) -> bool:
    """Return whether a call surely runs a T5 without what its decoder reads, or makes that of."""
    made = {script.name(value) if isinstance(value, ast.Call) else "" for value in script.assigned(call.func)}
    return made <= T5 and bool(made) and bool(call.args or "input_ids" in given) and ("labels" not in given or made <= BARE_T5)


@code_rule_once
def keyword_twice(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A call gets an argument by its name, and once more out of a dictionary."""
    for call in run_nodes(script):
        if not isinstance(call, ast.Call) or not hides_arguments(call) or is_guarded(script, call):
            continue
        named = {item.arg: item for item in call.keywords if item.arg is not None}
        packed = {name for node, name in passed(script, call) if node not in call.keywords}
        for item in call.keywords:
            made = item.value if item.arg is None and isinstance(item.value, ast.Call) else None
            whole = made is not None and (last_name(made.func) == "asdict" or (
                last_name(made.func) == "to_dict" and not made.args))
            owner = (made.args[0] if made.args else owner_of(made)) if made is not None and whole else None
            if isinstance(owner, ast.Name):
                packed |= parameters(object_of(script, owner, where)) or frozenset()
        if twice := sorted(packed & set(named)):
            yield found("critical", *(named[name] for name in twice), call, names=", ".join(twice))


def passed(script: Script, call: ast.Call) -> Iterator[tuple[ast.AST | Setting, str]]:
    """Yield (where, name) of the arguments that a call passes by name, those of a dictionary `**settings` too."""
    yield from ((item, item.arg) for item in call.keywords if item.arg is not None)
    seen: dict[str, ast.AST | Setting] = {**script.spread.get(call, {}), **{
        name: node for item in call.keywords if item.arg is None for node, name in _put_together(script, call, item)}}
    yield from ((node, name) for name, node in seen.items())


def _put_together(script: Script, call: ast.Call, item: ast.keyword) -> Iterator[tuple[ast.AST, str]]:
    """Yield (where, key) of what the code around a call puts into its `**settings`."""
    made, of_call = script.assigned(item.value), script.function(call)
    if not isinstance(item.value, ast.Name) or (of_call is not None and item.value.id in parameters_of(of_call) and not any(
            script.function(value) is of_call for value in made)):
        return                                           # what is assigned elsewhere is another one of this name
    if not (len(made) == 1 and isinstance(made[0], ast.Dict)):
        yield from _put_in(script, call, item.value.id)
        own = [value for value in made if script.function(value) is script.function(call)]
        if len(own) > 1 and all(isinstance(value, ast.Dict) for value in own) and not any(
                last_name(other.func) in ("pop", "update") and last_name(owner_of(other) or other) == item.value.id
                for other in every(ast.Call, script.tree)):
            yield from ((key, key.value) for value in own for key in getattr(value, "keys", ())
                        if isinstance(key, ast.Constant) and isinstance(key.value, str))
    if len(made) != 1:
        return
    if isinstance(made[0], ast.Call) and script.name(made[0]) == "dict":
        yield from ((each, each.arg) for each in made[0].keywords if each.arg)
    uses = [node for node in every(ast.Name, script.tree) if node.id == item.value.id]
    asked = [around for node in uses if isinstance(around := script.parents[node], ast.Attribute)]
    if not isinstance(made[0], ast.Dict) or any(isinstance(script.parents[node], ast.arg | ast.Delete) for node in uses) or any(
            around.attr not in ("update", "get", "items", "keys", "values") for around in asked):
        return                                           # d.pop("key")
    added = [script.parents[around] for around in asked if around.attr == "update"]
    keys = [key for other in added if isinstance(other, ast.Call) and other.lineno < call.lineno and script.function(
                other) is script.function(call) and not script.unused.intersection(script.ancestors(other))
            for given in other.args if isinstance(given, ast.Dict) for key in given.keys if key is not None]
    keys += [key for key in made[0].keys if key is not None]
    keys += [around.slice for node in uses if isinstance(around := script.parents[node], ast.Subscript)
             and isinstance(around.ctx, ast.Store)]
    yield from ((key, key.value) for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def only_if(script: Script, nodes: Sequence[object]) -> str:
    """Return the condition under which a dictionary has its keys, of which the first is one; "" for what is always given."""
    around = [[each for each in script.conditions(node) if "__name__" not in script.words(each.test)]
              for node in nodes if isinstance(node, ast.Constant)]
    always = len(around) < len(nodes) or not around or not all(around)
    return "" if always else f"{script.words(around[0][0].test)} holds"


def _put_in(script: Script, call: ast.Call, name: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield what the block of a call puts into a dictionary above it in any case: `settings["key"] = value`."""
    own = script.statement(call)
    blocks = (getattr(script.parents[own], part, []) for part in ("body", "orelse", "finalbody"))
    body: list[ast.stmt] = next((block for block in blocks if own in block), [])
    taken_out = {node.value for other in every(ast.Call, script.tree) if last_name(other.func) == "pop"
                 for node in every(ast.Constant, other)}
    for statement in body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) and statement.lineno < call.lineno else None
        key = target.slice if isinstance(target, ast.Subscript) and getattr(target.value, "id", "") == name else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value not in taken_out:
            yield key, key.value


def _called(script: Script, call: ast.Call, where: Circumstances) -> Defined | None:
    """Return what a call runs: a library's class or function, a method of its objects, or what an own class inherits."""
    if isinstance(call.func, ast.Call):      # what was made is called, in one expression
        return None
    if (kind := of_library(script, call.func, where)) is not None:
        return kind
    if isinstance(call.func, ast.Name):
        own = own_class(script, call.func)
        return _made_with(script, own, where) if own is not None else None
    if not isinstance(call.func, ast.Attribute):
        return None
    of_super = isinstance(call.func.value, ast.Call) and script.name(call.func.value) == "super"
    around = script.class_around(call) if of_super or getattr(call.func.value, "id", "") == "self" else None
    if around is not None and not (of_super and call.func.attr == "__init__"):
        return _inherited(script, around, call.func.attr, where, own=not of_super)
    if of_super:
        return _above(script, around, where) if around is not None else None
    return method(object_of(script, call.func.value, where), call.func.attr)


def own_class(script: Script, name: ast.AST) -> ast.ClassDef | None:
    """Return the project's class that a name stands for, if only one has the name and no library gives it."""
    own = script.classes.get(name.id) if isinstance(name, ast.Name) and name.id not in script.shared_names else None
    return own if own is not None and script.name(name).partition(".")[0] not in LIBRARIES else None


def _made_with(script: Script, own: ast.ClassDef, where: Circumstances) -> Defined | None:
    """Return the library's class whose `__init__` makes the objects of an own class."""
    makes = any(isinstance(item, FunctionNode) and item.name in ("__init__", "__new__") for item in own.body)
    return None if makes else _above(script, own, where)


def _inherited(script: Script, kind: ast.ClassDef, name: str, where: Circumstances, *, own: bool) -> Defined | None:
    """Return the library's method that an own class has from above, or, with `own`, has at all; None where that is not sure."""
    mixed = any(len(each.bases) > 1 and kind.name in map(last_name, each.bases) for each in script.classes.values())
    has = {item.name for item in kind.body if isinstance(item, FunctionNode)} | {
        node.attr for node in every(ast.Attribute, script.tree) if isinstance(node.ctx, ast.Store)}
    if len(kind.bases) != 1 or kind.keywords or mixed or (own and name in has):
        return None
    base = own_class(script, kind.bases[0])
    if base is not None and base is not kind:
        return _inherited(script, base, name, where, own=True)
    return method(of_library(script, kind.bases[0], where), name)


def _above(script: Script, own: ast.ClassDef, where: Circumstances) -> Defined | None:
    """Return the library's class whose `__init__` is the next above an own class; None where that is not sure."""
    if len(own.bases) != 1 or own.decorator_list or own.keywords:
        return None
    base = own_class(script, own.bases[0])
    return of_library(script, own.bases[0], where) if base is None or base is own else _made_with(script, base, where)


def object_of(script: Script, node: ast.AST, where: Circumstances) -> Defined | None:
    """Return the library's class of the object that a variable holds: all that makes it, or its annotation, says the same."""
    if isinstance(node, ast.Name) and (annotated := _annotated(script, node, where)) is not None:
        return annotated
    made = script.kinds.get(node.id, frozenset()) if isinstance(node, ast.Name) else frozenset()
    if len(made) != 1 or not isinstance(node, ast.Name):
        return None
    values = [each for value in script.assigned(node)
              for each in ([value.body, value.orelse] if isinstance(value, ast.IfExp) else [value])]
    if not (all(isinstance(value, ast.Call) for value in values) if values else _is_parsed(script, node.id)):
        return None
    owners = [owner_of(value) for value in values if isinstance(value, ast.Call)]
    if any(owner is not None and last_name(owner) in script.kinds for owner in owners):
        return None                          # what a method of an object gave
    kind = next(iter(made))
    for library, ending, name in OPENED:
        if kind.startswith(library) and kind.endswith(ending):
            return defined(library, name) if in_force(library, where) else None
    module, _, last = kind.rpartition(".")
    library = module.partition(".")[0]
    return defined(module, last) if library in LIBRARIES - {"torch"} and in_force(library, where) else None


def _annotated(script: Script, name: ast.Name, where: Circumstances) -> Defined | None:
    """Return the library's class of settings that the function around says an argument of it is."""
    function = script.function(name)
    given = [item for item in every(ast.arg, function.args) if item.arg == name.id] if function is not None else []
    said = given[0].annotation if given else None
    if said is None or function is None or not last_name(said).endswith(("Config", "Arguments")):
        return None
    bound = any(node.id == name.id and isinstance(node.ctx, ast.Store) for node in every(ast.Name, function))
    return None if bound else of_library(script, said, where)


def is_handed_on(script: Script, given: ast.arg) -> bool:
    """Return whether all calls of a function give an argument the value that has its name there."""
    function = script.function(given)
    calls = script.callers(function)
    values = [(*call.args, *(item.value for item in call.keywords)) for call in calls]
    same = all(any(isinstance(value, ast.Name) and value.id == given.arg for value in each) for each in values)
    return bool(calls) and same and function is not None and not isinstance(script.parents.get(function), ast.ClassDef)


def _is_parsed(script: Script, name: str) -> bool:
    """Return whether a name only ever holds what HfArgumentParser made of the command line or a file."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.arg) and node.arg == name and not is_handed_on(script, node):
            return False
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            statement = script.statement(node)
            if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call) or last_name(
                    statement.value.func) not in PARSED:
                return False
    return True


@code_rule_once
def chat_template_gives_a_dictionary(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """apply_chat_template gives a dictionary where the code takes it for the tokens."""
    if (where.version("transformers") or (0,)) < SINCE:
        return
    for call in script.calls(".apply_chat_template"):
        asked = [argument(call, name) for name in ("return_dict", "return_assistant_tokens_mask")]
        tokens = getattr(argument(call, "tokenize"), "value", True) is True
        if not tokens or any(asked) or any(item.arg is None for item in call.keywords) or len(call.args) > 2:
            continue
        use = _taken_for_tokens(script, call)
        if use is not None and (isinstance(use, ast.Attribute) or not script.says(*UNSLOTH)):    # whose generate takes both
            yield found("critical", call, use)


def _taken_for_tokens(script: Script, call: ast.Call) -> ast.AST | None:
    """Return where tokens are wanted and the result of a call is given, by itself or under its only name."""
    made: ast.AST = call
    around = script.parents[call]
    if isinstance(around, ast.Attribute) and around.attr == "to":
        made = script.parents[around]
    statement = script.parents[made]
    if not isinstance(statement, ast.Assign):
        return made if _wants_tokens(script, made) else None
    target = statement.targets[0]
    if not isinstance(target, ast.Name) or len(script.assigned(target)) != 1:
        return statement if _wants_tokens(script, made) else None
    uses = [node for node in reads_of(target.id, script.tree) if script.module(node) is script.module(call)]
    as_dictionary = any(isinstance(around := script.parents[node], ast.keyword) and around.arg is None for node in uses)
    wanted = [script.parents[node] for node in uses if _wants_tokens(script, node) and not as_dictionary]
    return min(wanted, key=lambda one: not isinstance(one, ast.Attribute), default=None)


def _wants_tokens(script: Script, node: ast.AST) -> bool:
    """Return whether a value is given as input_ids, generated from, or measured by len or shape."""
    around = script.parents[node]
    if isinstance(around, ast.keyword):
        return around.arg == "input_ids"
    if isinstance(around, ast.Call):
        return node in around.args[:1] and last_name(around.func) in ("len", "generate")
    if isinstance(around, ast.Dict):
        return any(value is node and getattr(key, "value", None) == "input_ids"
                   for key, value in zip(around.keys, around.values, strict=True))
    return isinstance(around, ast.Attribute) and around.attr in OF_TENSORS


@code_rule_once
def chat_template_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The tokenizer of a base model is asked for its chat template, and has none."""
    patterns = "|".join(known("without_chat_template").split())
    for made in subject.calls if in_force("transformers", where) else ():
        path = path_of_tokenizer(made.owner) if made.last == "apply_chat_template" and len(made.positional) < 2 else ""
        if path and re.fullmatch(patterns, path) and "chat_template" not in made.named and lacks(
                script, subject, made, "chat_template"):
            yield found("critical", script.evidence(made.node), script.evidence(made.owner.node), path=path)
