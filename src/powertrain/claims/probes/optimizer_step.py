"""AdamW's step alone, as torch carries it out: one tensor after another, several at a time, or all in one kernel."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    by_turns,
    enough_times,
    medians,
    one_of,
    ratio,
    seconds_of,
)
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import open_training
from powertrain.training.setup import Setup

WAYS: Mapping[str, Mapping[str, bool]] = {
    "loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True}}


def measure(context: Context, *, words: Sequence[str], a: str = "foreach", b: str = "fused", steps: int = 4,
            repeats: int = REPEATS) -> Measured:
    """Arm b over arm a, of loop, foreach and fused, on the trained weights of the recipe.

    Detail: `share`, what arm a is of a whole step, of which `steps` are timed beside it, and `at_most`, how many times as fast
    the whole step could then become if the update took no time at all.
    """
    for name, way in (("a", a), ("b", b)):
        one_of(name, way, tuple(WAYS))
    rounds = apart(_rounds, words, context.cache, context.deadline, (a, b), steps, repeats)
    share = statistics.median(values[0] / values[2] for values in rounds)
    return Measured(ratio(rounds, 0, 1), "times as fast", a, b,
                    {"seconds": medians(rounds, (a, b, "whole step")), "share": share, "at_most": 1 / (1 - min(share, 0.99))})


def _rounds(words: Sequence[str], cache: Path, deadline: float, ways: tuple[str, str], steps: int, repeats: int) -> Rounds:
    training = open_training(words, cache)
    device = training.setup.device
    updates = [_updates(training.setup, way) for way in ways]
    times = [enough_times(update.step, device) for update in updates]
    arms = [lambda u=update, n=count: seconds_of(u.step, device, n)
            for update, count in zip(updates, times, strict=True)]
    return by_turns([*arms, lambda: training.step_s(steps)], deadline, repeats)


def _updates(setup: Setup, way: str) -> torch.optim.AdamW:
    """An optimizer of weights like the recipe's, with gradients, that hardly moves them."""
    weights = [torch.nn.Parameter(weight.detach().clone()) for weight in setup.model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return torch.optim.AdamW(weights, lr=1e-9, **WAYS[way])  # type: ignore[arg-type]
