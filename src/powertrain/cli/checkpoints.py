"""`powertrain checkpoints`: those of a run's folder or of its mirror: what they say, whether they are whole, to and fro."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powertrain.cli import output as screen
from powertrain.cli.grouping import group
from powertrain.cli.options import Json, Place, Run, say
from powertrain.cli.streams import FAILED
from powertrain.records import NotDurable, WrongUse, to_plain
from powertrain.records.addresses import EXAMPLE, check_address, is_address
from powertrain.records.errors import DONE
from powertrain.records.events import Event, Uploaded
from powertrain.records.json_files import replace_file
from powertrain.records.sizes import memory
from powertrain.report.words import count

if TYPE_CHECKING:
    from powertrain.run.checkpoints import Checkpoint

Step = Annotated[int | None, typer.Option(help="Step of the checkpoint (default: the newest).")]
MOST_CHANGED = 5             # weights that `compare` names


def list_all(run: Place, as_json: Json = False) -> None:
    """List the checkpoints of a run."""
    from powertrain.run.checkpoints import in_mirror, opened

    with opened(run) as found:
        if as_json:
            screen.print_json(*({"event": "checkpoint", **_plain(one)} for one in found))
            return
        marks = {}
        for one in sorted((one for one in found if one.held_out_loss is not None), key=lambda one: one.held_out_loss or 0.0):
            if is_address(run) or one.wrong() is None:
                marks[one.step] = "lowest held-out loss"
                break
            marks[one.step] = f"not whole: `powertrain checkpoints verify {run}`"
        mirrored = {} if is_address(run) else in_mirror(Path(run))
        screen.print_rows([("step", "saved", "loss", "held-out loss", "tokens/s", "size", "", ""), *[
            (f"{one.step:,}", str(one.about.get("saved", "")), _number(one.number("loss")), _number(one.held_out_loss),
             _number(one.number("tokens_per_s")), memory(one.bytes), marks.get(one.step, ""), mirrored.get(one.path.name, ""))
            for one in found]])


def show(run: Place, step: Step = None, as_json: Json = False) -> None:
    """Show what a checkpoint says of itself, and its files."""
    from powertrain.run.checkpoints import one_of, opened

    with opened(run) as found:
        one = one_of(found, step)
    rows = [(key, _number(value)) for key, value in one.about.items() if not isinstance(value, dict)]
    rows += [(key, ", ".join(f"{name} {_number(part)}" for name, part in value.items()))
             for key, value in one.about.items() if isinstance(value, dict) and value]
    screen.tell({"event": "checkpoint", **_plain(one)},
                [*rows, *((name, memory(size)) for name, size in one.files.items())], as_json=as_json)


def verify(run: Place, as_json: Json = False) -> int:
    """Check every file of every checkpoint.

    Each file is read and held against its sha256. The exit code is 1 if a checkpoint is not whole.
    """
    from powertrain.run.checkpoints import verified

    found = []
    for one, why in verified(run):
        found.append((one, why))
        screen.tell({"event": "checkpoint", "path": one.place, "whole": why is None, "why_not": why},
                    [(one.path.name, "whole" if why is None else f"not whole: {why}")], as_json=as_json)
    whole = [one.path.name for one, why in found if why is None]
    if len(whole) == len(found):
        return 0
    if not as_json:
        screen.print_rows([("Cure", f"`powertrain train --resume {run}` goes on from {whole[-1]}, the newest whole one; "
                            "restore copies of the others, or move their folders away" if whole else
                            "restore a copy of one of them, or start a new run with another --output")])
    return FAILED


def compare(run: Place, first: Annotated[int, typer.Argument(help="Step of the first checkpoint.")],
            second: Annotated[int, typer.Argument(help="Step of the second checkpoint.")], as_json: Json = False) -> None:
    """Show how two checkpoints of a run differ.

    Their losses and speed, and how far the weights moved.
    """
    from powertrain.run.checkpoints import changes, one_of, opened

    with opened(run, whole=(first, second) if first != second else ()) as found:
        if first == second:
            steps = ", ".join(str(one.step) for one in found)
            raise WrongUse(f"step {first} is named twice; name two checkpoints of {run}, of the steps {steps}")
        before, after = one_of(found, first), one_of(found, second)
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


def plot(run: Place, output: Annotated[Path, typer.Option(help="File to write.")] = Path("losses.svg")) -> None:
    """Draw the losses of a run's checkpoints as an SVG file."""
    from powertrain.report.losses import losses_svg
    from powertrain.run.checkpoints import opened

    with opened(run) as found:
        rows = [(one.step, one.number("loss"), one.held_out_loss) for one in found]
    if not any(value is not None for row in rows for value in row[1:]):
        raise WrongUse(f"the checkpoints of {run} tell no loss; `powertrain report {run}` draws what its events tell")
    try:
        replace_file(output, losses_svg(run, rows).encode())
    except OSError as error:
        raise WrongUse(f"{output} cannot be written ({error.strerror or error}); name another file with --output") from None
    screen.print_rows([("Written", str(output))])


def upload(run: Run, to: Annotated[str | None, typer.Option(help=f"Address of another mirror, such as {EXAMPLE}.")] = None,
           step: Annotated[int | None, typer.Option(help="Step of one checkpoint (default: the newest, the one with the lowest "
                                                         "held-out loss, and the model).")] = None,
           as_json: Json = False) -> int:
    """Upload a run that is not training to its mirror.

    Each object is verified there. The exit code is 3 while something is not.
    """
    from powertrain.report.result import said
    from powertrain.run.checkpoints import upload as upload_run
    from powertrain.run.folder import existing, locked

    def listener(event: Event) -> None:
        if as_json:
            screen.print_event(event)
        elif isinstance(event, Uploaded):
            screen.print_rows([("Uploaded", f"{event.name}, {memory(event.bytes)}"),
                               *(("Deleted", f"{name}, in the mirror") for name in event.deleted)])
        elif (text := said(event)) is not None:
            say(text)

    with locked(existing(run)):
        return DONE if upload_run(run, to, step, listener) else NotDurable.exit_code


def fetch(address: Annotated[str, typer.Argument(help=f"Address of the run in its mirror, such as {EXAMPLE}/RUN.")],
          output: Annotated[Path | None, typer.Option(help="Folder for the run (default: runs/RUN).")] = None,
          step: Annotated[int | None, typer.Option(help="Step of the checkpoint (default: the newest).")] = None) -> None:
    """Fetch a run from its mirror.

    A checkpoint comes, what the run goes on from, and its model if it is finished.
    """
    from powertrain.mirror.returning import bring_back
    from powertrain.run.folder import RUNS

    to = output or RUNS / check_address(address).rpartition("/")[2]
    bring_back(address, to, say, step)
    screen.print_rows([("Fetched", str(to)), ("Continue", f"powertrain train --resume {to}")])


def prune(run: Place, keep: Annotated[int, typer.Option(min=1, help="Number of the newest checkpoints that stay.")],
          keep_every: Annotated[int, typer.Option(min=0, help="In a mirror, those of each multiple of so many steps stay too."
                                                  )] = 0,
          as_json: Json = False) -> None:
    """Delete old checkpoints, in a folder or a mirror.

    The newest checkpoints and the one with the lowest held-out loss stay.
    """
    from powertrain.run.checkpoints import prune as prune_run
    from powertrain.run.folder import existing, locked

    with contextlib.nullcontext() if is_address(run) else locked(existing(Path(run))):
        gone = prune_run(run, keep, keep_every)
    screen.tell({"event": "pruned", "deleted": gone}, [("Deleted", name) for name in gone or ["nothing"]], as_json=as_json)


def _plain(one: "Checkpoint") -> dict[str, Any]:
    plain = to_plain(one)
    return {**plain, "path": plain.pop("place")}


def _number(value: object) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "" if value is None else str(value)
    return count(value) if isinstance(value, int) or abs(value) >= 1000 else f"{value:#.4g}"


commands = group("List, check, move and delete checkpoints.", {
    "list": list_all, "show": show, "verify": verify, "compare": compare, "plot": plot, "upload": upload, "fetch": fetch,
    "prune": prune})
