"""Loading as other trainers do it, one item at a time through torch's DataLoader, with and without worker processes.

Each arm has a loader of its own that lasts, and trains the same model in its turn. Before a window is timed its workers'
batches that were fetched ahead during the other arms' turns are used up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, RandomSampler

from powertrain.claims.probes.probe import REPEATS, Context, Measured, Rounds, by_turns, medians, one_of, ratio, wait
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import Training, open_training
from powertrain.data.example import Example
from powertrain.evidence.stats import interval
from powertrain.records import Batch
from powertrain.training.loop import backward, update
from powertrain.training.setup import Arrange, MicroBatches, Setup

METRICS = ("step", "loading", "wait")
AHEAD = 2                                    # batches that a worker fetches ahead: torch's default
OURS = -1                                    # in place of a number of workers: this program's own way
ENDLESS = 1 << 30                            # steps, or examples


def measure(context: Context, *, words: Sequence[str], a: int, b: int, also: Sequence[int] = (), steps: int = 12,
            repeats: int = REPEATS, metric: str = "step") -> Measured:
    """`a`, `b` and `also`: numbers of workers; -1 = batches as Powertrain makes them.

    metric "step": arm b over arm a, times as fast. "loading": the same without training. "wait": the share of its time that
    arm b waits for data. Detail has the times of all, and `wait_a` and `wait_b`.
    """
    one_of("metric", metric, METRICS)
    workers = [*dict.fromkeys((a, b, *also))]
    rounds, waits = apart(_rounds, words, context.cache, context.deadline, workers, steps, repeats, metric != "loading")
    names = [_named(count) for count in workers]
    detail: dict[str, Any] = {"step_s": medians(rounds, names), "waiting_share": medians(waits, names),
              "wait_a": interval([values[workers.index(a)] for values in waits]),
              "wait_b": interval([values[workers.index(b)] for values in waits])}
    if metric == "wait":
        return Measured(detail["wait_b"], "of the time", _named(a), _named(b), detail)
    return Measured(ratio(rounds, workers.index(a), workers.index(b)), "times as fast", _named(a), _named(b), detail)


def _rounds(words: Sequence[str], cache: Path, deadline: float, workers: Sequence[int], steps: int, repeats: int,
            training_too: bool) -> tuple[Rounds, Rounds]:
    """(seconds of a step, share of it spent waiting for data) of each arm in each repeat."""
    training = open_training(words, cache)
    arms = [_fed(training.setup, count) for count in workers]
    waits: list[list[float]] = [[] for _ in arms]

    def window(index: int) -> float:
        for _ in range(AHEAD * max(0, workers[index]) + 1):
            next(arms[index])
        seconds, waited = _window(training, arms[index], steps, training_too)
        waits[index].append(waited / seconds)
        return seconds / steps

    rounds = by_turns([lambda i=i: window(i) for i in range(len(arms))], deadline, repeats)  # type: ignore[misc]
    return rounds, list(zip(*waits, strict=True))


def _window(training: Training, batches: Iterator[MicroBatches], steps: int, training_too: bool) -> tuple[float, float]:
    """(seconds, those of them that were spent waiting for data)."""
    device, waited = training.setup.device, 0.0
    wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        found = next(batches)
        waited += time.perf_counter() - asked
        if training_too:
            _train(training, [batch.to(device) for batch in found])
    wait(device)
    return time.perf_counter() - began, waited


def _train(training: Training, micro_batches: MicroBatches) -> None:
    tokens = sum(batch.trained_tokens for batch in micro_batches)
    backward(training.setup, training.state.scaler, micro_batches, tokens)
    update(training.state, training.prepared.recipe.max_grad_norm)


def _fed(setup: Setup, workers: int) -> Iterator[MicroBatches]:
    """A step's batches without end, from `workers` processes."""
    if workers == OURS:
        return setup.loader(setup.prepare, range(ENDLESS), setup.device)
    items = Items(setup.examples)
    several: Mapping[str, Any] = {"persistent_workers": True, "prefetch_factor": AHEAD} if workers else {}
    return iter(DataLoader(items, setup.train_batch_size, sampler=RandomSampler(items, replacement=True, num_samples=ENDLESS),
                           num_workers=workers, collate_fn=Stack(setup.arrange, setup.collate, setup.micro_batch), **several))


@dataclass(frozen=True)
class Items(Dataset[Example]):
    """One example at a time, read when it is asked for."""

    examples: Sequence[Example]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


@dataclass(frozen=True)
class Stack:
    """A step's examples as its passes, made in the worker."""

    arrange: Arrange
    collate: Callable[[Sequence[Example]], Batch]
    micro_batch: int

    def __call__(self, examples: Sequence[Example]) -> MicroBatches:
        return [self.collate(part) for part in self.arrange(examples, self.micro_batch)]


def _named(workers: int) -> str:
    return "batches as Powertrain makes them" if workers == OURS else f"{workers} workers"
