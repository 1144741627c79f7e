"""Which run `powertrain train` goes on with: in a folder, in the folder that the command would make, or from a mirror."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from powertrain.cli.options import say
from powertrain.records import WrongUse

if TYPE_CHECKING:
    from powertrain.run.folder import RunFolder


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


def from_mirror(address: str, output: Path | None) -> Path:
    """Return the folder of a run that was fetched from its mirror."""
    from powertrain.launch.group import place_of
    from powertrain.mirror.returning import bring_back
    from powertrain.run.folder import RUNS

    if place_of(os.environ) is not None:
        raise WrongUse(f"the processes of a run cannot each fetch it; use `powertrain checkpoints fetch {address}` first, then "
                       "--resume with the folder")
    to = output or RUNS / address.rstrip("/").rpartition("/")[2]
    bring_back(address, to, say)
    return to


def existing_run(path: Path, words: Sequence[str], output: Path | None) -> RunFolder:
    """Return the folder of a run to continue. Raises WrongUse where the command asks for another run."""
    from powertrain.run.folder import check_whole, existing

    if output is not None:
        raise WrongUse(f"--resume {path} continues in the run's own folder; leave --output out")
    if words and "=" not in words[0]:
        raise WrongUse(f"--resume {path} continues with the run's own recipe; leave {words[0]!r} out")
    folder = existing(path)
    check_whole(folder)
    return folder
