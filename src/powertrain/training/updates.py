"""What the loop and checkpoints ask of an optimizer, and the updates that torch does not have.

`for_runs` makes a class of torch's, or one from here, into one that a run can use; `library_optimizer` does so for
bitsandbytes. Weights in flat buffers are flat_optimizer.py's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.models.decoder import decay_groups

Groups = list[dict[str, Any]]                # each with "params" and their "weight_decay"
Moments = Mapping[nn.Parameter, Mapping[str, Tensor]]    # weight -> name -> tensor of the state
IN_A_BLOCK = re.compile(r"\.\d+\.")          # in the name of a weight: an item of a list of layers


class RunOptimizer(torch.optim.Optimizer):
    """An optimizer of a run. A subclass has torch's update, and these steps around it."""

    def gather(self) -> None:
        """Put the gradients of a step where the update reads them."""

    def clip(self, max_grad_norm: float) -> Tensor:
        """Return the norm of all gradients, () fp32; scale larger ones down to `max_grad_norm`. 0: none are scaled."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        return norm

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


def parameter_groups(model: nn.Module, weight_decay: float, *, hidden_apart: bool = False) -> Groups:
    """Return what an optimizer is given: matrices decay, norms and biases do not.

    With `hidden_apart` the hidden matrices are a group of their own, and each group says by "hidden" whether it is that one.
    """
    decaying, plain = decay_groups(model)
    groups: Groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
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
            self._parts.append(torch.optim.Muon(hidden, lr=lr, **settings))
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, foreach=False))
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
                    for name, value in found.items():
                        self.state[parameter][name] = value if name == "step" else self.state[parameter][name].copy_(value)

    return Counted
