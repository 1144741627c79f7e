"""A Python training script -> what it sets, each with its line, without running it.

`following.py` gives every call of a library with its arguments; here those that configure training become settings. Where two
calls of a kind set different things and it is not known which of them trains, what differs is unread. The script's own loop
says its epochs or optimizer steps, and how often it reads its loss. A counter of its own may end it:

    while step < 1000:                   while True:
        ...                                  ...
        optimizer.step()                     optimizer.step()
        step += 1                            step += 1
                                             if step > 1000:
                                                 break

The left takes 1000 steps, the right 1001: where the test stands, and whether it is `>` or `>=`, counts. Nothing is said of a
counter that another statement changes too or that does not count every optimizer step, nor of a loop that its data may end.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powertrain.audit import reading_calls
from powertrain.audit.calling import Followed
from powertrain.audit.config_values import vocabulary
from powertrain.audit.expressions import Expressions
from powertrain.audit.following import follow
from powertrain.audit.known_calls import all_fields, unwrapped
from powertrain.audit.launches import launches, says_launch
from powertrain.audit.project import load
from powertrain.audit.script import Script, Setting
from powertrain.audit.steps import Step, never_accumulates, outermost
from powertrain.audit.subject import Framework, Subject
from powertrain.audit.syntax import Loop, every, inside, names_in
from powertrain.audit.values import Made, Unread, is_known, plain

READING = (".item", ".tolist", "float")       # what copies a number from the device
COUNTING = ("range", "trange")               # `for epoch in range(3)`, `in trange(3)`, `in tqdm(range(3))`
BEFORE_ALL = -1                              # the place of a `while`'s own test among the statements of its body
Beyond = dict[type[ast.cmpop], int]          # counter minus limit when a loop ends by such a test, `counter >= limit`
BROKEN: Beyond = {ast.GtE: 0, ast.Eq: 0, ast.Gt: 1}          # the test under which the loop is left
GOES_ON: Beyond = {ast.Lt: 0, ast.NotEq: 0, ast.LtE: 1}      # the test under which it goes on
MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
ASSIGNED = re.compile(r"[\w.\"'\[\]]+\s*=")


@dataclass(frozen=True)
class End:
    """One test that ends a loop: a counter beside its limit."""

    counter: str
    limit: ast.expr
    beyond: int                              # see Beyond
    at: int                                  # the index of its statement in the loop's body, or BEFORE_ALL
    test: ast.expr
    leaves_all: bool                         # by `return`: the loops around too


def stepping_loop(script: Script, loop: Loop) -> Loop | None:
    """Return the innermost loop, from a training loop outwards, whose every round is surely one optimizer step."""
    for around in (loop, *script.loops(loop)):
        step = Step(script, around)
        if any(call.every_step for call in step.optimizer_steps):
            skips = any(isinstance(node, ast.Continue) and script.loops(node)[0] is around for node in inside(around))
            return None if skips or step.accumulates_by_accelerate else around
    return None


def counted_steps(followed: Followed, loop: Loop) -> Iterator[tuple[ast.expr, Any]]:
    """Yield (the test that ends a training loop, optimizer steps until then); the steps may be Unread."""
    stepping = stepping_loop(followed.script, loop)
    if stepping is None:
        return
    around = [stepping, *followed.script.loops(stepping)]
    if not isinstance(around[-1], ast.While):            # its data may end it first
        return
    for end in ends(stepping):
        ends_all = end.leaves_all or all(any(other.counter == end.counter for other in ends(outer)) for outer in around[1:])
        increments = [at for at, statement in enumerate(stepping.body) if ast.unparse(statement) == f"{end.counter} += 1"]
        if ends_all and len(increments) == 1 and stored(around[-1], end.counter) == 1:
            steps = _steps(followed, end, increments[0], stepping, around[-1])
            if isinstance(steps, Unread) or steps > 0:
                yield end.test, steps


def ends(loop: Loop) -> Iterator[End]:
    """Yield the tests that end a loop: those in its own body and that of its `while`."""
    tests = alternatives(loop.test, ast.And) if isinstance(loop, ast.While) else []
    found = [(test, BEFORE_ALL, GOES_ON, False) for test in tests]
    for at, statement in enumerate(loop.body):
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], (ast.Break, ast.Return)):
            returns = isinstance(statement.body[-1], ast.Return)
            found += [(test, at, BROKEN, returns) for test in alternatives(statement.test, ast.Or)]
    for test, at, beyond, leaves_all in found:
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, operator, right = test.left, type(test.ops[0]), test.comparators[0]
            for counter, limit, kind in ((left, right, operator), (right, left, MIRRORED.get(operator, operator))):
                if isinstance(counter, ast.Name) and kind in beyond:
                    yield End(counter.id, limit, beyond[kind], at, test, leaves_all)


def alternatives(test: ast.expr, operator: type[ast.boolop]) -> list[ast.expr]:
    """Return the parts of a test that `operator` joins; else the test itself."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, operator) else [test]


def stored(within: ast.AST, name: str) -> int:
    """Return how many statements assign to a name."""
    return sum(node.id == name and isinstance(node.ctx, ast.Store) for node in every(ast.Name, within))


def _steps(followed: Followed, end: End, incremented: int, stepping: Loop, around: Loop) -> Any:
    """Return the optimizer steps that are taken before the test ends the loop; Unread where that is not known."""
    limit = value_throughout(followed, around, end.limit)
    start = value_before(followed, around, ast.Name(end.counter, ast.Load()))
    if not (type(limit) is int and type(start) is int):
        return next((value for value in (limit, start) if isinstance(value, Unread)), Unread(followed.script.words(end.test)))
    taken = {call.node for call in Step(followed.script, stepping).optimizer_steps if call.every_step}
    stepped = next(at for at, statement in enumerate(stepping.body) if taken & set(followed.script.reached(statement)))
    ahead = (incremented < end.at) - (stepped < end.at)  # of the steps taken, by how much the counter is when it is tested
    return limit + end.beyond - start - ahead


def value_throughout(followed: Followed, loop: Loop, node: ast.expr) -> Any:
    """Return the value that an expression keeps while a loop runs; Unread if the loop changes it."""
    if any(stored(loop, name) for name in names_in(node)):
        return Unread(followed.script.words(node))
    return value_before(followed, loop, node)


def value_before(followed: Followed, loop: Loop, node: ast.expr) -> Any:
    """Return the value of an expression where a loop begins; Unread if it may have several."""
    read = Expressions(followed.script)
    values = [read.value(node, scope) for scope in followed.before.get(loop, [])]
    same = bool(values) and all(type(value) is type(values[0]) and value == values[0] for value in values)
    return values[0] if same else Unread(followed.script.words(node))


def settings_of_loops(training: reading_calls.Training) -> Iterator[tuple[str, Setting]]:
    """Yield the epochs of a loop around a loop over batches, or the steps of a loop that draws them; none with a Trainer."""
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
        passes = (Step(followed.script, each) for each in (loop, *followed.script.loops(loop)))
        accumulation = next(filter(None, (step.accumulation for step in passes)), None)
        if accumulation is not None and type(number := value_before(followed, loop, accumulation.every)) is int:
            yield "training.gradient_accumulation_steps", followed.script.setting(accumulation.every, number)
        for test, steps in counted_steps(followed, loop):
            yield "training.max_steps", followed.script.setting(test, steps)
        for test, steps in loss_read_every(followed, loop):
            yield "training.logging_steps", followed.script.setting(test, steps)


def loss_read_every(followed: Followed, loop: Loop) -> Iterator[tuple[ast.expr, int]]:
    """Yield (the test, N) where `if step % N == 0:` reads the training loss on the host, every N optimizer steps."""
    script, stepping = followed.script, stepping_loop(followed.script, loop)
    if stepping is None:
        return
    step = Step(script, stepping)
    trained = {name for call in step.backward for name in names_in(call.node)}
    for call in step.named(*READING):
        # `step % N` of `step % N == 0`, alone or with more that has to be so: `step % N == 0 and is_main`
        found = [(condition, part.left) for condition in call.conditions for part in alternatives(condition.test, ast.And)
                 if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], ast.Eq)
                 and isinstance(part.left, ast.BinOp) and isinstance(part.left.op, ast.Mod)]
        inside = all(any(script.is_within(call.node, statement) for statement in condition.body)
                     for condition in call.conditions)
        if len(found) != 1 or not inside or call.inner_loop:
            continue
        condition, remainder = found[0]
        steps = value_throughout(followed, stepping, remainder.right)
        counts = any(stored(stepping, name) for name in names_in(remainder.left))
        of_loss = any(not stored(condition, name) for name in trained & names_in(call.node))
        if type(steps) is int and steps > 0 and counts and of_loss:
            yield condition.test, steps


def counting(loop: Loop, followed: Followed) -> Made | None:
    """Return the call of `range` that a loop iterates over; None if there is none."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return None
    inside = set(ast.walk(loop.iter))
    return next((made for made in followed.calls if made.node in inside and made.name.rpartition(".")[2] in COUNTING), None)


def times(made: Made) -> Any:
    """Return how many rounds a loop over `range(stop)` or `range(start, stop)` has."""
    given = made.positional
    if len(given) not in (1, 2) or not all(isinstance(item, int) for item in given):
        return next((item for item in given if isinstance(item, Unread)), Unread("a loop"))
    return given[0] if len(given) == 1 else given[1] - given[0]


def read_script(path: Path, text: str | None = None, root: Path | None = None, shell: Path | None = None) -> Subject:
    """Return the settings of a Python script, or of another text in its place. Raises WrongUse where it cannot be parsed.

    `shell` is the shell script that is audited: it starts this one, and its commands are followed first.
    """
    script = replace(load(path, text, root), shell=shell)
    made: list[Subject] = []
    ways = [*launches(script)]
    seen = [follow(one) for _, one in ways]
    for at, ((said, one), mine) in enumerate(zip(ways, seen, strict=True)):
        paired = _dead(mine, seen[at == 0]) if says_launch(script) else frozenset()
        made.append(_subject(replace(one, dead=paired if one.command is None else _unused(mine)), mine, said))
    return replace(made[0], others=tuple(made[1:]))


def _dead(mine: Followed, theirs: Followed) -> frozenset[ast.AST]:
    """Return the statements under a condition that is always so in one launch and always the opposite in the other one."""
    opposite = {test: answers for test, answers in mine.tests.items() if len(answers) == 1 and None not in answers
                and theirs.tests.get(test) == {not next(iter(answers))}}
    return _unused(replace(mine, tests=opposite))


def _unused(followed: Followed) -> frozenset[ast.AST]:
    """Return the statements under a condition that was met and never held, or always did in the case of an `else`."""
    return frozenset(statement for test, answers in followed.tests.items() if len(answers) == 1 and None not in answers
                     for statement in (test.orelse if True in answers else test.body))


def _subject(script: Script, followed: Followed, launch: str = "") -> Subject:
    training = reading_calls.Training(followed)
    kinds = {name: frozenset(each.name for made in values for each in unwrapped(made))
             for name, values in followed.variables.items()}
    trained = frozenset(each.name for trainer in training.trainers for each in unwrapped(trainer.argument(0, "model")))
    sections = {name: made.node for name, made in training.sections.items() if isinstance(made.node, ast.Call)}
    spread: dict[ast.AST, dict[str, Setting]] = {
        made.node: _spread(made, made.node) for made in followed.calls
        if isinstance(made.node, ast.Call) and any(item.arg is None for item in made.node.keywords)}
    script = replace(script, unused=_unused(followed), kinds=kinds, sections=sections, trained=trained, spread=spread,
                     missing=tuple(followed.missing), refused=tuple(followed.refused))
    settings: dict[str, Setting] = {}
    unread: dict[str, Setting] = {}
    unknown = dict(reading_calls.unknown_arguments(followed))
    # what is in doubt comes last: it says nothing where the same is certain
    found = [*(found for made in followed.calls for found in reading_calls.settings_of_call(made, training)),
             *reading_calls.settings_written(training), *settings_of_loops(training)]
    for key, setting in sorted(found, key=lambda one: isinstance(one[1].value, Unread)):
        if key not in unknown:
            put(settings, unread, key, setting)
    if "accelerate.gradient_accumulation_steps" in settings and never_accumulates(script):
        settings.pop("training.gradient_accumulation_steps", None)       # each batch is a step
    return Subject(script.path, framework(followed), settings, unread, unknown, script, launch, tuple(followed.calls))


def _spread(made: Made, call: ast.Call) -> dict[str, Setting]:
    """Return the arguments that a call is surely given by `**` of a table."""
    spelled = {item.arg for item in call.keywords} | {*(all_fields(made.local) if made.local is not None else ())}
    return {name: setting for name, setting in made.named.items() if name not in spelled and name not in made.perhaps}


def put(settings: dict[str, Setting], unread: dict[str, Setting], key: str, setting: Setting) -> None:
    """Keep a setting under its vocabulary name; a setting that contradicts an earlier one makes both unread."""
    perhaps = setting.value.perhaps if isinstance(setting.value, Unread) else None
    if perhaps is not None and is_known(perhaps):
        key, value = vocabulary(key, plain(perhaps))
        if key in settings and settings[key].value == value:
            return                                       # as it is set for certain elsewhere
    if not is_known(setting.value):
        because = setting.value.because if isinstance(setting.value, Unread) else setting.spelled
        spelled = setting.spelled if because in setting.spelled else f"{setting.spelled} ({because})"
        key, _ = vocabulary(key, None if key == "model.torch_dtype" else False)
        settings.pop(key, None)
        unread.setdefault(key, Setting(None, setting.place, spelled))
        return
    key, value = vocabulary(key, plain(setting.value))
    before = settings.get(key)
    if before is not None and before.value != value:
        del settings[key]
        unread[key] = Setting(None, setting.place, f"{before.spelled} in line {before.place.line}, or {setting.spelled}")
    elif key not in unread:
        settings.setdefault(key, Setting(value, setting.place, shown(setting)))


def shown(setting: Setting) -> str:
    """Return a setting as the file spells it, with the value if the spelling does not show it."""
    value, spelled = plain(setting.value), setting.spelled.replace("'", '"')
    literal = str(value) in setting.spelled or repr(value).replace("'", '"') in spelled
    if value is True and spelled.endswith(")") and not ASSIGNED.match(spelled):
        return setting.spelled               # `torch.compile(model)`: the call itself is what switches it on
    return setting.spelled if literal or isinstance(value, (dict, float)) else f"{setting.spelled} (is {value!r})"


def framework(followed: Followed) -> Framework:
    """Return what trains: the trainer whose arguments are made, else the script's own loop, else an imported library."""
    imported, trainer = followed.script.all_imported, _trainer({made.name for made in followed.calls})
    if trainer is None and followed.script.training_loops:
        return "pytorch"
    bases = {name.split(".")[0] for name in imported}
    return trainer or _trainer(imported) or ("pytorch" if "torch" in bases else "transformers" if "transformers" in bases
                                             else "unknown")


def _trainer(used: set[str]) -> Framework | None:
    if any(name.startswith("trl.") for name in used):
        return "trl"
    theirs = (name for name in used if name.startswith("transformers.") or name in reading_calls.UNIMPORTED)
    if any(name.endswith(("Trainer", "TrainingArguments")) for name in theirs):
        return "transformers"
    return "accelerate" if any(name.startswith("accelerate.") and name.endswith("Accelerator") for name in used) else None
