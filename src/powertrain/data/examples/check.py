"""What is to be known about examples before they train: what was left out and why, their lengths, what padding would cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from powertrain.data.examples.store import ExampleStore, refuse_no_training
from powertrain.data.order import epoch_order
from powertrain.records.examples import Bar, ExampleCheck, Problem
from powertrain.shapes import length_quantiles

BARS = 12                                    # of the histogram, at most
SHOWN = 20                                   # duplicates and shared prompts that are named, of however many there are
CHECKED = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

Lengths = npt.NDArray[np.int64]


def check_examples(store: ExampleStore, *, train_batch_size: int, seed: int) -> ExampleCheck:
    """Raises WrongUse if there is no example to train on."""
    refuse_no_training(store)
    lengths, trained = store.training.lengths, store.training.trained
    duplicates = _duplicates(store)
    shared = _shared_prompts(store)
    return ExampleCheck(
        sources=store.sources, kind=store.kind, said=store.said, counts=store.counts,
        problems=(*store.problems,
                  *(Problem("duplicate", store.origins(second), f"repeats {store.origins(first)}")
                    for first, second in duplicates[:SHOWN].tolist()),
                  *(Problem("shared", store.origins(held), f"its prompt is trained on too, at {store.origins(learned)}")
                    for learned, held in shared[:SHOWN].tolist())),
        duplicates=len(duplicates), shared_prompts=len(shared), training_examples=len(lengths),
        validation_examples=int(store.in_validation.sum()), max_length=store.max_length,
        length_quantiles=length_quantiles(lengths, CHECKED),
        histogram=histogram(lengths), train_batch_size=train_batch_size,
        padding_shares=_padding_shares(store, train_batch_size, seed),
        epoch_tokens=int(lengths.sum()), epoch_trained_tokens=int(trained.sum()))


def histogram(lengths: Lengths) -> tuple[Bar, ...]:
    """Bars of equal width, a power of two, over all lengths."""
    width = 1
    while int(lengths.max()) // width - int(lengths.min()) // width >= BARS:
        width *= 2
    numbers, counts = np.unique(lengths // width, return_counts=True)
    found = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    return tuple(Bar(number * width, (number + 1) * width - 1, found.get(number, 0))
                 for number in range(min(found), max(found) + 1))


def padding_share(grids: list[Lengths], batch: int) -> float:
    """The share of padding, if batches of `batch` examples in this order are padded to their longest.

    `grids` are the lengths of what is padded apart: an encoder's texts and a decoder's.
    """
    padded = real = 0
    for lengths in grids:
        starts = np.arange(0, len(lengths), batch)
        in_batch = np.diff(starts, append=len(lengths))
        padded += int((np.maximum.reduceat(lengths, starts) * in_batch).sum())
        real += int(lengths.sum())
    return 1 - real / max(1, padded)


def _padding_shares(store: ExampleStore, batch: int, seed: int) -> dict[str, float]:
    lengths, sources = store.training.lengths, store.source_lengths[store.training.indices]
    grids = [lengths - sources, sources] if store.kind == "pair" else [lengths]
    orders = {"as drawn, padded": epoch_order(seed, 0, len(lengths)),
              "grouped by length, padded": np.argsort(lengths, kind="stable")}
    shares = {name: padding_share([grid[order] for grid in grids], batch) for name, order in orders.items()}
    return {**shares, "packed end to end": 0.0}


def _duplicates(store: ExampleStore) -> npt.NDArray[np.int64]:
    """(duplicates, 2): the first example of a row, and of a later row that is equal to it."""
    _, firsts = np.unique(store.rows(), return_index=True)   # a long text gives several examples
    digests = store.row_digests[firsts]
    _, earliest, group = np.unique(digests, return_index=True, return_inverse=True)
    first = earliest[group]
    later = np.flatnonzero(first != np.arange(len(digests)))
    return np.stack([firsts[first[later]], firsts[later]], axis=1).astype(np.int64)


def _shared_prompts(store: ExampleStore) -> npt.NDArray[np.int64]:
    """(prompts, 2): an example that trains and one that validates with the same prompt."""
    held = np.flatnonzero(store.in_validation)
    learned = np.flatnonzero(~store.in_validation)
    prompts = store.prompt_digests
    _, of_learned, of_held = np.intersect1d(prompts[learned], prompts[held], return_indices=True)
    return np.stack([learned[of_learned], held[of_held]], axis=1).astype(np.int64)
