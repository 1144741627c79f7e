"""What a value may be: its expression, followed back through names, arguments, branches and the project's own functions."""

import ast
from collections.abc import Collection, Mapping
from functools import lru_cache

from powertrain.audit.script import Script
from powertrain.audit.syntax import FunctionNode, argument, every, inside, parameters_of, targets_of

DEEPEST = 6                  # steps back: as far as scripts hand on a value
Given = tuple[ast.expr, ast.stmt]            # a value, and the statement that gives it to a name


def origins(script: Script, node: ast.expr, deep: int = DEEPEST) -> list[ast.expr]:
    """Return the expressions that a value may be; where it can't be followed, it is its own."""
    before = _before(script, node) if deep else []
    return [end for each in before for end in origins(script, each, deep - 1)] if before else [node]


def _before(script: Script, node: ast.expr) -> list[ast.expr]:
    """Return the expressions one step behind another; nothing where that is not known."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.Call):
        return returned(script, node)
    if isinstance(node, ast.Subscript):          # one of several that a call or a tuple gives
        place = getattr(node.slice, "value", None)
        tuples = [node.value] if isinstance(node.value, ast.Tuple) else returned(script, node.value) if isinstance(
            node.value, ast.Call) else []
        fits = isinstance(place, int) and tuples and all(isinstance(each, ast.Tuple) and len(each.elts) > place >= 0
                                                         for each in tuples)
        return [each.elts[place] for each in tuples if isinstance(each, ast.Tuple)] if fits and isinstance(place, int) else []
    if isinstance(node, ast.Name):
        return _of_name(script, node)
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
        kind = script.class_around(node)
        return [value for value, statement in givings(script).get(ast.unparse(node), ())
                if script.class_around(statement) is kind]
    return []


def returned(script: Script, call: ast.Call) -> list[ast.expr]:
    """Return what the project's own function gives back to a call; nothing where it is no plain function."""
    function = script.called(call)
    if function is None or function.decorator_list or any(isinstance(each, ast.Yield | ast.YieldFrom)
                                                          for each in inside(function)):
        return []
    ends = [each.value for each in inside(function) if isinstance(each, ast.Return)]
    return [end for end in ends if end is not None] if None not in ends else []


def _of_name(script: Script, node: ast.Name) -> list[ast.expr]:
    scope, module = script.function(node), script.module(node)
    mine = [each for each in givings(script).get(node.id, ()) if script.module(each[1]) is module]
    here = [each for each in mine if script.function(each[1]) is scope]
    if here:
        return [value for value, _ in _reaching(script, node, here)]
    if scope is not None and node.id in parameters_of(scope):
        return _of_argument(script, scope, node.id)
    return [value for value, statement in mine if script.function(statement) is None] or _of_import(script, node)


def _of_import(script: Script, node: ast.Name) -> list[ast.expr]:
    """Return what a module of the project gives a name that is imported from it."""
    whole, module = script.origin(node), script.module(node)
    taken = [(script.project.get((each, "")), item.name) for each in every(ast.ImportFrom, script.tree) for item in each.names
             if script.module(each) is module and (item.asname or item.name) == node.id] if whole else []
    return [value for file, name in taken[:1] for value, statement in givings(script).get(name, ()) if len(taken) == 1
            and script.function(statement) is None and (there := script.module(statement)) is not None and there.file == file]


def _reaching(script: Script, node: ast.Name, here: list[Given]) -> list[Given]:
    """Return which of a function's assignments a name may have its value from, where it is read."""
    tests, loops = set(script.conditions(node)), script.loops(node)
    before = [each for each in here if (each[1].end_lineno or 0) < node.lineno]
    sure = [place for place, (_, statement) in enumerate(before) if set(script.conditions(statement)) <= tests
            and set(script.loops(statement)) <= set(loops)]
    again = [each for each in here if each not in before and set(script.loops(each[1])) & set(loops)
             and not script.is_within(node, each[1])]
    return [*before[sure[-1] if sure else 0:], *again]


def _of_argument(script: Script, function: FunctionNode, name: str) -> list[ast.expr]:
    spec = function.args
    order = [item.arg for item in (*spec.posonlyargs, *spec.args)]
    default = dict(zip(reversed(order), reversed(spec.defaults), strict=False)).get(name)
    place = order.index(name) - (order[0] in ("self", "cls")) if name in order else None
    given = [argument(call, name, place) or default for call in script.callers(function)]
    return [each for each in given if each is not None] if None not in given else []


@lru_cache(maxsize=4)
def givings(script: Script) -> Mapping[str, list[Given]]:
    """Return what every name is given anywhere, in the order of the text; what is unpacked as the part that it gets."""
    found: dict[str, list[Given]] = {}
    for node in sorted(every(ast.stmt, script.tree), key=lambda each: each.lineno):
        if isinstance(node, ast.For | ast.AugAssign | ast.With):
            stored = [item.optional_vars for item in node.items] if isinstance(node, ast.With) else [node.target]
            unknown: ast.expr = ast.Constant(None)
            names: list[ast.expr] = [each for target in stored if target is not None for each in every(ast.Name, target)]
            pairs = [(each, unknown) for each in names]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            pairs = [pair for target in targets_of(node) for pair in _pairs(target, node.value)]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Name | ast.Attribute):
                found.setdefault(ast.unparse(target), []).append((value, node))
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if not isinstance(target, ast.Tuple | ast.List):
        return [(target, value)]
    plain = not any(isinstance(item, ast.Starred) for item in target.elts)
    return [(item, ast.Subscript(value, ast.Constant(place), ast.Load()) if plain else ast.Constant(None))
            for place, item in enumerate(target.elts)]


def is_led_to_by(script: Script, call: ast.AST, statements: Collection[ast.AST]) -> bool:
    """Return whether a call stands below some statements, or in a function that is only called from there."""
    if any(around in statements for around in (call, *script.ancestors(call))):
        return True
    function = script.function(call)
    callers = [each for each in every(ast.Call, script.tree) if script.called(each) is function] if function is not None else []
    return bool(callers) and all(not script.is_within(each, function or each) and is_led_to_by(script, each, statements)
                                 for each in callers)
