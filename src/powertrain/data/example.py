"""One thing to learn from: what the model reads, and what it should say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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
