"""What a run's checkpoints hold, for those who look at them: which there are, what they say of themselves, how two differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.records import WrongUse
from powertrain.records.json_files import read_json
from powertrain.run.folder import RunFolder, refuse_links
from powertrain.training.checkpoint import ABOUT, FILES, MANIFEST, checkpoints_in, keep_only, shard_name, what_is_wrong
from powertrain.training.stored import Stored


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint. Whether it is whole is not known until `wrong` was asked."""

    path: Path
    step: int
    about: Mapping[str, Any]                 # metadata.json; of older checkpoints only what state.json tells
    bytes: int

    def number(self, key: str) -> float | None:
        """Return a finite number that the checkpoint tells of itself; None where it tells none."""
        found = self.about.get(key)
        return found if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found) else None

    @property
    def held_out_loss(self) -> float | None:
        return self.number("held_out_loss")

    def wrong(self) -> str | None:
        """Return what is wrong with it, after reading all of it; None for a whole one."""
        return what_is_wrong(self.path)

    def weights(self) -> Stored:
        """Return its weights. Raises WrongUse where it is not whole."""
        if (why := self.wrong()) is not None:
            raise WrongUse(f"the checkpoint {self.path} is not whole: {why}")
        shards = read_json(self.path / MANIFEST).get("shards", 1)
        return Stored([self.path / shard_name(FILES[0], shard, shards) for shard in range(shards)])


def found_in(run: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run's folder by step. Raises WrongUse where there are none."""
    found = [_read(step, path) for step, path in checkpoints_in(run / "checkpoints").items()]
    if not found:
        raise WrongUse(f"{run} holds no checkpoints; `powertrain runs list` shows the runs")
    return found


def one_of(run: Path, step: int | None) -> Checkpoint:
    """Return the checkpoint of a step; the newest one where none is named."""
    found = found_in(run)
    if step is None:
        return found[-1]
    if (named := next((one for one in found if one.step == step), None)) is None:
        raise WrongUse(f"{run} has no checkpoint of step {step}; it has {', '.join(str(one.step) for one in found)}")
    return named


def _read(step: int, path: Path) -> Checkpoint:
    try:
        about = read_json(path / (ABOUT if (path / ABOUT).is_file() else FILES[2]))
    except (WrongUse, OSError):
        about = {}                           # `checkpoints verify` says what is wrong
    if "held_out_loss" not in about and isinstance(about.get("evaluations"), dict):
        about["held_out_loss"] = about["evaluations"].get(str(step))
    return Checkpoint(path, step, about, sum(file.stat().st_size for file in path.iterdir() if file.is_file()))


def changes(first: Checkpoint, second: Checkpoint) -> dict[str, float]:
    """Return how far each weight moved from one checkpoint to the other: |after - before| over |before|, in the L2 norm.

    "all" is that of all weights together. Raises WrongUse where they hold other weights.
    """
    before, after = first.weights(), second.weights()
    if {name: before.shape(name) for name in before.pieces} != {name: after.shape(name) for name in after.pieces}:
        raise WrongUse(f"{first.path} and {second.path} hold other weights than each other: they are not of one run")
    squares: dict[str, tuple[float, float]] = {}
    for name in before.pieces:
        old, new = before.read(name).double(), after.read(name).double()
        squares[name] = float((new - old).square().sum()), float(old.square().sum())
    squares["all"] = sum(moved for moved, _ in squares.values()), sum(size for _, size in squares.values())
    return {name: math.sqrt(moved / size) if size else math.inf if moved else 0.0 for name, (moved, size) in squares.items()}


def prune(run: Path, keep: int) -> list[Checkpoint]:
    """Delete all but the `keep` newest checkpoints and the one with the lowest held-out loss; return the deleted ones.

    Raises WrongUse, before anything is deleted, where one of them is damaged: it would count as one that is kept.
    """
    refuse_links(RunFolder(run))
    found = found_in(run)
    for one in found:
        if (why := one.wrong()) is not None:
            raise WrongUse(f"nothing was deleted: {one.path} is not whole ({why}); move that folder away first")
    losses = {one.step: one.held_out_loss for one in found if one.held_out_loss is not None}
    keep_only(run / "checkpoints", newest=keep, evaluations=losses)
    return [one for one in found if not one.path.exists()]
