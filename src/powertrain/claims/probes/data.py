"""Probes of the data side: loaders with worker processes, and parallel tokenising."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, RandomSampler

from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    Training,
    apart,
    by_turns,
    medians,
    one_of,
    open_training,
    ratio,
)
from powertrain.data.example import Example
from powertrain.evidence.stats import interval
from powertrain.evidence.worker import wait_for
from powertrain.records import Batch, RunFailed
from powertrain.training.loop import backward, update
from powertrain.training.setup import Arrange, MicroBatches, Setup

# ------------------------------------------------------------------------------------------------ data_loading
# Loading as other trainers do it, one item at a time through torch's DataLoader, with and without worker processes.
#
# Each arm has a loader of its own that lasts, and trains the same model in its turn. Before a window is timed its workers'
# batches that were fetched ahead during the other arms' turns are used up.

METRICS = ("step", "loading", "wait")
AHEAD = 2                                    # batches that a worker fetches ahead: torch's default
OURS = -1                                    # in place of a number of workers: this program's own way
ENDLESS = 1 << 30                            # steps, or examples


def data_loading(context: Context, *, words: Sequence[str], a: int, b: int, also: Sequence[int] = (), steps: int = 12,
                 repeats: int = REPEATS, metric: str = "step") -> Measured:
    """Compare loaders with `a` and `b` worker processes; -1 = batches as Powertrain makes them.

    metric "step": arm b over arm a, times as fast. "loading": the same without training. "wait": the share of its time that
    arm b waits for data. Detail has the times of all, and `wait_a` and `wait_b`.
    """
    one_of("metric", metric, METRICS)
    workers = [*dict.fromkeys((a, b, *also))]
    rounds, waits = apart(_loading_rounds, words, context.cache, context.deadline, workers, steps, repeats, metric != "loading")
    names = [_workers_name(count) for count in workers]
    detail: dict[str, Any] = {"step_s": medians(rounds, names), "waiting_share": medians(waits, names),
              "wait_a": interval([values[workers.index(a)] for values in waits]),
              "wait_b": interval([values[workers.index(b)] for values in waits])}
    if metric == "wait":
        return Measured(detail["wait_b"], "of the time", _workers_name(a), _workers_name(b), detail)
    return Measured(ratio(rounds, workers.index(a), workers.index(b)), "times as fast", _workers_name(a), _workers_name(b),
                    detail)


def _loading_rounds(words: Sequence[str], cache: Path, deadline: float, workers: Sequence[int], steps: int, repeats: int,
                    training_too: bool) -> tuple[Rounds, Rounds]:
    """Return the seconds of a step and the share of them spent waiting for data, of each arm in each repeat."""
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
    """Return the seconds of a window, and how many of them were spent waiting for data."""
    device, waited = training.setup.device, 0.0
    wait_for(device)
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        found = next(batches)
        waited += time.perf_counter() - asked
        if training_too:
            _train(training, [batch.to(device) for batch in found])
    wait_for(device)
    return time.perf_counter() - began, waited


def _train(training: Training, micro_batches: MicroBatches) -> None:
    tokens = sum(batch.trained_tokens for batch in micro_batches)
    backward(training.setup, training.state.scaler, micro_batches, tokens)
    update(training.state, training.prepared.recipe.max_grad_norm)


def _fed(setup: Setup, workers: int) -> Iterator[MicroBatches]:
    """Return an endless iterator of a step's batches, made by `workers` processes."""
    if workers == OURS:
        return setup.loader(setup.prepare, range(ENDLESS), setup.device)
    items = Items(setup.examples)
    several: Mapping[str, Any] = {"persistent_workers": True, "prefetch_factor": AHEAD} if workers else {}
    return iter(DataLoader(items, setup.train_batch_size, sampler=RandomSampler(items, replacement=True, num_samples=ENDLESS),
                           num_workers=workers, collate_fn=Stack(setup.arrange, setup.collate, setup.micro_batch), **several))


@dataclass(frozen=True)
class Items(Dataset[Example]):
    """A data set that reads one example at a time."""

    examples: Sequence[Example]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


@dataclass(frozen=True)
class Stack:
    """Arranges and collates a step's examples in the worker process."""

    arrange: Arrange
    collate: Callable[[Sequence[Example]], Batch]
    micro_batch: int

    def __call__(self, examples: Sequence[Example]) -> MicroBatches:
        return [self.collate(part) for part in self.arrange(examples, self.micro_batch)]


def _workers_name(workers: int) -> str:
    return "batches as Powertrain makes them" if workers == OURS else f"{workers} workers"


# ------------------------------------------------------------------------------------------------ tokenising
# Tokenising in parallel or not: rows a second of the tokenizers library, as TOKENIZERS_PARALLELISM says.
#
# The library reads the variable once, so each turn is a process of its own; its start is not timed.

CODE = """
import os, sys
os.putenv("TOKENIZERS_PARALLELISM", sys.argv[1])
import json, time
from tokenizers import Tokenizer
tokenizer, rows = Tokenizer.from_file(sys.argv[2]), json.load(open(sys.argv[3], encoding="utf-8"))
tokenizer.encode_batch(rows[:100])
began = time.perf_counter()
tokenizer.encode_batch(rows)
print(time.perf_counter() - began)
"""
CHARACTERS, ROW = 3_000_000, 1_000
NAMES = ("TOKENIZERS_PARALLELISM=false", "TOKENIZERS_PARALLELISM=true")


def tokenising(context: Context, *, repeats: int = REPEATS) -> Measured:
    """Return how many times as fast parallel tokenising is."""
    tokenizer, rows = _tokenising_material(context.folder)

    def seconds(parallel: str) -> float:
        done = subprocess.run([sys.executable, "-c", CODE, parallel, str(tokenizer), str(rows)], capture_output=True, text=True,
                              check=False)
        if done.returncode != 0:
            raise RunFailed(f"tokenising failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        return float(done.stdout)

    rounds = by_turns([lambda: seconds("false"), lambda: seconds("true")], context.deadline, repeats)
    return Measured(ratio(rounds, 0, 1), "times as fast", *NAMES, {"seconds": medians(rounds, NAMES), "characters": CHARACTERS})


def _tokenising_material(folder: Path) -> tuple[Path, Path]:
    """Write a BPE tokenizer of 2048 tokens and rows of Python's standard library, and return both paths."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = ""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_text(encoding="utf-8", errors="ignore")
        if len(text) > CHARACTERS:
            break
    rows = [text[at:at + ROW] for at in range(0, min(len(text), CHARACTERS), ROW)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(rows[:300], trainers.BpeTrainer(vocab_size=2048, show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder / "tokenizer.json", folder / "rows.json"
