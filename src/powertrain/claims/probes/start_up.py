"""From the recipe to everything that is needed for the first step: with the text tokenised before, and for the first time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from powertrain.claims.probes.probe import FEWEST, Context, Measured, Rounds, by_turns, medians, ratio, seconds_of
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import quiet
from powertrain.facts.hardware import read_hardware
from powertrain.recipe import resolve_words
from powertrain.run.prepare import build_setup, prepare

NAMES = ("text not tokenised yet", "text tokenised before")


def measure(context: Context, *, words: Sequence[str], repeats: int = FEWEST) -> Measured:
    """Cached over raw: times as fast to the point where the first step may begin."""
    rounds = apart(_rounds, words, context.cache, context.folder, context.deadline, repeats)
    return Measured(ratio(rounds, 0, 1), "times as fast", *NAMES, {"seconds": medians(rounds, NAMES)})


def _rounds(words: Sequence[str], cache: Path, folder: Path, deadline: float, repeats: int) -> Rounds:
    read_hardware(cache)                     # the machine's peaks are measured once, and are not the data's matter
    resolved, here = resolve_words(words), torch.device("cpu")

    def fresh() -> Path:
        beside = Path(tempfile.mkdtemp(dir=folder)) / "cache"
        shutil.copytree(cache / "hardware", beside / "hardware")
        return beside

    def seconds(where: Path) -> float:
        return seconds_of(lambda: build_setup(prepare(resolved, where, quiet)), here)

    kept = fresh()
    seconds(kept)
    return by_turns([lambda: seconds(fresh()), lambda: seconds(kept)], deadline, repeats)
