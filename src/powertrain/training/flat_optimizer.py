"""Optimizers over one flat buffer per decay group, of which the model's weights and their gradients are views.

Norm, clipping and update are then one pass each over about two tensors, instead of a call for each of hundreds. The model is
not touched: its parameters stay the same objects, with other storage. Checkpoints hold the state of each weight, as with any
optimizer. The update must work element by element (`Row.can_be_flat`).

A gradient stays a view of the buffer from step to step, so that autograd adds to it; one fill clears it. A weight without
any gradient counts as one with zeros: the plain update would pass over the weight, and this one lets it decay. So a model
must not leave weights out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.records import WrongUse
from powertrain.training.updates import Moments, RunOptimizer

ALIGNED = 16                                 # elements: a view begins at 64 bytes, as what torch's CPU allocator hands out does
ROW = 4096                                   # elements summed one after another: a longer fp32 sum loses digits of the norm
LEAST_NORM = 1e-6                            # added to the norm, as torch.nn.utils.clip_grads_with_norm_ does


class FlatGroup:
    """The parameters of one group, and where they are in its buffer."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = parameters
        self.flat = nn.Parameter(flattened(parameters))      # (a multiple of ROW,) fp32, zero where no parameter is
        self.flat.grad = torch.zeros_like(self.flat)
        self.gradients = views_of(self.flat.grad, parameters)        # of each parameter, views of flat.grad

    def gather(self) -> None:
        """Copy gradients that something else has put in place of the views into the buffer; put the views back."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is not gradient:
                if parameter.grad is not None:
                    gradient.copy_(parameter.grad)
                parameter.grad = gradient

    def clear(self) -> None:
        assert self.flat.grad is not None
        self.flat.grad.zero_()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is not gradient:           # a first step that broke off
                parameter.grad = None


class FlatOptimizer(RunOptimizer):
    """Steps around an update whose `param_groups` hold the buffers. See updates.for_runs."""

    def __init__(self, params: Sequence[Mapping[str, Any]], **settings: Any):
        self.flat_groups = [FlatGroup(group["params"]) for group in params]
        super().__init__([{**group, "params": [one.flat]} for group, one in zip(params, self.flat_groups, strict=True)],
                         **settings)

    def gather(self) -> None:
        for group in self.flat_groups:
            group.gather()

    def clip(self, max_grad_norm: float) -> Tensor:
        """Clip as RunOptimizer does, by division: a fused update divides as it reads. torch multiplies by the inverse."""
        gradients = [gradient for group in self.flat_groups if (gradient := group.flat.grad) is not None]
        rows = [torch.linalg.vector_norm(gradient.view(-1, ROW), dim=1) for gradient in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.cat(rows))
        divisor = torch.clamp((norm + LEAST_NORM) / max_grad_norm, min=1.0) if max_grad_norm > 0 else None
        if self.defaults.get("fused"):
            self.grad_scale = divisor        # what torch's fused optimizers divide a gradient by, and store it so
        elif divisor is not None:
            torch._foreach_div_(gradients, divisor)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fills with zeros either way: without its views the next step would have to copy."""
        del set_to_none
        for group in self.flat_groups:
            group.clear()

    def moments(self) -> Moments:
        """Return the state by weight, as an optimizer of the weights themselves has it: views, and a step count for each."""
        found: dict[nn.Parameter, dict[str, Tensor]] = {}
        for group in self.flat_groups:
            found |= {parameter: {} for parameter in group.parameters}
            for key, value in self.state.get(group.flat, {}).items():
                parts = [value.clone() for _ in group.parameters] if key == "step" else views_of(value, group.parameters)
                for parameter, part in zip(group.parameters, parts, strict=True):
                    found[parameter][key] = part
        return found

    def restore(self, moments: Moments) -> None:
        """Put the state that `moments` gave back. Raises WrongUse where weights have taken different numbers of steps."""
        for group in self.flat_groups:
            found = [moments.get(parameter, {}) for parameter in group.parameters]
            if not any(found):
                self.state.pop(group.flat, None)
                continue
            self.state[group.flat] = {key: _joined([one[key] for one in found], group) for key in found[0] if key != "step"}
            steps = {float(one["step"]) if one else 0.0 for one in found if "step" in one or not one}
            if len(steps) > 1:
                raise WrongUse(f"the checkpoint's weights have taken between {min(steps):.0f} and {max(steps):.0f} steps, and "
                               "in a flat buffer all take the same; go on without flat buffers")
            if steps:
                on_device = self.defaults.get("fused") or self.defaults.get("capturable")
                self.state[group.flat]["step"] = torch.tensor(steps.pop(), device=group.flat.device if on_device else "cpu")


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of the buffer of each parameter, in the parameter's shape."""
    starts, _ = _places(parameters)
    return [flat.detach()[start:start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(starts, parameters, strict=True)]


def flattened(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the buffer that these parameters are views of; if there is none, make them views of a new one."""
    if (found := buffer_of(parameters)) is not None:
        return found
    if wrong := {parameter.dtype for parameter in parameters} - {torch.float32}:
        raise WrongUse(f"weights that are trained in {', '.join(sorted(map(str, wrong)))} do not go into a flat fp32 buffer; "
                       "leave them where they are, or train them in fp32")
    flat = torch.zeros(_places(parameters)[1], device=parameters[0].device)
    for parameter, view in zip(parameters, views_of(flat, parameters), strict=True):
        view.copy_(parameter.detach())
        parameter.data = view
    return flat


def buffer_of(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Return the buffer that holds these parameters in this order and nothing else; None where there is no such buffer."""
    storage = parameters[0].untyped_storage()
    starts, total = _places(parameters)
    if storage.nbytes() != total * torch.float32.itemsize:
        return None
    for start, parameter in zip(starts, parameters, strict=True):
        if (parameter.untyped_storage().data_ptr() != storage.data_ptr() or parameter.storage_offset() != start
                or parameter.dtype is not torch.float32 or not parameter.is_contiguous()):
            return None
    return parameters[0].detach().as_strided((total,), (1,), 0)


def _places(parameters: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each parameter begins in the buffer, and the length of the buffer, in elements."""
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += math.ceil(parameter.numel() / ALIGNED) * ALIGNED
    return starts, math.ceil(end / ROW) * ROW


def _joined(parts: Sequence[Tensor], group: FlatGroup) -> Tensor:
    flat = torch.zeros_like(group.flat, requires_grad=False)
    for view, part in zip(views_of(flat, group.parameters), parts, strict=True):
        view.copy_(part)
    return flat
