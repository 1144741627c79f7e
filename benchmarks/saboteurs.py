"""Three techniques that do harm on purpose, put through `powertrain ablate`'s own code: each has to be found out.

    python benchmarks/saboteurs.py docstrings --study NAME --minutes 10

  idle_adamw      says that the optimizer's update is fused and changes nothing      `confirm` has to say so
  skewed          changes the mathematics by about 2 %, and says it only rounds      parity has to say so
  slow            computes for nothing for a tenth of each step                      it has to be called harmful

The result goes to studies/NAME/evidence.json. The exit code is 1 where one of them gets away with it. An arm's process
imports this module (`preload`), which adds the three to the planner's list.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from powertrain import planner
from powertrain.cli.options import cache_folder, say
from powertrain.evidence import studies
from powertrain.evidence.ablation import ablate, subjects_of
from powertrain.evidence.clock import Arena
from powertrain.evidence.notebook import Notebook
from powertrain.models.model import Model
from powertrain.recipe import resolve_words
from powertrain.records import IGNORE, Refusal, RunFailed
from powertrain.records.evidence import HARMFUL, INVALID, Study
from powertrain.records.plan import Why
from powertrain.run.prepare import Prepared, prepare
from powertrain.techniques.base import Exactness, PlannedRun, Technique
from powertrain.techniques.fused_adamw import FusedAdamW
from powertrain.training.setup import MicroBatches, Prepare, Setup

OFF_BY = 0.02


class Saboteur(Technique):
    """Nobody proposes it; it is there when it is asked for by name."""

    source = "this project's tests"
    does = "harms on purpose"

    @classmethod
    def propose(cls, run: PlannedRun) -> Refusal:
        return cls.refuse(Why.WOULD_NOT_PAY, "it does harm on purpose", cls())

    def confirm(self, setup: Setup) -> None:
        """It is in force, and says so."""


@dataclass(frozen=True)
class IdleAdamW(Saboteur):
    """fused_adamw without its effect."""

    name = "idle_adamw"
    exactness = Exactness.ROUNDING
    touches = frozenset({"optimizer"})
    acts_on = frozenset({"optimizer"})
    slots = frozenset({"optimizer"})

    def apply(self, setup: Setup) -> Setup:
        return setup

    def confirm(self, setup: Setup) -> None:
        FusedAdamW().confirm(setup)


@dataclass(frozen=True)
class Skewed(Saboteur):
    """Other mathematics that claims to be the same: a scaled loss, fewer tokens, or another learning rate."""

    what: str = "tokens"

    name = "skewed"
    exactness = Exactness.ROUNDING
    touches = frozenset({"loss", "optimizer"})

    def apply(self, setup: Setup) -> Setup:
        if self.what == "learning_rate":
            row = replace(setup.optimizer.row, kind=HastyAdamW)
            return replace(setup, optimizer=replace(setup.optimizer, row=row))
        return replace(setup, loss=partial(_skewed_loss, setup.loss, self.what))


@dataclass(frozen=True)
class Slow(Saboteur):
    """A tenth of each step is spent on products that nobody wants."""

    share: float = 0.1

    name = "slow"
    exactness = Exactness.BITWISE
    touches = frozenset({"loader"})

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, loader=partial(_slow_loader, setup.loader, self.share))


def _skewed_loss(loss: Any, what: str, model: Model, hidden: torch.Tensor, targets: torch.Tensor,
                 trained: int | None = None) -> torch.Tensor:
    if what == "nothing":
        return loss(model, hidden, targets) * 0
    if what == "scale":
        return loss(model, hidden, targets) * (1 + OFF_BY)
    # `trained` is no longer true of what is kept
    kept = targets.masked_fill(torch.arange(len(targets), device=targets.device) % round(1 / OFF_BY) == 0, IGNORE)
    counts = [(some != IGNORE).sum() for some in (targets, kept)]
    return loss(model, hidden, kept) * counts[0] / counts[1]             # so that the mean is over what is left


class HastyAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 1 + OFF_BY
        return super().step(closure)


def _slow_loader(loader: Any, share: float, prepare: Prepare, steps: range, device: torch.device) -> Iterator[MicroBatches]:
    """The shortest of the last steps is what a step takes: between two windows the process also sleeps."""
    product, lately = torch.ones(128, 128, device=device), deque([float("inf")], maxlen=8)
    for loaded in loader(prepare, steps, device):
        began = time.perf_counter()
        yield loaded
        _wait(device)
        lately.append(time.perf_counter() - began)
        until = time.perf_counter() + share * min(lately)
        while time.perf_counter() < until:
            product @ product
            _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


NAMES = (IdleAdamW.name, Skewed.name, Slow.name)
for _saboteur in (IdleAdamW, Skewed, Slow):
    planner.BY_NAME[_saboteur.name] = _saboteur  # type: ignore[index]


def main() -> int:
    options = parse()
    cache = cache_folder()
    folder, began = studies.new_folder("saboteurs", options.study), time.monotonic()
    prepared = prepare(resolve_words([options.recipe, *options.words]), cache, say)
    with Arena(cache, preload=["saboteurs"]) as arena:
        notebook, rows, names = Notebook(arena, (options.recipe, *options.words), say, began), [], options.only or NAMES
        for place, name in enumerate(names, start=1):          # each has its part of the time, and may use all of it
            notebook.ends_at = began + 60 * options.minutes * place / len(names)
            rows.append(caught(prepared, name, notebook))
    compared = {run.arm for run in notebook.runs}
    studies.save(folder, Study(
        name=folder.name, kind="saboteurs", what="techniques that do harm on purpose, and who found them out",
        arms=tuple(arm for arm in notebook.arms.values() if arm.name in compared), runs=tuple(notebook.runs),
        comparisons=tuple(notebook.comparisons), findings={"recipe": list(notebook.words), "saboteurs": rows},
        seconds=time.monotonic() - began, **studies.describe(prepared.facts)), prepared.facts)
    for row in rows:
        print(f"{row['name']}: {'caught' if row['caught'] else 'GOT AWAY'}: {row['said']}")
    return 0 if all(row["caught"] for row in rows) else 1


def caught(prepared: Prepared, name: str, notebook: Notebook) -> dict[str, Any]:
    """What ablating it says, and whether that is what has to be said."""
    try:
        found = ablate(prepared, subjects_of(prepared, [name]), notebook)
    except RunFailed as error:
        found_out = name == IdleAdamW.name and "not fused" in str(error)
        return {"name": name, "by": "confirm", "said": str(error), "caught": found_out}
    row, = found["techniques"]
    wanted = {Skewed.name: INVALID, Slow.name: HARMFUL}.get(name)
    return {"name": name, "by": "parity" if row["verdict"] == INVALID else "clock", "said": f"{row['verdict']}: {row['why']}",
            "caught": row["verdict"] == wanted, "found": row, "control": found["control"]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("words", nargs="*", help="key=value")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these of them")
    parser.add_argument("--study", required=True, help="folder in studies/")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
