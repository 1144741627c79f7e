"""What a frozen reference says of compared answers, beside the examples: the log-probability of each one's two documents.

    <cache>/reference/<key>/  scores.bin    float32 pairs, one for each example of the store
                              meta.json     how many there are

The key is a digest of all that decides the scores: the examples (their rows, tokenizer and template), the weights of the
reference, and the type that its products are computed in.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from powertrain.data.publishing import is_whole, mapped, publish
from powertrain.records import RunFailed

SCORES = "scores.bin"


class ReferenceScores:
    """The scores of a store's examples, from the moment when they are known."""

    def __init__(self) -> None:
        self._values: npt.NDArray[np.float32] | None = None              # (examples, 2)

    def of(self, index: int) -> tuple[float, float] | None:
        """Return the log-probabilities of an example's two documents, or None before they are known."""
        if self._values is None:
            return None
        first, second = self._values[index].tolist()
        return first, second

    def open(self, folder: Path) -> bool:
        """Read the scores in a folder of the cache; return whether they are there."""
        if not is_whole(folder):
            return False
        self._values = mapped(folder / SCORES, np.dtype("<f4")).reshape(-1, 2)
        return True

    def keep(self, values: npt.NDArray[np.float32], folder: Path | None) -> None:
        """Keep scores (examples, 2), and write them into a folder of the cache for later runs. Raises RunFailed for NaN."""
        if not np.isfinite(values).all():
            example = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise RunFailed(f"the reference gives example {example} a log-probability that is not finite, so nothing can be "
                            "compared with it; the model has weights that are not finite or too large: load it in fp32 "
                            "(techniques.bf16=off techniques.fp16=off), or use another model")

        def build(building: Path) -> dict[str, int]:
            (building / SCORES).write_bytes(values.astype("<f4").tobytes())
            return {"examples": len(values)}

        if folder is not None:
            publish(folder, build)
        self._values = values
