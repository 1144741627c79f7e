"""Two recipes as whole runs, with all that lies between their steps: evaluation, checkpoints, logging."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from powertrain.claims.probes.probe import FEWEST, Context, Measured, by_turns, medians, ratio
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import quiet
from powertrain.evidence.stats import interval
from powertrain.recipe import resolve_words
from powertrain.records.events import End, Evaluated, Saved
from powertrain.run.prepare import prepare
from powertrain.run.session import start_run
from powertrain.training.events import read_events
from powertrain.use.sampling import write_sample

BETWEEN = ("evaluation", "checkpoint")       # events whose seconds are a share of the run's
Shares = tuple[float, float]


def measure(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str], repeats: int = FEWEST) -> Measured:
    """Arm b over arm a, times as fast, from the first step to the end. Detail: shares of evaluation and checkpoints."""
    found: tuple[list[tuple[float, Shares]], ...] = ([], [])

    def run(index: int) -> float:
        folder = context.folder / f"run-{index}-{len(found[index])}"
        found[index].append(apart(_run, [*words, *(a, b)[index]], context.cache, folder))
        return found[index][-1][0]

    rounds = by_turns([lambda: run(0), lambda: run(1)], context.deadline, repeats)
    names = (" ".join(a) or "as it is", " ".join(b) or "as it is")
    shares = {f"{what}_share_{arm}": vars(interval([share[i] for _, share in found[index]]))
              for i, what in enumerate(BETWEEN) for index, arm in enumerate("ab")}
    return Measured(ratio(rounds, 0, 1), "times as fast", *names, {"seconds": medians(rounds, names), **shares})


def _run(words: Sequence[str], cache: Path, folder: Path) -> tuple[float, Shares]:
    """(seconds, shares of evaluation and of checkpoints) of a run."""
    prepared = prepare(resolve_words([*words, f"output_dir={json.dumps(str(folder))}"]), cache, quiet)
    start_run(prepared, lambda event: None, write_sample)
    events = read_events(folder / "events.jsonl")
    seconds = next(event.seconds for event in reversed(events) if isinstance(event, End))
    evaluation_s = sum(event.seconds for event in events if isinstance(event, Evaluated))
    return seconds, (evaluation_s / seconds, sum(event.seconds for event in events if isinstance(event, Saved)) / seconds)
