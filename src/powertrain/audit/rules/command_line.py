"""Rules on the options of a script's command line, and on who reads them."""

import ast
from collections import defaultdict

from powertrain.audit.rules.base import Findings, code_rule, found
from powertrain.audit.rules.calls import is_handed_on
from powertrain.audit.scopes import bound_by, is_tried
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, argument, every, last_name

PARSING = ("parse_args", "parse_known_args")
OF_A_NAMESPACE = frozenset(dir(object)) | {"__dict__"}
NUMBERS = ("lr", "batch_size", "num_workers", "weight_decay", "max_length")       # arguments of calls that refuse a text
ORDERED = ast.Lt | ast.LtE | ast.Gt | ast.GtE
PASSED_ON = ("add_subparsers", "set_defaults", "add_parser")         # by which a parser gets arguments in other ways


@code_rule
def options_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The code reads an option that the command line does not have."""
    parsers = {last_name(target) for node in every(ast.Assign, script.tree) if isinstance(node.value, ast.Call)
               and script.name(node.value) == "argparse.ArgumentParser" for target in node.targets}
    calls = every(ast.Call, script.tree)
    handed_on = any(last_name(call.func) in PASSED_ON or (script.called(call) is None and any(
        last_name(item) in parsers for item in (*call.args, *(each.value for each in call.keywords)))) or (
        script.name(call) == "argparse.ArgumentParser" and any(item.arg in ("parents", None) for item in call.keywords))
        for call in calls)
    added = [call for call in calls if last_name(call.func) == "add_argument"]
    if not parsers or "" in parsers or handed_on or any(not flags_of(call) for call in added):
        return
    names = {name for call in added for name in flags_of(call)} | OF_A_NAMESPACE
    names |= {str(node.value) for node in every(ast.Constant, script.tree)}
    names |= {node.attr for node in every(ast.Attribute, script.tree) if not isinstance(node.ctx, ast.Load)}
    spaces = _namespaces(script)
    lost = [node for node in script.every(ast.Attribute) if isinstance(node.value, ast.Name) and node.value.id in spaces
            and node.attr not in names and not is_tried(script, node) and _is_the_namespace(script, node.value)]
    if lost:
        yield found("critical", *{node.attr: node for node in reversed(lost)}.values(),
                    names=", ".join(dict.fromkeys(f"--{node.attr}" for node in lost)))


def flags_of(call: ast.Call) -> set[str]:
    """Return the names under which the command line's result has an option; none where they cannot be read."""
    flags = [item.value for item in call.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    if len(flags) < len(call.args):
        return set()
    return {flag.lstrip("-").replace("-", "_") for flag in flags}        # `dest` counts as a text of the script


def _namespaces(script: Script) -> set[str]:
    """Return the names that only ever hold what the command line gave, or what a function was given under such a name."""
    given: defaultdict[str, list[ast.AST]] = defaultdict(list)
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
                for inner in every(ast.Name, target):
                    if isinstance(inner.ctx, ast.Store):
                        given[inner.id].append(node.value if inner is first else node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if not isinstance(script.parents[node], ast.Assign | ast.Tuple):
                given[node.id].append(node)
        elif isinstance(node, FunctionNode | ast.ClassDef):
            given[node.name].append(node)
        for name in bound_by(node):
            given[name].append(node)
    return {name for name, values in given.items() if all(_parses(script, value) for value in values)}


def _parses(script: Script, value: ast.AST) -> bool:
    """Return whether a value is what a parser gave, or a function of the project that gives this and nothing else."""
    if not isinstance(value, ast.Call) or last_name(value.func) not in PARSING:
        return False
    function = script.called(value)
    given = [node.value for node in every(ast.Return, function)] if function is not None else []
    return function is None or all(isinstance(each, ast.Call) and last_name(each.func) in PARSING for each in given)


def _is_the_namespace(script: Script, name: ast.Name) -> bool:
    """Return whether a name is no argument of the function around, or one that all of its calls give the namespace for."""
    given = next((item for each in script.ancestors(name) if isinstance(each, FunctionNode)
                  for item in every(ast.arg, each.args) if item.arg == name.id), None)
    return given is None or is_handed_on(script, given)


@code_rule
def option_always_true(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """An option of the command line has the type bool, for which every text is true, False too."""
    lost = _of_type(script, "bool")
    if lost and not any(call.args for call in script.calls(".parse_args")):          # parse_args("") reads none
        yield found("moderate", *lost, names=_named(lost))


def _of_type(script: Script, *types: str) -> list[ast.Call]:
    return [call for call in script.calls(".add_argument") if script.words(argument(call, "type") or call.func) in types]


def _named(calls: list[ast.Call]) -> str:
    return ", ".join(f"--{name}" for call in calls for name in sorted(flags_of(call)))
