"""Which run `powertrain train` goes on with: in a folder, in the folder that the command would make, or from a mirror."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from powertrain.cli.options import say
from powertrain.records import WrongUse
from powertrain.records.addresses import is_address
from powertrain.records.event_log import read_events

if TYPE_CHECKING:
    from powertrain.run.folder import RunFolder


def run_to_continue(words: list[str], output: Path | None, resume: str | None, step: int | None, *, goes_on: bool
                    ) -> tuple[list[str], Path | None, RunFolder | None]:
    """Return the words and the output of a command, and the folder of the run that it continues: None for a new run.

    Raises WrongUse where there is no such run, and where it cannot go on, from `step` if that is given.
    """
    if step is not None and resume is None:
        raise WrongUse(f"--from-step {step} needs the run that it is a step of; name it with --resume")
    if goes_on and resume is None and (there := begun(words, output)) is not None:
        words, output, resume = [], None, str(there)
    if resume is None:
        return words, output, None
    if is_address(resume):
        resume, output = str(from_mirror(resume, output, step)), None
    folder = existing_run(Path(resume), words, output, step)
    read_events(folder.events)               # a damaged line is refused before the training
    return words, output, folder


def begun(words: Sequence[str], output: Path | None) -> Path | None:
    """Return the folder that the command names if a run has begun there, else None. Raises WrongUse if it is another run."""
    from powertrain.recipe import quoted, resolve_words
    from powertrain.run.folder import RunFolder, check_same

    resolved = resolve_words([*words, *([f"output_dir={quoted(str(output))}"] if output else [])])
    if not resolved.recipe.output_dir:
        raise WrongUse("--continue needs the folder of the run; name it with --output")
    folder = RunFolder(Path(resolved.recipe.output_dir))
    if not folder.recipe.is_file():
        return None
    check_same(folder, resolved)
    return folder.path


def from_mirror(address: str, output: Path | None, step: int | None = None) -> Path:
    """Return the folder of a run that was fetched from its mirror, with the checkpoint of this step, or its newest one."""
    from powertrain.launch.group import place_of
    from powertrain.mirror.returning import bring_back
    from powertrain.run.folder import RUNS

    if place_of(os.environ) is not None:
        raise WrongUse(f"the processes of a run cannot each fetch it; use `powertrain checkpoints fetch {address}` first, then "
                       "--resume with the folder")
    to = output or RUNS / address.rstrip("/").rpartition("/")[2]
    bring_back(address, to, say, step)
    return to


def existing_run(path: Path, words: Sequence[str], output: Path | None, step: int | None) -> RunFolder:
    """Return the folder of a run to continue, from `step` if that is given.

    Raises WrongUse where the command asks for another run, or for a step that the run cannot go on from.
    """
    from powertrain.launch.group import place_of
    from powertrain.run.folder import check_step, check_whole, existing

    if output is not None:
        raise WrongUse(f"--resume {path} continues in the run's own folder; leave --output out")
    if words and "=" not in words[0]:
        raise WrongUse(f"--resume {path} continues with the run's own recipe; leave {words[0]!r} out")
    folder = existing(path)
    check_whole(folder)
    if step is not None:
        check_step(folder, step)
        if place_of(os.environ) is not None:
            raise WrongUse(f"--from-step {step} is for one start, and what starts these processes may start them again with "
                           f"the same words; move the later checkpoints out of {folder.checkpoints} instead, and leave it out")
    return folder


def go_back_to(folder: RunFolder, step: int) -> None:
    """Set the checkpoints of later steps aside, and say so. Raises WrongUse where the run cannot go on from `step`."""
    from powertrain.run.folder import go_back

    if later := go_back(folder, step):
        say(f"set aside, not deleted: the checkpoints of the steps {', '.join(map(str, later))}")
