"""Examples: what the model reads and what it should predict; and blocks, the examples that are cut from a stream of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from powertrain.records import WrongUse


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


# ------------------------------------------------------------------------------------------------ blocks


class _Examples(Sequence[Example]):
    """Examples read from memory-mapped tokens when they are asked for."""

    tokens: npt.NDArray[Any]

    @abstractmethod
    def _span(self, index: int) -> tuple[int, int]:
        """Start and stop, in tokens, of the inputs of example `index`."""

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        within = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= within < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        start, stop = self._span(within)
        read = np.asarray(self.tokens[start:stop + 1], dtype=np.int64)
        return Example(inputs=read[:-1], targets=read[1:])


@dataclass(frozen=True, eq=False)
class Blocks(_Examples):
    """Training examples of `block` predicted tokens, starting every `stride` tokens.

    Example i reads the block + 1 tokens from i * stride; what is left at the end of the stream is not read.
    Raises WrongUse if not one block fits.
    """

    tokens: npt.NDArray[Any]                 # (T,) unsigned
    block: int
    stride: int

    def __post_init__(self) -> None:
        assert self.block > 0, self.block
        assert self.stride > 0, self.stride
        count = len(self.tokens)
        if count < 2:
            raise WrongUse(f"the training data has {count} tokens, and a block needs at least 2; give more text")
        if count < self.block + 1:
            raise WrongUse(f"a block of {self.block} tokens is longer than the {count} tokens of training data; "
                           f"use data.block={count - 1} or less")

    def __len__(self) -> int:
        return (len(self.tokens) - self.block - 1) // self.stride + 1

    def _span(self, index: int) -> tuple[int, int]:
        return index * self.stride, index * self.stride + self.block


@dataclass(frozen=True, eq=False)
class EvaluationBlocks(_Examples):
    """Blocks end to end, the last one shorter: every token but the first is a target exactly once.

    There are none if the stream has fewer than 2 tokens.
    """

    tokens: npt.NDArray[Any]                 # (T,) unsigned
    block: int

    def __post_init__(self) -> None:
        assert self.block > 0, self.block

    def __len__(self) -> int:
        return -(-max(0, len(self.tokens) - 1) // self.block)

    def _span(self, index: int) -> tuple[int, int]:
        return index * self.block, min((index + 1) * self.block, len(self.tokens) - 1)
