"""`powertrain checkpoints`: what a run's checkpoints say of themselves, whether they are whole, and how two differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from powertrain.cli import output as screen
from powertrain.cli.options import Json, Run
from powertrain.records import WrongUse, to_plain
from powertrain.records.sizes import memory
from powertrain.report.words import count

if TYPE_CHECKING:
    from powertrain.run.checkpoints import Checkpoint

Step = Annotated[int | None, typer.Option(help="Step of the checkpoint (default: the newest).")]
MOST_CHANGED = 5             # weights that `compare` names


def list_all(run: Run, as_json: Json = False) -> None:
    """List the checkpoints of a run."""
    from powertrain.run.checkpoints import found_in

    found = found_in(run)
    if as_json:
        for one in found:
            screen.print_json({"event": "checkpoint", **_plain(one)})
        return
    marks = {}
    for one in sorted((one for one in found if one.held_out_loss is not None), key=lambda one: one.held_out_loss or 0.0):
        if one.wrong() is None:
            marks[one.step] = "lowest held-out loss"
            break
        marks[one.step] = f"not whole: `powertrain checkpoints verify {run}`"
    screen.print_rows([("step", "saved", "loss", "held-out loss", "tokens/s", "size", ""), *[
        (f"{one.step:,}", str(one.about.get("saved", "")), _number(one.number("loss")), _number(one.held_out_loss),
         _number(one.number("tokens_per_s")), memory(one.bytes), marks.get(one.step, "")) for one in found]])


def show(run: Run, step: Step = None, as_json: Json = False) -> None:
    """Show what a checkpoint says of itself, and its files."""
    from powertrain.run.checkpoints import one_of

    one = one_of(run, step)
    files = {file.name: file.stat().st_size for file in sorted(one.path.iterdir())}
    rows = [(key, _number(value)) for key, value in one.about.items() if not isinstance(value, dict)]
    rows += [(key, ", ".join(f"{name} {_number(part)}" for name, part in value.items()))
             for key, value in one.about.items() if isinstance(value, dict) and value]
    screen.tell({"event": "checkpoint", **_plain(one), "files": files},
                [*rows, *((name, memory(size)) for name, size in files.items())], as_json=as_json)


def verify(run: Run, as_json: Json = False) -> int:
    """Check every file of every checkpoint.

    Each file is read and held against its sha256. The exit code is 1 if a checkpoint is not whole.
    """
    from powertrain.run.checkpoints import found_in

    found = [(one, one.wrong()) for one in found_in(run)]
    for one, why in found:
        screen.tell({"event": "checkpoint", "path": str(one.path), "whole": why is None, "why_not": why},
                    [(one.path.name, "whole" if why is None else f"not whole: {why}")], as_json=as_json)
    whole = [one.path.name for one, why in found if why is None]
    if len(whole) == len(found):
        return 0
    if not as_json:
        screen.print_rows([("Cure", f"`powertrain train --resume {run}` goes on from {whole[-1]}, the newest whole one; "
                            "restore copies of the others, or move their folders away" if whole else
                            "restore a copy of one of them, or start a new run with another --output")])
    return screen.FAILED


def compare(run: Run, first: Annotated[int, typer.Argument(help="Step of the first checkpoint.")],
            second: Annotated[int, typer.Argument(help="Step of the second checkpoint.")], as_json: Json = False) -> None:
    """Show how two checkpoints of a run differ.

    Their losses and speed, and how far the weights moved.
    """
    from powertrain.run.checkpoints import changes, found_in, one_of

    if first == second:
        steps = ", ".join(str(one.step) for one in found_in(run))
        raise WrongUse(f"step {first} is named twice; name two checkpoints of {run}, of the steps {steps}")
    before, after = one_of(run, first), one_of(run, second)
    moved = changes(before, after)
    if as_json:
        screen.print_json({"event": "comparison", "first": _plain(before), "second": _plain(after), "moved": moved})
        return
    rows = [("", f"step {first:,}", f"step {second:,}")]
    rows += [(label, _number(before.number(key)), _number(after.number(key))) for key, label in (
        ("loss", "loss"), ("held_out_loss", "held-out loss"), ("trained_tokens", "trained tokens"),
        ("tokens_per_s", "tokens/s"))]
    screen.print_rows(rows)
    most = sorted((name for name in moved if name != "all"), key=lambda name: -moved[name])[:MOST_CHANGED]
    screen.print_rows([("Weights moved", "all", f"{moved['all']:.3%} of their norm"),
                       *(("", name, f"{moved[name]:.3%}") for name in most)])


def prune(run: Run, keep: Annotated[int, typer.Option(min=1, help="Number of the newest checkpoints that stay.")],
          as_json: Json = False) -> None:
    """Delete old checkpoints of a run that is not training.

    The newest checkpoints and the one with the lowest held-out loss stay.
    """
    from powertrain.run.checkpoints import prune as prune_run
    from powertrain.run.folder import existing, locked

    with locked(existing(run)):
        gone = prune_run(run, keep)
    screen.tell({"event": "pruned", "deleted": [str(one.path) for one in gone]},
                [("Deleted", f"{one.path.name}, {memory(one.bytes)}") for one in gone] or [("Deleted", "nothing")],
                as_json=as_json)


def _plain(one: Checkpoint) -> dict[str, Any]:
    return {**to_plain(one), "path": str(one.path)}


def _number(value: object) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "" if value is None else str(value)
    return count(value) if isinstance(value, int) or abs(value) >= 1000 else f"{value:#.4g}"

