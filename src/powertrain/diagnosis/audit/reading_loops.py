"""What a script's own loop says of its training: how many epochs it goes through its data, or how many steps it takes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from powertrain.diagnosis.audit.following import Followed
from powertrain.diagnosis.audit.reading_calls import trained_with
from powertrain.diagnosis.audit.script import Loop
from powertrain.diagnosis.audit.steps import Step, outermost
from powertrain.diagnosis.audit.subject import Setting
from powertrain.diagnosis.audit.values import Made, Unread

COUNTING = ("range", "trange")               # `for epoch in range(3)`, `in trange(3)`, `in tqdm(range(3))`


def settings_of_loops(followed: Followed) -> Iterator[tuple[str, Setting]]:
    """The epochs of the loop around the one over batches, or the steps of one that draws them, unless a Trainer counts them."""
    if trained_with(followed) is not None:
        return
    for loop in followed.script.training_loops:
        around, own = outermost(followed.script, loop), counting(loop, followed)
        counted = counting(around, followed)
        if counted is None:
            continue
        if own is None:
            yield "training.num_train_epochs", _setting(counted, followed)
        # batches are drawn by hand; the optimizer steps once a round, if it does not do so in the loop inside or now and then
        elif any(call.every_step for call in Step(followed.script, around).optimizer_steps):
            yield "training.max_steps", _setting(counted, followed)


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
