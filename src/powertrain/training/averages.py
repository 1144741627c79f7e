"""An exponential moving average of the trained weights, beside them. The recipe asks for it: ema.decay.

After step t the average is the mean of the weights after steps 1 to t, each with the share decay^(t - i):

    average += (1 - decay) / (1 - decay^t) x (weights - average)

The divisor lets the shares sum to 1 from the first step on, so that the weights from before the training are no part of it: the
first average is the weights themselves. Training is the same to the bit. Evaluations, samples and the model use the average,
which trades places with the weights for so long. A step without an update counts as one whose weights are those before it.
Sources: Polyak & Juditsky 1992 (averaging); Kingma & Ba 2015, arXiv:1412.6980, section 3 (the divisor).
"""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.training.sharded import divided_as, own_part
from powertrain.training.updates import Moments, RunOptimizer

AVERAGE = "average"                          # its name in a checkpoint, beside those of the optimizer's state


class Averaging(RunOptimizer):
    """Steps around an update, whose weights it averages. A subclass has the update; see `averaging`."""

    decay: float
    averages: dict[Tensor, Tensor]           # of each tensor that is updated: a weight, or a flat buffer of weights

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take the weights after `step`, from 1, into the average."""
        weights = [own_part(weight) for weight in self._updated()]
        if not self.averages:
            self.averages = {weight: own_part(weight).detach().clone() for weight in self._updated()}
        share = (1 - self.decay) / (1 - self.decay ** step)
        torch._foreach_lerp_([*self.averages.values()], weights, share)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the averages inside. Before the first step it keeps its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Let weights and averages trade places: in their memory, which compiled and captured code knows."""
        for weight, average in self.averages.items():
            before = own_part(weight).clone()
            own_part(weight).copy_(average)
            average.copy_(before)

    def moments(self) -> Moments:
        """Return the averages too, as a part of the state."""
        for weight, average in self.averages.items():
            self.state[weight][AVERAGE] = divided_as(weight, average)
        try:
            return super().moments()
        finally:
            self._take_out()

    def restore(self, moments: Moments) -> None:
        super().restore(moments)
        self.averages = self._take_out()

    def _take_out(self) -> dict[Tensor, Tensor]:
        """Return the averages in the state, and leave it as the update knows it."""
        found: dict[Tensor, Tensor] = {
            weight: own_part(self.state[weight].pop(AVERAGE)) for weight in self._updated()
            if AVERAGE in self.state.get(weight, {})}
        for weight in [weight for weight, state in self.state.items() if not state]:
            del self.state[weight]           # an update makes its state where there is none
        return found

    def _updated(self) -> list[nn.Parameter]:
        return [weight for group in self.param_groups for weight in group["params"]]


@cache
def averaging(kind: Any) -> type[Any]:
    """Return the class of an optimizer for runs with an average of its weights: a field `decay` has to be set."""
    return type(kind.__name__, (Averaging, kind), {"__doc__": kind.__doc__})
