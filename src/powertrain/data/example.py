"""Examples: the tokens that a model reads and their targets; blocks and batches of them.

Blocks are examples cut from a stream of tokens. A batch is examples laid end to end; only functions that make one load torch.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from powertrain.records import IGNORE, Batch, Source, WrongUse

if TYPE_CHECKING:
    from torch import Tensor

PAD = 0                                      # any token: nothing looks at it, and it trains nothing


@dataclass(frozen=True, eq=False)
class Example:
    """A document of T tokens with its targets; see records.Batch for what they mean for each kind of model."""

    inputs: npt.NDArray[np.int64]                       # (T,)
    targets: npt.NDArray[np.int64]                      # (T,): targets[i] follows inputs[i]; (2,) for a span head
    source: npt.NDArray[np.int64] | None = None         # (S,) what an encoder reads
    segments: npt.NDArray[np.int64] | None = None       # (T,) 0 in the first text of a pair, 1 in its second

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the decoder and the encoder read."""
        return len(self.inputs) + (0 if self.source is None else len(self.source))


@dataclass(frozen=True, eq=False)
class Compared(Example):
    """A pair of answers, or a rated answer: what objectives that compare answers learn from.

    The `inputs` and `targets` of a pair are those of both documents, so that packing counts all their tokens.
    """

    documents: tuple[Example, ...] = ()      # of a pair: chosen, rejected; of a rating: it, and its prompt with another answer
    shared: int = 0                          # inputs that both documents of a pair begin with, before any answer
    desirable: bool = True                   # of a rating
    margin: float = 0.0                      # of a pair: by how much the chosen answer's reward is to be larger
    reference: tuple[float, float] | None = None         # the reference's log-probability of each document's targets


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
        found = range(len(self))[index]
        return [self.read(i) for i in found] if isinstance(found, range) else self.read(found)


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
    """Collate as `collate` does, each document padded to the longest one: the batch of trainers without packing.

    For causal models only: no token of a document sees the tokens behind its end.
    """
    longest = max(len(example.inputs) for example in examples)
    padded = [Example(_padded(example.inputs, longest, PAD), _padded(example.targets, longest, IGNORE))
              for example in examples]
    return replace(collate(padded), padding_tokens=sum(longest - len(example.inputs) for example in examples))


def collate_filled(examples: Sequence[Example], multiple: int) -> Batch:
    """Collate as `collate` does, with documents of padding at the end until T is a multiple of `multiple`.

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


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> "Tensor":
    import torch

    return torch.from_numpy(np.concatenate(parts))


def _padded(values: npt.NDArray[np.int64], length: int, filler: int) -> npt.NDArray[np.int64]:
    return np.concatenate([values, np.full(length - len(values), filler, dtype=np.int64)])
