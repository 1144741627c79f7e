"""What a script's own loop says of its training: its epochs or optimizer steps, and how often it reads its loss.

A counter of its own may end it:

    while step < 1000:                   while True:
        ...                                  ...
        optimizer.step()                     optimizer.step()
        step += 1                            step += 1
                                             if step > 1000:
                                                 break

The left takes 1000 steps, the right 1001: where the test stands, and whether it is `>` or `>=`, counts. Nothing is said of a
counter that another statement changes too or that does not count every optimizer step, nor of a loop that its data may end.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from powertrain.audit.expressions import Expressions
from powertrain.audit.following import Followed
from powertrain.audit.reading_calls import Training
from powertrain.audit.script import Loop, Script, Setting, inside
from powertrain.audit.steps import Step, outermost
from powertrain.audit.values import Made, Unread

READING = (".item", ".tolist", "float")       # what copies a number from the device
COUNTING = ("range", "trange")               # `for epoch in range(3)`, `in trange(3)`, `in tqdm(range(3))`
BEFORE_ALL = -1                              # the place of a `while`'s own test among the statements of its body
BEYOND: dict[type[ast.cmpop], int] = {ast.GtE: 0, ast.Eq: 0, ast.Gt: 1}      # counter minus limit when such a test ends a loop
MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.NotEq: ast.Eq}


@dataclass(frozen=True)
class End:
    """One test that ends a loop: a counter beside its limit."""

    counter: str
    limit: ast.expr
    beyond: int                              # see BEYOND
    at: int                                  # the index of its statement in the loop's body, or BEFORE_ALL
    test: ast.expr
    leaves_all: bool                         # by `return`: the loops around too


def stepping_loop(script: Script, loop: Loop) -> Loop | None:
    """The innermost loop, from a training loop outwards, of which every round is surely one optimizer step."""
    for around in (loop, *script.loops(loop)):
        step = Step(script, around)
        if any(call.every_step for call in step.optimizer_steps):
            skips = any(isinstance(node, ast.Continue) and script.loops(node)[0] is around for node in inside(around))
            return None if skips or step.accumulates_by_accelerate else around
    return None


def counted_steps(followed: Followed, loop: Loop) -> Iterator[tuple[ast.expr, Any]]:
    """(the test that ends it, optimizer steps until then) of a training loop; the steps may be Unread."""
    stepping = stepping_loop(followed.script, loop)
    if stepping is None:
        return
    around = [stepping, *followed.script.loops(stepping)]
    if not isinstance(around[-1], ast.While):            # its data may end it first
        return
    for end in ends(stepping):
        ends_all = end.leaves_all or all(any(other.counter == end.counter for other in ends(outer)) for outer in around[1:])
        increments = [at for at, statement in enumerate(stepping.body) if _adds_one(statement, end.counter)]
        if ends_all and len(increments) == 1 and stored(around[-1], end.counter) == 1:
            steps = _steps(followed, end, increments[0], stepping, around[-1])
            if isinstance(steps, Unread) or steps > 0:
                yield end.test, steps


def ends(loop: Loop) -> Iterator[End]:
    """The tests in a loop's own body that end it, and that of its `while`."""
    if isinstance(loop, ast.While):
        for test in alternatives(loop.test, ast.And):
            yield from _end(test, BEFORE_ALL, goes_on=True)
    for at, statement in enumerate(loop.body):
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], (ast.Break, ast.Return)):
            for test in alternatives(statement.test, ast.Or):
                yield from _end(test, at, leaves_all=isinstance(statement.body[-1], ast.Return))


def alternatives(test: ast.expr, operator: type[ast.boolop]) -> list[ast.expr]:
    """The parts of a test that is joined by such an operator; else the test itself."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, operator) else [test]


def _end(test: ast.expr, at: int, *, goes_on: bool = False, leaves_all: bool = False) -> Iterator[End]:
    """`counter >= limit`, whichever stands left; of a test under which the loop goes on, its opposite."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return
    left, operator, right = test.left, type(test.ops[0]), test.comparators[0]
    for counter, limit, kind in ((left, right, operator), (right, left, MIRRORED.get(operator))):
        ending = OPPOSITE.get(kind) if goes_on and kind is not None else kind
        if isinstance(counter, ast.Name) and ending in BEYOND:
            yield End(counter.id, limit, BEYOND[ending], at, test, leaves_all)


def _adds_one(statement: ast.stmt, counter: str) -> bool:
    """`counter += 1`."""
    return (isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add)
            and isinstance(statement.target, ast.Name) and statement.target.id == counter
            and isinstance(statement.value, ast.Constant) and statement.value.value == 1)


def stored(within: ast.AST, name: str) -> int:
    """How many statements give a name its value."""
    return sum(isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store) for node in ast.walk(within))


def names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _steps(followed: Followed, end: End, incremented: int, stepping: Loop, around: Loop) -> Any:
    """Optimizer steps that are taken before the test ends the loop."""
    limit = value_throughout(followed, around, end.limit)
    start = value_before(followed, around, ast.Name(end.counter, ast.Load()))
    if not (type(limit) is int and type(start) is int):
        return next((value for value in (limit, start) if isinstance(value, Unread)), Unread(followed.script.words(end.test)))
    taken = {call.node for call in Step(followed.script, stepping).optimizer_steps if call.every_step}
    stepped = next(at for at, statement in enumerate(stepping.body) if taken & set(followed.script.reached(statement)))
    ahead = (incremented < end.at) - (stepped < end.at)  # of the steps taken, by how much the counter is when it is tested
    return limit + end.beyond - start - ahead


def value_throughout(followed: Followed, loop: Loop, node: ast.expr) -> Any:
    """The value that an expression keeps while a loop runs; Unread where the loop changes it."""
    if any(stored(loop, name) for name in names(node)):
        return Unread(followed.script.words(node))
    return value_before(followed, loop, node)


def value_before(followed: Followed, loop: Loop, node: ast.expr) -> Any:
    """The value of an expression where a loop begins; Unread where it begins with several."""
    read = Expressions(followed.script)
    values = [read.value(node, scope) for scope in followed.before.get(loop, [])]
    same = bool(values) and all(type(value) is type(values[0]) and value == values[0] for value in values)
    return values[0] if same else Unread(followed.script.words(node))


# -------------------------------------------------------------------------------------------- as settings


def settings_of_loops(training: Training) -> Iterator[tuple[str, Setting]]:
    """The epochs of the loop around the one over batches, or the steps of one that draws them, unless a Trainer counts them."""
    followed = training.followed
    if training.arguments is not None:
        return
    for loop in followed.script.training_loops:
        around, own = outermost(followed.script, loop), counting(loop, followed)
        counted = counting(around, followed)
        if counted is not None and own is None:
            yield "training.num_train_epochs", followed.script.setting(counted.node, times(counted))
        # batches are drawn by hand; the optimizer steps once a round, if it does not do so in the loop inside or now and then
        elif counted is not None and stepping_loop(followed.script, loop) is around:
            yield "training.max_steps", followed.script.setting(counted.node, times(counted))
        for test, steps in counted_steps(followed, loop):
            yield "training.max_steps", followed.script.setting(test, steps)
        for test, steps in loss_read_every(followed, loop):
            yield "training.logging_steps", followed.script.setting(test, steps)


def loss_read_every(followed: Followed, loop: Loop) -> Iterator[tuple[ast.expr, int]]:
    """(the test, N) where `if step % N == 0:` has the training loss read on the host, every N optimizer steps."""
    script, stepping = followed.script, stepping_loop(followed.script, loop)
    if stepping is None:
        return
    step = Step(script, stepping)
    trained = {name for call in step.backward for name in names(call.node)}
    for call in step.named(*READING):
        found = [(condition, part) for condition in call.conditions for part in _remainders(condition.test)]
        inside = all(_in_body(script, call.node, condition) for condition in call.conditions)
        if len(found) != 1 or not inside or call.inner_loop:
            continue
        condition, remainder = found[0]
        steps = value_throughout(followed, stepping, remainder.right)
        counts = any(stored(stepping, name) for name in names(remainder.left))
        of_loss = any(not stored(condition, name) for name in trained & names(call.node))
        if type(steps) is int and steps > 0 and counts and of_loss:
            yield condition.test, steps


def _remainders(test: ast.expr) -> list[ast.BinOp]:
    """`step % N` of `step % N == 0`, alone or with more that has to be so: `step % N == 0 and is_main`."""
    return [part.left for part in alternatives(test, ast.And)
            if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], ast.Eq)
            and isinstance(part.left, ast.BinOp) and isinstance(part.left.op, ast.Mod)]


def _in_body(script: Script, node: ast.AST, condition: ast.If) -> bool:
    return any(script.is_within(node, statement) for statement in condition.body)


def counting(loop: Loop, followed: Followed) -> Made | None:
    """The call of `range` that a loop goes through."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return None
    inside = set(ast.walk(loop.iter))
    return next((made for made in followed.calls if made.node in inside and made.name.rpartition(".")[2] in COUNTING), None)


def times(made: Made) -> Any:
    """How often a loop over `range(stop)` or `range(start, stop)` comes round."""
    given = made.positional
    if len(given) not in (1, 2) or not all(isinstance(item, int) for item in given):
        return next((item for item in given if isinstance(item, Unread)), Unread("a loop"))
    return given[0] if len(given) == 1 else given[1] - given[0]
