"""What the loop and checkpoints ask of an optimizer, the updates that torch does not have, and weights in flat buffers.

`for_runs` makes a class of torch's, or one from here, into one that a run can use; `library_optimizer` does so for
bitsandbytes. `FlatOptimizer` updates one flat buffer per decay group, of which the model's weights and their gradients are
views: norm, clipping and update are one pass each over about two tensors, instead of a call for each of hundreds. The model is
not touched: its parameters stay the same objects, with other storage. Checkpoints hold the state of each weight, as with any
optimizer. The update must work element by element (`Row.can_be_flat`).

A gradient stays a view of the buffer from step to step, so that autograd adds to it; one fill clears it. A weight without
any gradient counts as one with zeros: the plain update would pass over the weight, and this one lets it decay. So a model
must not leave weights out.
"""

import contextlib
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.models.decoder import decay_groups
from powertrain.models.groups import factors_of
from powertrain.models.selection import ALIKE, Selection
from powertrain.records import WrongUse
from powertrain.training.ranks import ALONE, Ranks
from powertrain.training.sharded import total_norm

Groups = list[dict[str, Any]]                # each with "params" and their "weight_decay"
Moments = Mapping[nn.Parameter, Mapping[str, Tensor]]    # weight -> name -> tensor of the state
IN_A_BLOCK = re.compile(r"\.\d+\.")          # in the name of a weight: an item of a list of layers
ALIGNED = 16                                 # elements: a view begins at 64 bytes, as what torch's CPU allocator hands out does
ROW = 4096                                   # elements summed one after another: a longer fp32 sum loses digits of the norm
LEAST_NORM = 1e-6                            # added to the norm, as torch.nn.utils.clip_grads_with_norm_ does


class RunOptimizer(torch.optim.Optimizer):
    """An optimizer of a run. A subclass has torch's update, and these steps around it."""

    # torch's wrappers of these and of `step` keep its compiler out, and import it for that, which takes most of a second
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every weight that has a gradient, as the class beneath does."""
        beneath: Any = super().step
        return inspect.unwrap(beneath.__func__)(self, closure)

    def gather(self) -> None:
        """Put the gradients of a step where the update reads them."""

    def clip(self, max_grad_norm: float, ranks: Ranks = ALONE) -> Tensor:
        """Return the norm of all gradients, () fp32; scale larger ones down to `max_grad_norm`. 0: none are scaled."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = ranks.norm(total_norm(parameters))
        if max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        return norm

    def step_unless(self, bad: Tensor) -> None:
        """Update the weights, unless `bad`, () bool on the device. A fused update reads it there, else the host waits for it.

        In its first update torch's fused SGD would leave the momentum without a value. Apple's GPUs are untried, so they wait.
        """
        if self.defaults.get("fused") and not bad.is_mps and (self.state or not self.defaults.get("momentum")):
            self.found_inf = bad.float()
            self.step()
            del self.found_inf
        elif not bad:
            self.step()

    def follow(self, step: int) -> None:
        """Do what follows the update of `step`, from 1, and a step without one."""

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the weights to evaluate and to write: here those that it has anyway."""
        return contextlib.nullcontext()

    def moments(self) -> Moments:
        """Return the tensors of the state by weight, as a checkpoint holds them."""
        return {parameter: {name: value for name, value in self.state.get(parameter, {}).items() if isinstance(value, Tensor)}
                for group in self.param_groups for parameter in group["params"]}

    def restore(self, moments: Moments) -> None:
        """Put the state that `moments` gave back. Step counts stay on the host unless the update reads them on the device."""
        on_device = any(group.get("fused") or group.get("capturable") for group in self.param_groups)
        for parameter, found in moments.items():
            self.state[parameter] = {name: value if name == "step" and not on_device else value.to(parameter.device)
                                     for name, value in found.items()}


@cache
def for_runs(kind: str | type[Any], part: str | None = None, around: type[RunOptimizer] = RunOptimizer) -> type[Any]:
    """Return the optimizer class of a row (see optimizers.Row) as one for runs: a RunOptimizer.

    `around` has the steps around its update. Raises WrongUse if the library `part` is not installed.
    """
    if isinstance(kind, str):
        kind = {"Lion": Lion, "MuonAndAdamW": MuonAndAdamW}.get(kind) or (
            getattr(torch.optim, kind) if part is None else library_optimizer(kind))
    return kind if issubclass(kind, RunOptimizer) else type(kind.__name__, (around, kind), {"__doc__": kind.__doc__})


def parameter_groups(model: nn.Module, weight_decay: float, *, hidden_apart: bool = False,
                     selection: Selection = ALIKE) -> Groups:
    """Return what an optimizer is given: matrices decay, norms and biases do not.

    The learning rate of a group is the schedule's times its "lr_factor", which `selection` gives. With `hidden_apart` the
    hidden matrices are a group of their own, and each group says by "hidden" whether it is that one.
    """
    decaying, plain = decay_groups(model)
    groups: Groups = [{"params": decaying, "weight_decay": weight_decay, "lr_factor": 1.0},
                      {"params": plain, "weight_decay": 0.0, "lr_factor": 1.0}]
    if not selection.is_plain:
        factors = factors_of(model, selection)
        groups = [{**group, "params": [p for p in group["params"] if factors[p] == factor], "lr_factor": factor}
                  for group in groups for factor in sorted({*factors.values()}, reverse=True)]
    if hidden_apart:
        hidden = hidden_matrices(model)
        groups = [{**group, "params": [p for p in group["params"] if (p in hidden) is inside], "hidden": inside}
                  for group in groups for inside in (True, False)]
    return [group for group in groups if group["params"]]


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of the model's blocks: neither embeddings nor the head."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return {parameter for name, parameter in model.named_parameters()
            if parameter.dim() == 2 and IN_A_BLOCK.search(name) and parameter not in embeddings}


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a mean gradient. Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2."""

    def __init__(self, params: Groups, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                update = state["exp_avg"].lerp(gradient, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(gradient, 1 - beta2)


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups of hidden matrices, torch's AdamW for the others; they share groups and state.

    A projection that the model keeps fused (queries, keys and values; gate and up) is one matrix here.
    """

    def __init__(self, params: Groups, lr: float, betas: tuple[float, float], eps: float, **settings: Any):
        super().__init__(params, {"lr": lr})
        hidden = [group for group in self.param_groups if group["hidden"]]
        others = [group for group in self.param_groups if not group["hidden"]]
        self._parts: list[torch.optim.Optimizer] = []
        if hidden:
            self._parts.append(for_runs("Muon")(hidden, lr=lr, **settings))
        if others:
            self._parts.append(for_runs("AdamW")(others, lr=lr, betas=betas, eps=eps, foreach=False))
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        assert closure is None
        for part in self._parts:
            part.step()


def library_optimizer(name: str) -> type[Any]:
    """Return the class `name` of bitsandbytes.optim as one for runs. Raises WrongUse if bitsandbytes is not installed."""
    from powertrain.models.kernels.quantised import load_library

    loaded = load_library("bitsandbytes.optim", f"{name} comes from", "pip install bitsandbytes, or choose another optimizer",
                          keys=("optimizer.name",), cure=("optimizer=adamw",))
    library: Any = getattr(loaded, name)

    class Counted(RunOptimizer, library):  # type: ignore[misc]
        """bitsandbytes counts steps by an int, and checkpoints hold tensors. Its tables of quantiles are constants."""

        def update_step(self, group: dict[str, Any], parameter: Tensor, *index: int) -> None:
            state = self.state[parameter]
            state["step"] = int(state["step"])
            super().update_step(group, parameter, *index)
            state["step"] = torch.tensor(state["step"])

        def to_gpu(self) -> None:
            """Move nothing: states are made beside their weight, and a step count on the GPU would have to be waited for."""

        def moments(self) -> Moments:
            return {parameter: {name: value for name, value in found.items() if not name.startswith("qmap")}
                    for parameter, found in super().moments().items()}

        def restore(self, moments: Moments) -> None:
            """Put the state back into memory that the library has made, which may be paged."""
            for group_place, group in enumerate(self.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if not (found := moments.get(parameter)):
                        continue
                    self.init_state(group, parameter, group_place, place)
                    held = self.state[parameter]
                    for name, value in found.items():        # what the library does not know is no state of its own
                        held[name] = value if name == "step" else held[name].copy_(value) if name in held else value

    return Counted


# ------------------------------------------------------------------------------------------------ flat buffers


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

    def clip(self, max_grad_norm: float, ranks: Ranks = ALONE) -> Tensor:
        """Clip as RunOptimizer does, by division: a fused update divides as it reads. torch multiplies by the inverse."""
        gradients = [gradient for group in self.flat_groups if (gradient := group.flat.grad) is not None]
        rows = [torch.linalg.vector_norm(gradient.view(-1, ROW), dim=1) for gradient in gradients]
        norm = ranks.norm(torch.linalg.vector_norm(torch.cat(rows)))
        divisor = torch.clamp((norm + LEAST_NORM) / max_grad_norm, min=1.0) if max_grad_norm > 0 else None
        if self.defaults.get("fused"):
            self.grad_scale = divisor        # what torch's fused optimizers divide a gradient by, and store it so
        elif divisor is not None:
            torch._foreach_div_(gradients, divisor)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill gradients with zeros either way: without their views the next step would have to copy."""
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
