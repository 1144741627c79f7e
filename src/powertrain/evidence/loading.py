"""Batches without training: the passes of a plan, and the batches per second that its loader makes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from powertrain import planner
from powertrain.cost.fitting import total_bytes
from powertrain.evidence.stats import by_turns
from powertrain.facts.measure import seconds_of
from powertrain.models.model import Model
from powertrain.records import Plan
from powertrain.run.prepare import Prepared
from powertrain.training.objectives import objective_of
from powertrain.training.optimizers import plain_adamw
from powertrain.training.setup import MicroBatches, Setup, plain_setup

ABOUT_DATA = frozenset({"collate", "arrange", "micro_batch", "loader", "objective"})     # of Setup: what makes batches
WINDOW_S = 0.25              # of making batches
LEAST_BATCHES = 4
ENDLESS = 1 << 30            # optimizer steps


def data_side(prepared: Prepared, plan: Plan) -> Setup:
    """Return a setup that makes the batches of a run of `plan`, with an empty model."""
    model, recipe = Model(), prepared.recipe
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
    setup = plain_setup(model.to(prepared.facts.hardware.device), prepared.material.training, prepared.material.collate,
                        train_batch_size=recipe.train_batch_size, seed=recipe.seed,
                        optimizer=plain_adamw(recipe.learning_rate, (0.9, 0.999), 1e-8), objective=objective_of(recipe))
    for step in plan.steps:
        if step.technique.touches and step.technique.touches <= ABOUT_DATA:
            setup = step.technique.apply(setup)
    return setup


def predicted_bytes(prepared: Prepared, plan: Plan, step: int) -> int | None:
    """Return the predicted peak memory of optimizer step `step` (from 0); None where the model is not counted.

    Where examples differ in length the arithmetic is given the passes of that very step, not the fullest there can be: as if
    all were as one of them, each in turn, because a pass may be full of tokens or of targets.
    """
    facts = prepared.facts
    if facts.model.provider != "native":
        return None
    workload = planner.workload_of(facts, plan)
    if facts.data.kind == "blocks":
        return total_bytes(facts.model, workload)
    passes = data_side(prepared, plan).prepare(step)
    alike = [replace(workload, documents=(tuple(batch.lengths),) * len(passes),
                     trained_share=batch.trained_tokens / sum(batch.lengths)) for batch in passes]
    return max(total_bytes(facts.model, one) for one in alike)


def loader_rates(prepared: Prepared, plans: Sequence[Plan], deadline: float) -> list[list[float]]:
    """Return the batches per second of each plan's loader, one figure for each turn. `deadline`: see by_turns."""
    feeds = [Feed(data_side(prepared, plan), plan) for plan in plans]
    try:
        count = max(LEAST_BATCHES, math.ceil(WINDOW_S * feeds[0].batches_per_s(1)))
        turns = {str(place): partial(feed.batches_per_s, count) for place, feed in enumerate(feeds)}
        return list(by_turns(turns, deadline).values())
    finally:
        for feed in feeds:
            feed.close()


class Feed:
    """A loader that continues where it was, so that its threads start once."""

    def __init__(self, setup: Setup, plan: Plan):
        self._device = setup.device
        self._batches: Iterator[MicroBatches] = setup.loader(setup.prepare, range(ENDLESS), setup.device)
        # the batches made ahead while other loaders had their turn are used up before the clock starts
        self._ahead = max((int(getattr(step.technique, "ahead", 0)) for step in plan.steps), default=0)

    def batches_per_s(self, count: int) -> float:
        """Return the speed of making so many batches and copying them to the device."""
        self._take(self._ahead + 1)
        return count / seconds_of(partial(self._take, count), self._device.type)

    def _take(self, count: int) -> None:
        for _ in range(count):
            for batch in next(self._batches):
                batch.to(self._device)

    def close(self) -> None:
        self._batches.close()  # type: ignore[attr-defined]
