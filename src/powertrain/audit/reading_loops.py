"""What a script's own loop says of its training: how many epochs or steps it goes on for, and how often it reads its loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from powertrain.audit.following import Followed
from powertrain.audit.loop_ends import alternatives, counted_steps, names, stepping_loop, stored, value_throughout
from powertrain.audit.reading_calls import Training
from powertrain.audit.script import Loop, Script
from powertrain.audit.steps import Step, outermost
from powertrain.audit.subject import Setting
from powertrain.audit.values import Made, Unread

READING = (".item", ".tolist", "float")       # what copies a number from the device
COUNTING = ("range", "trange")               # `for epoch in range(3)`, `in trange(3)`, `in tqdm(range(3))`


def settings_of_loops(training: Training) -> Iterator[tuple[str, Setting]]:
    """The epochs of the loop around the one over batches, or the steps of one that draws them, unless a Trainer counts them."""
    followed = training.followed
    if training.arguments is not None:
        return
    for loop in followed.script.training_loops:
        around, own = outermost(followed.script, loop), counting(loop, followed)
        counted = counting(around, followed)
        if counted is not None and own is None:
            yield "training.num_train_epochs", _setting(counted, followed)
        # batches are drawn by hand; the optimizer steps once a round, if it does not do so in the loop inside or now and then
        elif counted is not None and stepping_loop(followed.script, loop) is around:
            yield "training.max_steps", _setting(counted, followed)
        for test, steps in counted_steps(followed, loop):
            yield "training.max_steps", _of(test, steps, followed)
        for test, steps in loss_read_every(followed, loop):
            yield "training.logging_steps", _of(test, steps, followed)


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


def _of(node: ast.expr, value: Any, followed: Followed) -> Setting:
    return Setting(value, followed.script.place(node), followed.script.words(node))


def _setting(counted: Made, followed: Followed) -> Setting:
    return Setting(times(counted), followed.script.place(counted.node), followed.script.words(counted.node))


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
