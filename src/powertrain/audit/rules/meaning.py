"""Rules on code that does something else than it says: values that are shared, empty, numbers or not there at all."""

import ast
import re
from collections.abc import Iterator

from powertrain.audit.commands import project_files, text_of
from powertrain.audit.origins import givings, origins
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.rules.labels import is_loss
from powertrain.audit.scopes import is_tried
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import (
    FunctionNode,
    argument,
    every,
    hides_arguments,
    is_constant,
    last_name,
    names_in,
    owner_of,
)

VIEWS = ("view", "reshape", "float", "to", "contiguous", "squeeze", "unsqueeze", "flatten")
WITH_SPLITS = ("map", "filter", "shuffle", "remove_columns", "rename_column", "rename_columns", "select_columns", "with_format",
               "cast_column", "cast", "flatten", "with_transform", "sort")       # of a DatasetDict, which give its splits again
STREAMED = (*WITH_SPLITS, "take", "skip", "batch", "shard")
SEQ2SEQ = ("Seq2Seq", "ConditionalGeneration", "MaskedLM", "decoder_input_ids", "EncoderDecoder", "T5")
OTHERS = (".py", ".ipynb", ".toml", ".cfg", ".sh", ".md", ".yaml", ".yml", ".txt")


@code_rule_once
def mask_without_effect(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loss is one mean already, and a mask that is then applied leaves nothing out."""
    for node in script.every(ast.BinOp):
        sides = [node.left, node.right] if isinstance(node.op, ast.Mult) else []
        for side, other in zip(sides, reversed(sides), strict=True):
            bare = side
            while isinstance(bare, ast.Call) and isinstance(bare.func, ast.Attribute) and bare.func.attr in VIEWS:
                bare = bare.func.value
            masks = any("mask" in script.words(each).lower() for each in (other, *origins(script, other)))
            ends = origins(script, bare) if isinstance(bare, ast.Name | ast.Call) and masks else []
            if ends and all(_is_mean_loss(script, end) for end in ends):
                yield found("critical", node, ends[0], mask=script.words(other))


def _is_mean_loss(script: Script, node: ast.expr) -> bool:
    """Return whether an expression is torch's cross entropy, as one number."""
    if not isinstance(node, ast.Call) or not is_loss(script, node) or hides_arguments(node):
        return False
    made = [node] if script.name(node).endswith(".cross_entropy") else [
        each for each in script.assigned(node.func) if isinstance(each, ast.Call)]
    reductions = [argument(each, name) for each in made for name in ("reduction", "reduce", "size_average")]
    return bool(made) and all(each is None or getattr(each, "value", "") in ("mean", "sum") for each in reductions)


@code_rule_once
def split_not_there(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A set of data is asked for a part that it does not have."""
    for node in script.every(ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if not isinstance(key, str | int) or not isinstance(node.ctx, ast.Load) or not isinstance(
                node.value, ast.Name) or is_tried(script, node):
            continue
        if any(getattr(each.slice, "value", key) == key and script.statement(each) is not script.statement(node)
               for each in script.every(ast.Subscript) if not isinstance(each.ctx, ast.Load)
               and ast.unparse(each.value) == node.value.id):
            continue
        asks = [around.test for around in script.ancestors(node) if isinstance(around, ast.If | ast.IfExp)]
        parts = [_splits(script, end) for end in origins(script, node.value)]
        if parts and all(one is not None and key not in one for one in parts) and not any(
                str(key) in script.words(test) or "keys()" in script.words(test) for test in asks):
            has = sorted(set().union(*(one for one in parts if one is not None)))
            yield found("critical", node, key=key, has=", ".join(has))


def _splits(script: Script, node: ast.expr, deep: int = 8) -> frozenset[str] | None:
    """Return the parts of a DatasetDict that an expression makes; None where they are not known."""
    if not isinstance(node, ast.Call) or not deep:
        return None
    name, owner = last_name(node.func), owner_of(node)
    if name == "train_test_split" and owner is not None and "sklearn" not in script.name(node):
        return frozenset({"train", "test"})
    if name in WITH_SPLITS and owner is not None:
        parts = [_splits(script, end, deep - 1) for end in origins(script, owner)]
        return parts[0] if parts and len(set(parts)) == 1 else None
    given = argument(node, "data_files") if script.name(node) == "datasets.load_dataset" else node.args[0] if (
        name == "DatasetDict" and node.args) else None
    if given is None or argument(node, "split") is not None or hides_arguments(node):
        return None
    ends = origins(script, given)
    table = ends[0] if len(ends) == 1 else None
    if isinstance(table, ast.Constant | ast.List) and name == "load_dataset":
        return frozenset({"train"})
    if not isinstance(table, ast.Dict):
        return None
    more = [each.slice for each in script.every(ast.Subscript) if isinstance(each.ctx, ast.Store)
            and isinstance(given, ast.Name) and ast.unparse(each.value) == given.id]
    keys = [getattr(key, "value", None) for key in (*table.keys, *more)]
    return frozenset(map(str, keys)) if keys and None not in keys else None


@code_rule_once
def length_of_stream(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The length of a stream is asked for, which has none."""
    for call in script.calls("len"):
        if call.args and not is_tried(script, call) and not any(
                "__len__" in script.words(test.test) or "isinstance" in script.words(test.test)
                for test in script.conditions(call)):
            streams = list(_streams(script, call.args[0]))
            if streams and None not in streams:
                yield found("critical", call, streams[0])


def _streams(script: Script, node: ast.expr, deep: int = 8) -> Iterator[ast.expr | None]:
    """Yield the calls that make a stream without a length, behind loaders and steps of data; None for anything else."""
    for end in origins(script, node) if deep else ():
        call = end if isinstance(end, ast.Call) else None
        kind = script.classes.get(last_name(call.func)) if call is not None else None
        if call is None:
            yield None
        elif script.name(call).endswith("utils.data.DataLoader") or (
                last_name(call.func) in STREAMED and owner_of(call) is not None):
            inner = argument(call, "dataset", 0) if last_name(call.func) == "DataLoader" else owner_of(call)
            yield from _streams(script, inner, deep - 1) if inner is not None else (None,)
        elif script.name(call) == "datasets.load_dataset" and argument(call, "split") is not None:
            yield call if is_constant(argument(call, "streaming"), True) else None
        else:
            stream = kind is not None and [last_name(base) for base in kind.bases] == ["IterableDataset"] and not {
                "__len__", "__getattr__"} & {each.name for each in script.methods(kind)}
            yield call if stream else None


@code_rule
def left_unwritten(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A part of the training is not written yet: a placeholder stands in its place."""
    for node in script.every(ast.Assign):
        if is_ellipsis(node.value) and isinstance(target := node.targets[0], ast.Name) and not script.class_around(node):
            reads = [each for each in script.every(ast.Name) if each.id == target.id and isinstance(each.ctx, ast.Load)
                     and any(end is node.value for end in origins(script, each))]
            if reads and not any("is not None" in script.words(test.test) for test in script.conditions(reads[0])):
                yield found("critical", node, reads[0], name=target.id)
    for call in script.every(ast.Call):
        function = script.called(call) if isinstance(call.func, ast.Name) else None
        body = [each for each in function.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
                                                       and isinstance(each.value.value, str))] if function is not None else []
        tests = [test for test in script.conditions(call) if "__name__" not in script.words(test.test)]
        if function is not None and len(body) == 1 and not function.decorator_list and not tests and not is_tried(script, call):
            last = body[0]
            raises = isinstance(last, ast.Raise) and last.exc is not None and last_name(
                last.exc.func if isinstance(last.exc, ast.Call) else last.exc) == "NotImplementedError"
            if raises and (script.function(call) is None or script.trains):
                yield found("critical", call, last, case="function", name=function.name)


def is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


@code_rule
def training_never_called(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The training stands in a function, and nothing calls it."""
    trainer = script.sections.get("trainer")
    around = script.function(trainer) if trainer is not None else None
    own = [node for node in script.tree.body if not isinstance(node, ast.Module)]
    plain = all(isinstance(node, ast.Import | ast.ImportFrom | FunctionNode | ast.ClassDef | ast.Assign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in own)
    if around is None or not plain or script.module(around) is not None or script.callers(around) or around.decorator_list or (
            isinstance(script.parents[around], ast.ClassDef)) or script.root is None or script.path.suffix != ".py":
        return
    name = re.escape(script.path.stem)
    taken = re.compile(rf"(import|from)\s[\w., (\n]*\b{name}\b|\b{name}[:.](?!py\b)\w|import_module\(|__import__\(")
    if any(file != script.path.resolve() and file.suffix in OTHERS and taken.search(text_of(file))
           for file in project_files(script)):
        return
    yield found("critical", trainer, name=around.name)


@code_rule_once
def chances_of_next_token(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The chance of each token is read where the model foretells the one after it."""
    if script.says(*SEQ2SEQ):
        return
    for call in script.calls(".gather", "torch.gather"):
        free = script.name(call) == "torch.gather"
        table, index = argument(call, "input", 0) if free else owner_of(call), argument(call, "index", 2 if free else 1)
        tokens = owner_of(index) if isinstance(index, ast.Call) and last_name(index.func) == "unsqueeze" else None
        if table is None or not isinstance(tokens, ast.Name) or not script.training_loops:
            continue
        for ends, ids in _ways_in(script, tokens, _made_of(script, table)):
            chain = [*script.reached(*map(ast.Expr, ends))]
            passes = [each for each in chain if isinstance(each, ast.Call) and any(
                last_name(item) == ids.id for item in (*each.args, argument(each, "input_ids")) if item is not None)]
            near = [*chain, script.statement(call), *_made_of(script, tokens), *_made_of(script, ids)]
            moves = any((isinstance(each, ast.Slice) and (each.lower or each.upper)) or "shift" in last_name(each) or last_name(
                each) in ("roll", "narrow") for top in near for each in ast.walk(top))
            if passes and not moves and any(last_name(each) == "log_softmax" for each in chain):
                yield found("critical", call, passes[0], tokens=tokens.id)


def _ways_in(script: Script, tokens: ast.Name, made: list[ast.expr]) -> Iterator[tuple[list[ast.expr], ast.Name]]:
    """Yield what scores come from, and the tokens: of the function itself, or of each call that hands it both."""
    yield made, tokens
    function = script.function(tokens)
    order = [item.arg for item in function.args.args if item.arg != "self"] if function is not None else []
    for call in script.callers(function) if tokens.id in order and _made_of(script, tokens) == [tokens] else ():
        given = {name: value for place, name in enumerate(order) if (value := argument(call, name, place)) is not None}
        if isinstance(ids := given.pop(tokens.id, None), ast.Name):
            names = {*given} & {name for end in made for name in names_in(end)}
            yield [*made, *(end for name in names for end in _made_of(script, given[name]))], ids


def _made_of(script: Script, node: ast.expr) -> list[ast.expr]:
    """Return an expression, and those of the same function that give its names their values."""
    made, seen = [node], set[str]()
    for each in made:
        for name in every(ast.Name, each):
            if name.id not in seen:
                seen.add(name.id)
                made += [value for value, statement in givings(script).get(name.id, ())
                         if script.function(statement) is script.function(node)]
    return made


@code_rule
def never_backward(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A Trainer's own training step computes no gradients."""
    for function in script.every(ast.FunctionDef):
        kind = script.parents.get(function)
        if function.name != "training_step" or not isinstance(kind, ast.ClassDef) or not any(
                script.name(base).endswith("Trainer") and script.name(base).startswith(("transformers.", "trl."))
                for base in kind.bases):
            continue
        names = {last_name(node) for node in script.reached(function)}
        if not names & {"backward", "training_step", "manual_backward"}:
            yield found("critical", function.args.args[-1])


@code_rule_once
def gpu_fixed(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script allows itself one GPU, and not the first one."""
    setting = subject.settings.get("environment.CUDA_VISIBLE_DEVICES")
    own = setting is not None and setting.place.file == str(script.path)
    if setting is not None and own and str(setting.value).isdigit() and str(setting.value) != "0" and script.trains:
        yield found("moderate", setting, device=str(setting.value), only="the machine has fewer GPUs")
