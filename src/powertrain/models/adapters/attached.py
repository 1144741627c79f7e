"""Adapters on the decoder: how those of a linear take part in its product.

Whatever an adapter can compute comes before the frozen product, whose output no gradient needs: activation checkpointing
recomputes a block only up to the last thing that is needed, and so never computes the product again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.models.adapters.kinds import Adapter, Change, Rows, make_adapter
from powertrain.models.adapters.targets import AdapterConfig, Slot, find_targets
from powertrain.models.decoder import Decoder
from powertrain.models.linear import FrozenLinear, compute_dtype
from powertrain.models.model import Reporting
from powertrain.records import WrongUse


class AdaptedLinear(Reporting):
    """A frozen linear and the adapters of its slots: (T, in) -> (T, out)."""

    def __init__(self, base: FrozenLinear, slots: tuple[Slot, ...], config: AdapterConfig) -> None:
        super().__init__()
        self.base, self.slots, self.config = base, slots, config
        self.adapters = nn.ModuleDict({slot.name: make_adapter(self.rows(slot), config) for slot in slots}).to(base.device)

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def rows(self, slot: Slot) -> Rows:
        return Rows(self.base, slot.first, slot.last)

    def adapter(self, slot: Slot) -> Adapter:
        adapter = self.adapters[slot.name]
        assert isinstance(adapter, Adapter)
        return adapter

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x))           # once, and not once for each adapter
        changes: list[Change] = [self.adapters[slot.name](x, self.rows(slot)) for slot in self.slots]
        y: Tensor = self.base(x)
        pieces, done = [], 0
        for slot, change in zip(self.slots, changes, strict=True):
            pieces += [y[..., done:slot.first]] if slot.first > done else []
            pieces.append(self.changed(y[..., slot.first:slot.last], change, slot))
            done = slot.last
        pieces += [y[..., done:]] if done < self.base.out_features else []
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def changed(self, y: Tensor, change: Change, slot: Slot) -> Tensor:
        """The slot's part of the output, in the dtype of its part `y` of the frozen product."""
        if change.factor is None:
            return (y + change.added).to(y.dtype)
        bias = self.base.bias
        product = y if bias is None else y - bias[slot.first:slot.last]
        return (y + (change.factor - 1) * product + change.added).to(y.dtype)

    def penalties(self) -> Iterator[Tensor]:
        return (penalty for slot in self.slots if (penalty := self.adapter(slot).penalty()) is not None)

    def diagnose(self) -> dict[str, dict[str, float]]:
        """Return the measurements of each adapter that is no matrix, by Hugging Face's module name."""
        return {slot.theirs: told for slot in self.slots if (told := self.adapter(slot).diagnose())}


def adapted_linears(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Each adapted linear with its name, in the model's order."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLinear))


def has_adapters(model: nn.Module) -> bool:
    return next(adapted_linears(model), None) is not None


def adapter_config(model: nn.Module) -> AdapterConfig:
    """What the model's adapters were made with. Raises WrongUse if it has none."""
    for _, module in adapted_linears(model):
        return module.config
    raise WrongUse("the model has no adapters; train it with method=lora or qlora, or load some with model.adapter=FOLDER")


def add_adapters(model: Decoder, config: AdapterConfig) -> None:
    """Freezes the model and puts adapters on it, in place; only they train. A is drawn with torch's global generator.

    Raises WrongUse for targets that the model does not have, and if it has adapters already.
    """
    if has_adapters(model):
        raise WrongUse("the model has adapters already, and they do not stack; merge them first, or train them further with "
                       "model.adapter=FOLDER")
    by_linear: dict[str, tuple[Slot, ...]] = {}
    for slot in find_targets(model.config, config.target_modules):
        by_linear[slot.linear] = (*by_linear.get(slot.linear, ()), slot)
    freeze(model)
    for name, slots in by_linear.items():
        base = model.get_submodule(name)
        assert isinstance(base, FrozenLinear)
        model.set_submodule(name, AdaptedLinear(base, slots, config))


def freeze(model: Decoder) -> None:
    """Nothing trains any more, and every linear may be stored in any dtype."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not isinstance(module, FrozenLinear):
            model.set_submodule(name, FrozenLinear.of(module))


def adapters_of(model: nn.Module) -> Iterator[tuple[Slot, Adapter]]:
    """Each adapter with its slot, in the model's order."""
    return ((slot, module.adapter(slot)) for _, module in adapted_linears(model) for slot in module.slots)


def merged(model: Decoder) -> Decoder:
    """A plain decoder with the adapters in its weights, computed in fp32 and kept in the base's dtype.

    Weights without adapters are shared with `model`, not copied.
    Raises WrongUse if there are no adapters, they are not matrices, or the base is quantised.
    """
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear) and module.weight is None:
            raise WrongUse(f"the base is quantised ({name} is), and merging into rounded weights would round "
                           f"the adapters away; load the unquantised base and merge into that (merge_into)")
    return merge_into(model, model)


@torch.no_grad()
def merge_into(base: Decoder, adapted: Decoder) -> Decoder:
    """The adapters of `adapted` in the weights of `base`, its unquantised twin, as a plain decoder; see `merged`.

    Raises WrongUse if the two do not have the same linears.
    """
    adapter_config(adapted)
    state = plain_state(base)
    for name, module in adapted_linears(adapted):
        key = f"{name}.weight"
        if key not in state or state[key].shape != (module.out_features, module.in_features):
            raise WrongUse(f"the adapters sit on a {name} of {module.out_features} x {module.in_features}, which this base "
                           f"does not have; merge into the base that they were trained on")
        weight = state[key].float().clone()
        for slot in module.slots:
            adapter = module.adapter(slot)
            weight[slot.first:slot.last] = adapter.merge(weight[slot.first:slot.last].to(adapter.A.device)).to(weight.device)
        state[key] = weight.to(state[key].dtype)
    with torch.device("meta"):
        plain = Decoder(base.config)
    plain.load_state_dict(state, assign=True)
    plain.base = base.base
    return plain.requires_grad_(True).train(base.training)


def plain_state(model: Decoder) -> dict[str, Tensor]:
    """The state of the model as if it had no adapters. The tensors are the model's own."""
    state: dict[str, Any] = model.state_dict()
    return {name.replace(".base.", "."): tensor for name, tensor in state.items() if ".adapters." not in name}
