"""The weights of a block as its products read them: trained ones in the products' type, adapters joined.

Copies are made in each forward pass, for it and its backward pass: no optimizer has to say that it changed a weight (torch's
fused ones do so without torch noticing). A frozen weight is not copied but asked for when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from powertrain.models.adapters.attached import AdaptedLinear
from powertrain.models.adapters.kinds import Lora
from powertrain.models.decoder import Block, Norm
from powertrain.models.kernels.fused.values import (
    EnteredBack,
    EnterWeights,
    LeaveWeights,
    LeftBack,
    Linear,
    LinearGradients,
    NormWeights,
)
from powertrain.models.kernels.scaled import ScaledLinear
from powertrain.models.linear import FrozenLinear
from powertrain.records import WrongUse

LINEARS = ("qkv", "attention_out", "mlp_in", "mlp_out")
Copies = Mapping[str, tuple[Tensor, Tensor | None]]      # linear -> weight and bias, or its adapters' joined a and b


@dataclass(frozen=True)
class Weights:
    """Those of one block. Raises WrongUse for adapters that are not plain low-rank products."""

    block: Block
    trained: tuple[nn.Parameter, ...] = field(init=False)    # in the order of `gradients`

    def __post_init__(self) -> None:
        if (why := why_not(self.block)) is not None:
            raise WrongUse(why)
        trained = tuple(parameter for parameter in self.block.parameters() if parameter.requires_grad)
        object.__setattr__(self, "trained", trained)

    def copies(self, dtype: torch.dtype) -> Copies:
        """What is trained, in `dtype`."""
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name in LINEARS:
            linear = getattr(self.block, name)
            if isinstance(linear, AdaptedLinear):
                found[name] = _joined(linear, dtype)
            elif not isinstance(linear, FrozenLinear):
                found[name] = linear.weight.detach().to(dtype), _converted(linear.bias, dtype)
        return found

    def enter(self, copies: Copies, dtype: torch.dtype) -> EnterWeights:
        block = self.block
        return EnterWeights(_norm(block.attention_norm), self._linear("qkv", copies, dtype), dtype,
                            None if block.q_norm is None else _norm(block.q_norm).weight,
                            None if block.k_norm is None else _norm(block.k_norm).weight)

    def leave(self, copies: Copies, dtype: torch.dtype) -> LeaveWeights:
        return LeaveWeights(self._linear("attention_out", copies, dtype), _norm(self.block.mlp_norm),
                            self._linear("mlp_in", copies, dtype), self._linear("mlp_out", copies, dtype), dtype)

    def _linear(self, name: str, copies: Copies, dtype: torch.dtype) -> Linear:
        linear = getattr(self.block, name)
        base = linear.base if isinstance(linear, AdaptedLinear) else linear
        if not isinstance(base, FrozenLinear):
            return Linear(*copies[name])
        a, b = copies.get(name, (None, None))
        if isinstance(base, ScaledLinear):
            return Linear(base.codes, _converted(base.bias, dtype), a, b, base.scales)
        return Linear(base.matrix(dtype).detach(), _converted(base.bias, dtype), a, b)

    @property
    def trains_whole(self) -> bool:
        """Whether all its weights are trained, and not only adapters."""
        return self.block.attention_norm.weight.requires_grad

    def adapts(self, name: str) -> bool:
        """Whether a linear has adapters."""
        return isinstance(getattr(self.block, name), AdaptedLinear)

    def gradients(self, entered: EnteredBack | None, left: LeftBack) -> tuple[Tensor | None, ...]:
        """Of `trained`, in fp32. Without `entered` nothing before attention is trained."""
        block, entered = self.block, entered or EnteredBack()
        linears = dict(zip(LINEARS, (entered.qkv, left.out, left.mlp_in, left.mlp_out), strict=True))
        found: dict[int, Tensor | None] = {}
        for norm, gradient in ((block.attention_norm, entered.norm), (block.mlp_norm, left.norm)):
            _put(found, norm, gradient.weight, gradient.bias)
        for head_norm, weight in ((block.q_norm, entered.q_norm), (block.k_norm, entered.k_norm)):
            if head_norm is not None:
                _put(found, head_norm, weight, None)
        for name, of in linears.items():
            linear = getattr(block, name)
            if isinstance(linear, AdaptedLinear):
                found |= _adapter_gradients(linear, of)
            else:
                _put(found, linear, of.weight, of.bias)
        return tuple(found[id(parameter)] for parameter in self.trained)


def why_not(block: Block) -> str | None:
    """Why this block cannot be run by hand."""
    for linear in (getattr(block, name) for name in LINEARS):
        if not isinstance(linear, AdaptedLinear):
            continue
        for slot in linear.slots:
            adapter = linear.adapter(slot)
            if type(adapter) is not Lora:
                return f"the backward pass of a {type(adapter).__name__} adapter is not written by hand"
            if adapter.dropout:
                return "adapters with dropout read an input of their own each, and so have no product in common"
    trained = {id(parameter) for parameter in block.parameters() if parameter.requires_grad}
    adapters = {id(x) for name in LINEARS if isinstance(linear := getattr(block, name), AdaptedLinear)
                for slot in linear.slots for x in (linear.adapter(slot).A, linear.adapter(slot).B)}
    if trained not in (adapters, {id(parameter) for parameter in block.parameters()}, set()):
        return "some of a block's weights are trained and others not, and not as adapters"
    return None


def _norm(norm: Norm) -> NormWeights:
    weight = norm.weight.detach().float()
    return NormWeights(weight + 1 if norm.offset else weight, _converted(norm.bias, torch.float32))


def _converted(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(dtype)


def _joined(linear: AdaptedLinear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """a (R, in) and b (out, R), as in `Linear`."""
    adapters = [linear.adapter(slot) for slot in linear.slots]
    a = torch.cat([adapter.A.detach() for adapter in adapters]).to(dtype)
    b, first = a.new_zeros(linear.out_features, len(a)), 0
    for slot, adapter in zip(linear.slots, adapters, strict=True):
        last = first + len(adapter.A)
        torch.mul(adapter.B.detach(), adapter.scale, out=b[slot.first:slot.last, first:last])
        first = last
    return a, b


def _put(found: dict[int, Tensor | None], module: Norm | nn.Module, weight: Tensor | None, bias: Tensor | None) -> None:
    for parameter, gradient in ((module.weight, weight), (module.bias, bias)):
        if isinstance(parameter, nn.Parameter):
            found[id(parameter)] = gradient


def _adapter_gradients(linear: AdaptedLinear, of: LinearGradients) -> dict[int, Tensor | None]:
    """Each adapter's own rows and columns of the joined gradients."""
    assert of.a is not None
    assert of.b is not None
    found: dict[int, Tensor | None] = {}
    first = 0
    for slot in linear.slots:
        adapter = linear.adapter(slot)
        last = first + len(adapter.A)
        found[id(adapter.A)] = of.a[first:last].float()
        found[id(adapter.B)] = of.b[slot.first:slot.last, first:last].float() * adapter.scale
        first = last
    return found
