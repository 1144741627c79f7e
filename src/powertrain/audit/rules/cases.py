"""A rule on names that have a value in some cases only: of an option, of the machine, or of a value that the code knows."""

import ast
from collections.abc import Collection

from powertrain.audit.commands import commands
from powertrain.audit.rules.base import Findings, code_rule, found
from powertrain.audit.rules.command_line import flags_of
from powertrain.audit.scopes import bound_by, is_tried, run_nodes, trees_of
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, argument, every, inside, last_name, parameters_of

SAYING = ("print", "warning", "warn", "info", "error")
LEAVING = ("exit", "_exit", "quit", "abort", "skip")
LISTS = ("choices", "Choice", "Literal", "Enum")         # what lets in some values only


@code_rule
def given_in_some_cases(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A name has a value in some cases only, and is read in all."""
    given = {option.replace("-", "_") for command in commands(script) for option in command.options}
    fields = ((each.target, each.value) for each in script.every(ast.AnnAssign))
    told = ((name, argument(call, "default")) for call in script.calls(".add_argument") for name in flags_of(call))
    defaults = {name for name, value in (*told, *((last_name(target), argument(value, "default") if isinstance(
        value, ast.Call) else value) for target, value in fields)) if getattr(value, "value", None)}
    for first in (node for node in run_nodes(script) if isinstance(node, ast.If)):
        ifs = [first]
        while len(ifs[-1].orelse) == 1 and isinstance(ifs[-1].orelse[0], ast.If):
            ifs.append(ifs[-1].orelse[0])
        others, asked = ifs[-1].orelse, {name for each in ifs for name in _asked(each.test)}
        of_kinds = any(last_name(call.func) == "isinstance" for each in ifs for call in every(ast.Call, each.test))
        never = asked & defaults and not asked & given and all(each.body[0] in script.unused for each in ifs)
        only_says = bool(others) and all(map(_only_says, others)) and not of_kinds and (
            never or not _is_settled(script, ifs, asked))
        switch, case = _switch(script, first.test) if not others else ("", "")
        leaves = any(isinstance(each.body[-1], ast.Break | ast.Continue | ast.Return | ast.Raise) for each in ifs)
        of_hardware = not others and _is_of_hardware(script, first)
        if leaves or not (only_says or switch or of_hardware or (never and not others)):
            continue
        scope = script.function(first)
        trees = [scope] if scope is not None else [tree for tree in trees_of(script) if first in ast.walk(tree)]
        nodes = [node for tree in trees for node in inside(tree)]
        if any(_lets_in(node, asked) for node in ast.walk(script.tree) if not script.is_within(node, first)):
            continue
        free = {name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal)
                for name in node.names} | {name for node in nodes for name in bound_by(node)}
        free |= {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, FunctionNode | ast.ClassDef)}
        free |= parameters_of(scope) if scope is not None else set()
        in_all = set.intersection(*({target.id for node in each.body if isinstance(node, ast.Assign) for target in node.targets
                                     if isinstance(target, ast.Name)} for each in ifs))
        for name in sorted(in_all - free):
            uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
            read = next((node for node in sorted(uses, key=lambda each: each.lineno) if node.lineno > (first.end_lineno or 0)
                         and _is_read_in_all(script, node, first, switch)), None)
            if read is not None and all(script.is_within(node, first) or (node.lineno > read.lineno and not script.loops(read))
                                        for node in uses if not isinstance(node.ctx, ast.Load)):
                yield found("critical", read, others[0] if only_says else first, name=name, switch=switch,
                            case="" if only_says else case if switch else "hardware" if of_hardware else "never")


def _is_read_in_all(script: Script, node: ast.Name, first: ast.If, switch: str) -> bool:
    """Return whether a name is read whether or not a condition holds that has nothing to do with an earlier one."""
    tied = {switch} | {each.id for each in every(ast.Name, first) if isinstance(each.ctx, ast.Store)}
    more = set(script.conditions(node)) - set(script.conditions(first))
    return not is_tried(script, node) and not any(isinstance(each, ast.IfExp | ast.BoolOp) for each in script.ancestors(node)) \
        and not any(not switch or tied & set(map(last_name, script.behind(each.test))) for each in more)


def _asked(test: ast.expr) -> set[str]:
    """Return the names that a test asks for: `mode` of `args.mode == "a"`."""
    owners = {node.value for node in every(ast.Attribute, test) if isinstance(node.value, ast.Name) or ast.unparse(
        node.value).startswith("self.")}
    return {last_name(node) for node in every(ast.expr, test) if node not in owners} - {""}


def _lets_in(node: ast.AST, asked: Collection[str]) -> bool:
    """Return whether a statement leaves the function or the run in other cases of what was asked."""
    if isinstance(node, ast.Assert):
        return not _asked(node.test).isdisjoint(asked)
    return isinstance(node, ast.If) and not _asked(node.test).isdisjoint(asked) and any(
        isinstance(inner, ast.Return | ast.Raise | ast.Continue | ast.Break)
        or (isinstance(inner, ast.Call) and last_name(inner.func) in LEAVING) for inner in ast.walk(node))


def _is_settled(script: Script, ifs: list[ast.If], asked: Collection[str]) -> bool:
    """Return whether what is asked has a value that the code itself gives, or one of a list."""
    scope = script.function(ifs[0])
    order = [item.arg for item in scope.args.args] if scope is not None else []
    said = [node for each in ifs for node in every(ast.expr, each.test)]
    values = [value for node in (*said, *map(ast.Name, asked)) for value in script.assigned(node)]
    values += [value for name in asked if name in order and name != "self" for call in script.callers(scope)
               if (value := argument(call, name, order.index(name) - (order[0] == "self"))) is not None]
    values += [around.iter for around in script.ancestors(ifs[0]) if isinstance(around, ast.For) and last_name(
        around.target) in asked]
    listed = [script.words(node) for node in script.every(ast.AST) if isinstance(node, ast.Call | ast.AnnAssign | ast.arg)]
    return any(isinstance(value, ast.Constant | ast.Tuple | ast.List) for value in values) or any(
        word in words for words in listed if any(name in words.replace("-", "_") for name in asked) for word in LISTS)


def _switch(script: Script, test: ast.expr) -> tuple[str, str]:
    """Return the option of the command line that a test asks for, if it is one that is on or off, and the case that fails."""
    values = script.assigned(test)
    test = values[0] if isinstance(test, ast.Name) and len(values) == 1 else test
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    test = test.operand if isinstance(test, ast.UnaryOp) else test
    name = last_name(test) if isinstance(test, ast.Attribute) and not script.assigned(test) else ""
    asked = [call for call in script.calls(".add_argument") if name in flags_of(call)]
    is_one = bool(asked) and getattr(argument(asked[0], "action"), "value", "") == "store_true"
    by_default = bool(asked) and argument(asked[0], "default") is not None
    is_one = is_one and not by_default and not script.has_call(".set_defaults")
    return (name, "switched_off" if negated else "switch") if is_one else ("", "")


def _only_says(statement: ast.stmt) -> bool:
    """Return whether a statement only writes a sentence: `parser.error` ends the run."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and last_name(call.func) in SAYING and "parser" not in ast.unparse(call.func)


def _is_of_hardware(script: Script, test: ast.If) -> bool:
    """Return whether a condition asks for GPUs, and nothing else will do."""
    return " or " not in script.words(test.test) and any(
        word in script.words(test.test) for word in ("device_count()", "cuda.is_available()"))
