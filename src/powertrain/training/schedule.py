"""Learning-rate schedules: a pure function of the optimizer step, so that resuming needs no state."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then cosine or linear decay to `min_rate` x peak, or constant."""

    kind: str                                # "cosine", "linear" or "constant"
    learning_rate: float                     # the peak
    total_steps: int
    warmup_steps: int = 0
    min_rate: float = 0.0

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant":
            return self.learning_rate
        decaying_steps = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / decaying_steps)
        shape = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.learning_rate * (self.min_rate + (1 - self.min_rate) * shape)
