"""Examples: the tokens that a model reads and their targets; blocks and batches of them.

Blocks are examples cut from a stream of tokens. A batch is examples laid end to end; only functions that make one load torch.

Which examples a step reads, and which of them share a forward pass, is decided by pure functions, so a run resumes without
state. The order is built on raw Philox output, whose stream numpy keeps across versions; the order that
Generator.permutation() gives is not promised. Source: numpy's NEP 19 (stream compatibility).
"""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from powertrain.records import IGNORE, Batch, Source, WrongUse

if TYPE_CHECKING:
    from torch import Tensor

PAD = 0                                      # any token: nothing looks at it, and it trains nothing
SPLIT_STREAM = 2**64 - 1                     # the stream that draws the validation set: no epoch reaches this number


@dataclass(frozen=True, eq=False)
class Example:
    """A document of T tokens with its targets; see records.Batch for what they mean for each kind of model."""

    inputs: npt.NDArray[np.int64]                       # (T,)
    targets: npt.NDArray[np.int64]                      # (T,): targets[i] follows inputs[i]; (2,) for a span head
    source: npt.NDArray[np.int64] | None = None         # (S,) what an encoder reads
    segments: npt.NDArray[np.int64] | None = None       # (T,) 0 in the first text of a pair, 1 in its second

    @property
    def tokens(self) -> int:
        """All that is read: by the decoder and by the encoder."""
        return len(self.inputs) + (0 if self.source is None else len(self.source))


class StoredExamples(Sequence[Example]):
    """Examples read from memory-mapped tokens when they are asked for."""

    @abstractmethod
    def read(self, index: int) -> Example:
        """Read the example `index`, from 0 to one less than the length."""

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self.read(i) for i in range(*index.indices(len(self)))]
        within = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= within < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.read(within)


@dataclass(frozen=True, eq=False)
class Blocks(StoredExamples):
    """Examples of `block` predicted tokens, starting every `stride` tokens; the end of the stream that is left is not read.

    With `to_the_end` a last, shorter block reads the rest, so that blocks end to end predict every token but the first once.
    Raises WrongUse if not one block fits, except with `to_the_end`.
    """

    tokens: npt.NDArray[Any]                 # (T,) unsigned
    block: int
    stride: int
    to_the_end: bool = False

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if count < 2 and not self.to_the_end:
            raise WrongUse(f"the training data has {count} tokens, and a block needs at least 2; give more text")
        if not len(self) and not self.to_the_end:
            raise WrongUse(f"a block of {self.block} tokens is longer than the {count} tokens of training data; "
                           f"use data.block={count - 1} or less")

    def __len__(self) -> int:
        if self.to_the_end:
            return -(-max(0, len(self.tokens) - 1) // self.stride)
        return count_blocks(len(self.tokens), self.block, self.stride)

    def read(self, index: int) -> Example:
        start = index * self.stride
        read = np.asarray(self.tokens[start:start + self.block + 1], dtype=np.int64)
        return Example(inputs=read[:-1], targets=read[1:])


def count_blocks(tokens: int, block: int, stride: int) -> int:
    """Return how many blocks fit: block i starts at i * stride, and counts if i * stride + block + 1 <= tokens."""
    if block < 1 or stride < 1:
        raise WrongUse(f"blocks of {block} tokens every {stride} tokens: both must be at least 1")
    return max(0, (tokens - block - 1) // stride + 1)


def evaluation_blocks(tokens: npt.NDArray[Any], block: int) -> Blocks:
    """Return blocks end to end; none if the stream has fewer than 2 tokens."""
    return Blocks(tokens, block, block, to_the_end=True)


# ------------------------------------------------------------------------------------------------ batches


def collate(examples: Sequence[Example]) -> Batch:
    """Return one flat batch of at least one example: T = the sum of their lengths, no padding, each its own document."""
    import torch

    assert examples, "a batch needs an example"
    lengths = tuple(len(example.inputs) for example in examples)
    targets = np.concatenate([example.targets for example in examples])
    sources = [example.source for example in examples if example.source is not None]
    segments = [example.segments for example in examples if example.segments is not None]
    return Batch(
        tokens=_joined([example.inputs for example in examples]),
        targets=torch.from_numpy(targets),
        positions=_joined([np.arange(length, dtype=np.int64) for length in lengths]),
        lengths=lengths,
        trained_tokens=int(np.count_nonzero(targets != IGNORE)),
        source=Source(_joined(sources), tuple(map(len, sources))) if sources else None,
        segments=_joined(segments) if segments else None,
    )


def collate_padded(examples: Sequence[Example]) -> Batch:
    """As `collate`, each document padded to the longest one: the batch of trainers without packing.

    For causal models only: no token of a document sees the tokens behind its end.
    """
    longest = max(len(example.inputs) for example in examples)
    padded = [Example(_padded(example.inputs, longest, PAD), _padded(example.targets, longest, IGNORE))
              for example in examples]
    return replace(collate(padded), padding_tokens=sum(longest - len(example.inputs) for example in examples))


def collate_filled(examples: Sequence[Example], multiple: int) -> Batch:
    """As `collate`, with documents of padding behind the others where T would not be a multiple of `multiple`.

    For libraries that prepare their matrix products for each size: they then meet few sizes. No document of padding is
    longer than the longest real one, so that padding has no position that no token has, and costs no more attention.
    """
    missing = -sum(len(example.inputs) for example in examples) % multiple
    if not missing:
        return collate(examples)
    longest = max(len(example.inputs) for example in examples)
    whole, rest = divmod(missing, longest)
    fillers = [Example(np.full(length, PAD, dtype=np.int64), np.full(length, IGNORE, dtype=np.int64))
               for length in (longest,) * whole + ((rest,) if rest else ())]
    return replace(collate([*examples, *fillers]), padding_tokens=missing)


def real_documents(batch: Batch) -> int:
    """Return how many of a filled batch's documents are not padding."""
    left, count = batch.padding_tokens, len(batch.lengths)
    while left > 0:
        count -= 1
        left -= batch.lengths[count]
    return count


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> Tensor:
    import torch

    return torch.from_numpy(np.concatenate(parts))


def _padded(values: npt.NDArray[np.int64], length: int, filler: int) -> npt.NDArray[np.int64]:
    return np.concatenate([values, np.full(length - len(values), filler, dtype=np.int64)])


# ------------------------------------------------------------------------------------------------ order and packing


def seeded_order(seed: int, stream: int, count: int) -> npt.NDArray[np.int64]:
    """Return a permutation of `count` numbers, the same on every machine: (count,) int64."""
    key = np.array([seed, stream], dtype=np.uint64)
    # stable: two equal draws are possible, if unlikely, and must not depend on the sort's whim
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable").astype(np.int64, copy=False)


def draw_share(counts: Sequence[int], share: float, seed: int, most: int | None = None) -> list[int]:
    """Return the numbers of the units that validate, of units with these `counts`: `most` at most, and at least one.

    In the seed's order, each unit is drawn that brings the sum of the drawn counts nearer to `share` of all.
    """
    missing = share * sum(counts)
    drawn: list[int] = []
    for unit in seeded_order(seed, SPLIT_STREAM, len(counts)).tolist():
        if missing < 0.5 or len(drawn) == most:
            break
        if counts[unit] < 2 * missing:
            drawn.append(unit)
            missing -= counts[unit]
    return drawn or [counts.index(min(counts))]


@lru_cache(maxsize=2)  # a step may span two epochs, and the next step asks for the same ones
def epoch_order(seed: int, epoch: int, examples: int) -> npt.NDArray[np.int64]:
    """Return the order of `examples` in the 0-based `epoch`: (examples,) int64, read-only because it is shared."""
    order = seeded_order(seed, epoch, examples)
    order.setflags(write=False)
    return order


def cursor(step: int, train_batch_size: int, examples: int) -> tuple[int, int]:
    """Return epoch and position in it (both 0-based) of the first example of the 0-based optimizer step `step`."""
    return divmod(step * train_batch_size, examples)


def step_examples(seed: int, step: int, train_batch_size: int, examples: int) -> npt.NDArray[np.int64]:
    """Return the indices of the examples of the 0-based optimizer step `step`: (train_batch_size,) int64.

    The epochs run end to end: a step may finish one and begin the next, and no example is left out or seen twice.
    """
    epoch, position = cursor(step, train_batch_size, examples)
    parts = []
    missing = train_batch_size
    while missing > 0:
        part = epoch_order(seed, epoch, examples)[position:position + missing]
        parts.append(part)
        missing -= len(part)
        epoch, position = epoch + 1, 0
    return np.concatenate(parts)


def pack(lengths: Sequence[int], budget: int, *, crossover: float) -> list[list[int]]:
    """Return the indices of the documents of each pass: every document once, none split, as many tokens as `budget` at most.

    A document longer than the budget is a pass of its own. `crossover` is the length at which a document's attention
    costs as much as its matrix products, so that a document of l tokens costs l + l * l / crossover. Costliest pass
    first; within a pass the shortest document first, as kernels that group by length like it. Equal arguments give
    equal passes.

    Best fit, longest first, fixes how many passes there are (Johnson 1973: at most 11/9 of the fewest, plus one). The
    documents are then dealt out again, costliest first and each to the cheapest pass that has room, because attention makes
    one long document dearer than two short ones of as many tokens. Where that deal fails, the best fit stands.
    """
    if budget < 1 or crossover <= 0:
        raise ValueError(f"passes of at most {budget} tokens, crossover {crossover}: both must be above 0")
    longest_first = sorted(range(len(lengths)), key=lambda document: (-lengths[document], document))
    alone = [[document] for document in longest_first if lengths[document] > budget]
    rest = longest_first[len(alone):]
    fitted = _best_fit(lengths, rest, budget)
    passes = alone + (_dealt(lengths, rest, budget, len(fitted), crossover) or fitted)
    ordered = [sorted(documents, key=lambda document: (lengths[document], document)) for documents in passes]
    return sorted(ordered, key=lambda documents: (-sum(_cost(lengths[d], crossover) for d in documents), documents))


def _cost(length: int, crossover: float) -> float:
    return length + length * length / crossover


def _best_fit(lengths: Sequence[int], documents: Sequence[int], budget: int) -> list[list[int]]:
    """Put each document, in this order, into the fullest pass that has room for it."""
    passes: list[list[int]] = []
    rooms: list[tuple[int, int]] = []                    # (tokens left, pass), ascending
    for document in documents:
        place = bisect.bisect_left(rooms, (lengths[document], -1))
        left, found = rooms.pop(place) if place < len(rooms) else (budget, len(passes))
        if found == len(passes):
            passes.append([])
        passes[found].append(document)
        bisect.insort(rooms, (left - lengths[document], found))
    return passes


def _dealt(lengths: Sequence[int], documents: Sequence[int], budget: int, count: int,
           crossover: float) -> list[list[int]] | None:
    """Deal each document, in this order, to the cheapest of `count` passes that has room for it; None where none has."""
    passes: list[list[int]] = [[] for _ in range(count)]
    left, costs = [budget] * count, [0.0] * count
    for document in documents:
        open_passes = [i for i in range(count) if left[i] >= lengths[document]]
        if not open_passes:
            return None
        chosen = min(open_passes, key=lambda i: (costs[i], i))
        passes[chosen].append(document)
        left[chosen] -= lengths[document]
        costs[chosen] += _cost(lengths[document], crossover)
    return [documents for documents in passes if documents]
