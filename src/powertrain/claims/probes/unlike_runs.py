"""Two recipes that are not the same training (another batch, another length): how fast each goes through its data.

Where the arms are one training, evidence/clock.py compares them step by step. Here the steps differ, so each arm takes steps
of its own, and what is counted is said: real tokens, examples or steps a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    by_turns,
    medians,
    one_of,
    ratio,
    seconds_of,
)
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import Training, open_training

UNITS = ("tokens", "examples", "steps")


def measure(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str], per: str = "tokens",
            steps: int = 8, repeats: int = REPEATS) -> Measured:
    """Arm b over arm a: `per` a second. `words` go to both. Detail: what the arm with shorter examples leaves unread."""
    one_of("per", per, UNITS)
    rounds, detail = apart(_rounds, [*words, *a], [*words, *b], context.cache, context.deadline, per, steps, repeats)
    names = (" ".join(a) or "as it is", " ".join(b) or "as it is")
    return Measured(ratio(rounds, 1, 0), "times as fast", *names, {f"{per}_per_s": medians(rounds, names), **detail})


def _rounds(a: Sequence[str], b: Sequence[str], cache: Path, deadline: float, per: str, steps: int,
            repeats: int) -> tuple[Rounds, dict[str, Any]]:
    trainings = [open_training(words, cache) for words in (a, b)]
    rounds = by_turns([lambda t=t: _rate(t, per, steps) for t in trainings], deadline, repeats)  # type: ignore[misc]
    return rounds, left_unread(*trainings)


def _rate(training: Training, per: str, steps: int) -> float:
    """Tokens, examples or steps a second over the next `steps` steps."""
    done = 0

    def take() -> None:
        nonlocal done
        for result in training.steps(steps):
            done += {"tokens": result.real_tokens, "examples": training.examples_per_step, "steps": 1}[per]

    seconds = seconds_of(take, training.setup.device)
    return done / seconds


def left_unread(a: Training, b: Training) -> dict[str, Any]:
    """What arm b, whose examples may be shorter, does not read of arm a's text."""
    one, other = a.prepared.facts.data, b.prepared.facts.data
    return {"cut_share": other.cut_examples / other.examples if other.examples else 0.0,
            "tokens_lost_share": 1 - other.train_tokens / one.train_tokens,
            "examples_per_step": {"a": a.examples_per_step, "b": b.examples_per_step}}
