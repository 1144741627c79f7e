"""What commands share: arguments and options, the cache folder, lines of progress, and times such as 10m."""

import contextlib
import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from powertrain.records import WrongUse
from powertrain.records.phases import Phase
from powertrain.records.redaction import redacted

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}

Words = Annotated[list[str] | None, typer.Argument(
    metavar="[RECIPE] [KEY=VALUE ...]", show_default=False,
    help="A recipe (file or name; default: the embedded recipe), then values that replace the recipe's values.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
Processes = Annotated[int, typer.Option(min=1, help="Number of processes of this machine that share the run, at most one for "
                                                    "each GPU, or for each core where there is no GPU.")]
Gpus = Annotated[int | None, typer.Option(min=1, show_default=False, help="As --processes, with a GPU for each process.")]
Machine = Annotated[str | None, typer.Option(metavar="NODESxDEVICESxKIND", help="A machine that is not here: 8xh100 or "
                                             "rtx-4090, from published figures, or the file that `powertrain facts --output` "
                                             "wrote there.")]
Model = Annotated[str, typer.Argument(show_default=False, help="Folder of a run, a model or an adapter, or a hub id.")]
Base = Annotated[str | None, typer.Option(help="For an adapter: the folder or hub id of its base model.")]
Provider = Annotated[str | None, typer.Option(help="Library that computes the model: native or transformers (default: native "
                                                   "if possible).")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Randomness of the text; 0 always takes the most likely token.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw from the K most likely tokens only.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Draw from the most likely tokens, up to this total "
                                                                  "probability.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random draws; the same seed gives the same text.")]
System = Annotated[str | None, typer.Option(help="System text of the conversation.")]
Budget = Annotated[str, typer.Option(help="Time to spend, such as 90s, 10m or 1h.")]
StudyName = Annotated[str | None, typer.Option("--study", help="Name of the folder in studies/ (default: DATE_COMMAND).")]
Place = Annotated[str, typer.Argument(metavar="RUN", help="Folder of the run, or its address in a mirror, such as "
                                      "s3://bucket/prefix/RUN.")]
Alert = Annotated[str | None, typer.Option(metavar="COMMAND|URL", show_default=False, help=(
    "Command to run, or address to POST to, when the run fails, stalls, has a NaN or ends (train: or POWERTRAIN_ALERT)."))]
Run = Annotated[Path, typer.Argument(help="Folder of the run.")]


def cache_folder() -> Path:
    """Return the folder of token stores and measurements: POWERTRAIN_CACHE, or the user's cache folder."""
    if named := os.environ.get("POWERTRAIN_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powertrain"


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage while modules are loaded, and never among what they have made: torch's objects are many, and stay."""
    if "torch" in sys.modules or not gc.isenabled():     # another program's objects are not ours to keep
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    print(f"... {redacted(text)}", file=sys.stderr, flush=True)


def tell(phase: Phase) -> None:
    """Print what a run does before its first step, on stderr."""
    say(phase.sentence)


def budget_s(text: str) -> float:
    """Return the seconds of "90s", "10m" or "1h"; a bare number is seconds."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) *(s|m|h|)", text.strip())
    if not found or not float(found[1]):
        raise WrongUse(f"--budget={text[:40]} is not a time; use for example 90s, 10m or 1h")
    return float(found[1]) * UNITS[found[2]]
