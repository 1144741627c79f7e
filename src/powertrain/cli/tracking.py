"""`powertrain track`, and the followers that a training starts for its trackers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli import output as screen
from powertrain.cli.options import Json, say
from powertrain.cli.streams import FAILED
from powertrain.records import WrongUse
from powertrain.records.errors import DONE, first_line
from powertrain.records.event_log import POLL_S
from powertrain.records.events import RunWarning, TrackerFailed

if TYPE_CHECKING:
    from powertrain.run.folder import RunFolder
    from powertrain.run.part import Part
    from powertrain.tracking.beside import Followers

MISSING = ("not everything is there yet ({why}). The points are in events.jsonl, and `powertrain track {run} --to {name}` "
           "sends what is missing")


def followers_of(folder: RunFolder, names: Sequence[str], project: str | None = None, **more: bool) -> Followers | None:
    """Start a follower of the run for each tracker; None where there is none to start."""
    from powertrain.launch.group import without_place
    from powertrain.run.folder import stored_recipe
    from powertrain.tracking.beside import Followers
    from powertrain.tracking.material import followed, is_study

    if not names:
        return None
    recipe = {} if is_study(folder.path) else {key: value for key, (value, _) in stored_recipe(folder).items()}
    return Followers(followed(folder.path, project or recipe.get("project"), recipe), names, without_place(os.environ), **more)


def begin_following(part: Part, names: Sequence[str]) -> Followers | None:
    """Start the followers of a training. Where that fails, the run is told so and goes on."""
    try:
        return followers_of(part.folder, names, beside=True)
    except (OSError, WrongUse) as error:
        for name in names:
            part.emit(TrackerFailed(tracker=name, step=part.state.step, why=first_line(error)))
        return None


def say_missing(followers: Followers | None, run: Path, *, as_json: bool) -> None:
    """Wait a little for the trackers of a run that has ended, and say which of them has not everything."""
    for name, why in (followers.finish() if followers is not None else {}).items():
        sentence = MISSING.format(why=why, run=run, name=name)
        screen.tell({"event": "tracker_missing", "tracker": name, "why": why, "message": f"{name}: {sentence}"},
                    [(name, sentence)], as_json=as_json)


def track(run: Annotated[Path, typer.Argument(help="Folder of a run, or of a study.")],
          to: Annotated[list[str] | None, typer.Option("--to", metavar="TRACKER", help=(
              "Name of the tracker: tensorboard, wandb, mlflow or trackio; may be repeated (default: the recipe's report_to)."))
              ] = None,
          project: Annotated[str | None, typer.Option(help="Project of the run there (default: the recipe's, else what the "
                                                           "tracker's own variables say).")] = None,
          as_json: Json = False) -> int:
    """Send a run or a study to trackers.

    A run that still trains is followed to its end. What a tracker has already is not sent again.
    """
    from powertrain.run.folder import RunFolder, existing, is_being_written, stored_recipe
    from powertrain.tracking.material import is_study
    from powertrain.tracking.table import check_installed

    folder, study = RunFolder(run), is_study(run)
    if not study:
        existing(run)
    names: list[str] = [*dict.fromkeys(to)] if to else [] if study else stored_recipe(folder).get("report_to", ([],))[0]
    if not names:
        raise WrongUse("no tracker is named; use for example --to tensorboard")
    check_installed(names)
    followers, told = followers_of(folder, names, project), False
    assert followers is not None
    while not (over := followers.is_over()) or not told:
        if not told and (study or over or is_being_written(folder) is False):
            told = True
            followers.say_over()
        for event in followers.look():
            if as_json:
                screen.print_event(event)
            elif isinstance(event, RunWarning):
                say(event.sentence)
        time.sleep(POLL_S / 5)
    missing, places = followers.missing(), followers.places()
    for name in names:
        place, why = places.get(name), missing.get(name)
        sentence = MISSING.format(why=why, run=run, name=name) if why else f"everything is there: {place}"
        screen.tell({"event": "tracked", "tracker": name, "place": place, "why_not": why}, [(name, sentence)], as_json=as_json)
    return FAILED if missing else DONE
