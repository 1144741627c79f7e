"""Updates that are not made: where loss or gradient norm is not finite, or jumps far above those of the last steps (a spike).

The verdict is made on the device, and a fused update reads it there; the host reads it when it reads the losses. For any
other update the host waits for the verdict, as it does for that of torch's GradScaler; on a CPU there is nothing to wait for.
Loss and norm are those of the whole step, so all processes come to the same verdict. What follows from it: run/bad_steps.py.
Source of the rule for spikes: OLMo-core, SkipStepOptimizer (6 standard deviations, 128 steps).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

WINDOW = 128                 # steps whose updates were made: a step is compared with them, once there are so many
SIGMAS = 6.0                 # standard deviations above their mean
LEAST_RISE = 0.1             # of their mean: a smaller jump changes nothing, however quiet the curve (see diagnosis/)


@dataclass
class Guard:
    """What a run remembers of bad steps. A checkpoint holds all but `bad`."""

    bad: Tensor                              # () bool: the verdict of the last step
    window: Tensor | None = None             # (2, WINDOW) fp32, loss and norm, NaN where there was no step; None: no spikes
    in_row: int = 0                          # updates not made in a row, up to the last step that the host has read
    rewinds: int = 0
    passed_over: int = 0                     # batches between the step's own and the one it reads: what rewinds left out

    @classmethod
    def on(cls, device: torch.device, *, spikes: bool) -> Self:
        """Return the guard of a new run."""
        window = torch.full((2, WINDOW), math.nan, device=device) if spikes else None
        return cls(torch.zeros((), dtype=torch.bool, device=device), window)

    def judge(self, loss: Tensor, norm: Tensor, *, loss_scaling: bool) -> Tensor:
        """Set `bad`, and return whether the step's update must not be made, () bool on the device.

        With fp16's loss scaling, gradients that are not finite are ordinary: no update is made, and the step is not bad.
        """
        values = torch.stack([loss, norm.to(loss)])
        broken = (values - values).ne(0)     # inf - inf and NaN - NaN are NaN, and not equal to 0
        out = broken.any()
        self.bad = broken[0] if loss_scaling else out
        if self.window is not None:
            std, mean = torch.std_mean(self.window, dim=1)           # NaN until the window is full: then nothing is above
            spike = (values - mean > torch.maximum(SIGMAS * std, LEAST_RISE * mean.abs())).any() & ~out
            self.bad, out = self.bad | spike, out | spike
            self.window = torch.where(out, self.window, torch.cat([self.window[:, 1:], values[:, None]], dim=1))
        return out

    def stored(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON, which has no NaN."""
        window = None if self.window is None else [row[row.isfinite()].tolist() for row in self.window]
        return {"window": window, "in_row": self.in_row, "rewinds": self.rewinds, "passed_over": self.passed_over}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Put back what `stored` gave."""
        self.in_row, self.rewinds, self.passed_over = (stored[name] for name in ("in_row", "rewinds", "passed_over"))
        if self.window is not None:
            steps = torch.tensor(stored["window"] or [[], []]).to(self.window)
            self.window = torch.cat([torch.full_like(self.window, math.nan), steps], dim=1)[:, -WINDOW:]
