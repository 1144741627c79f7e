"""A block's forward and backward pass as one autograd function, around whichever attention kernel is in force.

Memory: the function itself holds the tensors that its backward pass needs, and frees each after its last use. Each forward
pass copies the trained weights in the products' dtype, for itself and its backward pass: torch's fused optimizers change a
weight without torch noticing, so no older copy can be trusted. A frozen weight is not copied: it is converted at each use.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from powertrain.models.adapters.attached import AdaptedLinear, Adapter, Lora
from powertrain.models.decoder import Block, Norm
from powertrain.models.kernels.attention import Attention
from powertrain.models.kernels.frozen import FrozenLinear, ScaledLinear, compute_dtype
from powertrain.models.kernels.fused import parts
from powertrain.models.kernels.fused.saving import Copies, Saved, Saving
from powertrain.models.model import Rotary
from powertrain.records import WrongUse

LINEARS = ("qkv", "attention_out", "mlp_in", "mlp_out")


def why_not(block: Block) -> str | None:
    """Return why this block cannot be run by hand, or None."""
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


def _norm(norm: Norm) -> parts.NormWeights:
    weight = norm.weight.detach().float()
    return parts.NormWeights(weight + 1 if norm.offset else weight, _converted(norm.bias, torch.float32))


def _converted(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(dtype)


def _joined(linear: AdaptedLinear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a (R, in) and b (out, R) of all adapters of the linear, joined as in `Linear`."""
    a = torch.cat([linear.adapter(slot).A.detach() for slot in linear.slots]).to(dtype)
    b = a.new_zeros(linear.base.out_features, len(a))
    for adapter, ranks, rows in _places(linear):
        torch.mul(adapter.B.detach(), adapter.scale, out=b[rows, ranks])
    return a, b


def _places(linear: AdaptedLinear) -> Iterator[tuple[Adapter, slice, slice]]:
    """Yield each adapter, its ranks among those of all, and its rows of the output."""
    first = 0
    for slot in linear.slots:
        adapter = linear.adapter(slot)
        yield adapter, slice(first, first + len(adapter.A)), slice(slot.first, slot.last)
        first += len(adapter.A)


def _put(found: dict[int, Tensor | None], module: Norm | nn.Module, weight: Tensor | None, bias: Tensor | None) -> None:
    for parameter, gradient in ((module.weight, weight), (module.bias, bias)):
        if isinstance(parameter, nn.Parameter):
            found[id(parameter)] = gradient


def _adapter_gradients(linear: AdaptedLinear, of: parts.Gradients) -> dict[int, Tensor | None]:
    """Return the gradients of each adapter, by parameter id: its own rows and columns of the joined gradients."""
    assert of.a is not None
    assert of.b is not None
    found: dict[int, Tensor | None] = {}
    for adapter, ranks, rows in _places(linear):
        found[id(adapter.A)] = of.a[ranks].float()
        found[id(adapter.B)] = of.b[rows, ranks].float() * adapter.scale
    return found


# ------------------------------------------------------------------------------------------------ the function


@dataclass(frozen=True)
class Functions:
    """The two halves of a block, forward and backward, compiled or plain."""

    enter: Callable[..., tuple[Tensor, parts.Entered]]
    leave: Callable[..., tuple[Tensor, parts.Left]]
    leave_back: Callable[..., parts.LeftBack]
    enter_back: Callable[..., parts.EnteredBack]
    enter_back_of_first: Callable[..., parts.EnteredBack]    # without its input's gradient: too little work to compile

    @classmethod
    def of(cls, halves: parts.Parts, change: Callable[[Any], Any] = lambda function: function) -> Self:
        return cls(change(halves.enter), change(halves.leave), change(halves.leave_back), change(halves.enter_back),
                   halves.enter_back)


@dataclass(frozen=True)
class HandWritten:
    """One block, to be called as `decoder.Block.forward` is.

    Raises WrongUse for adapters that are not plain low-rank products.
    """

    block: Block
    functions: Functions
    saving: Saving | None = None             # which tensors are recomputed or offloaded, and how they come back
    trained: tuple[nn.Parameter, ...] = field(init=False)    # in the order of `gradients`

    def __post_init__(self) -> None:
        if (why := why_not(self.block)) is not None:
            raise WrongUse(why)
        trained = tuple(parameter for parameter in self.block.parameters() if parameter.requires_grad)
        object.__setattr__(self, "trained", trained)

    def __call__(self, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...], attention: Attention) -> Tensor:
        if torch.is_grad_enabled() and (self.trained or x.requires_grad):
            out: Tensor = _Block.apply(x, self, rotary, lengths, attention, *self.trained)  # type: ignore[no-untyped-call]
            return out
        return self.forward(x, rotary, lengths, attention)[0]

    def forward(self, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...], attention: Attention, *,
                record: bool = False) -> tuple[Tensor, Saved]:
        """Return the next block's residual; with `record` the attention kernel's own graph is kept for `backward`."""
        config, dtype, tables = self.block.config, compute_dtype(x), rotary or (None, None)
        copies = self.copies(dtype)
        dropout = config.dropout if self.block.training else 0.0
        with torch.autocast(x.device.type, enabled=False):
            x = x.detach().float()           # autograd records the block, not its parts
            heads, entered = self.functions.enter(x, *tables, self.enter_weights(copies, dtype))
            q, k, v = (part.requires_grad_(record) for part in (
                heads[:, :config.heads], heads[:, config.heads:-config.kv_heads], heads[:, -config.kv_heads:]))
            with torch.set_grad_enabled(record):
                mixed = attention(q, k, v, lengths, layer=self.block.index, dropout=dropout, window=config.window,
                                  scale=config.head_width ** -0.5)
            seeds = parts.Seeds(draw_seed(x.device), draw_seed(x.device)) if dropout else parts.Seeds()
            out, left = self.functions.leave(x, mixed.detach().flatten(1), seeds, self.leave_weights(copies, dtype))
        saved = Saved(copies, dtype, tables, entered, (q, k, v), mixed, left, seeds)
        if record and self.saving is not None:
            self.saving.put_away(saved)
        return out, saved

    def backward(self, dx: Tensor, saved: Saved, *, needs_x: bool) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of `trained`."""
        # adapters train no norm, and all other training trains them all
        wanted = parts.Wanted(weights=self.block.attention_norm.weight.requires_grad, input=needs_x)
        leave_weights = self.leave_weights(saved.copies, saved.dtype)
        if self.saving is not None:
            self.saving.bring_left(saved, leave_weights)
        left = self.functions.leave_back(dx, saved.mixed.detach().flatten(1), saved.left, saved.seeds,
                                         leave_weights, wanted._replace(input=True))    # one kind of call for all blocks
        del saved.left, leave_weights
        if not (wanted.input or wanted.weights or isinstance(self.block.qkv, AdaptedLinear)):
            return None, *self.gradients(None, left)
        if self.saving is not None:
            self.saving.bring_entered(saved, self.enter_weights(saved.copies, saved.dtype))
        with torch.enable_grad():
            zero: Tensor = _WithGradient.apply(saved.mixed, left.mixed.view_as(saved.mixed))  # type: ignore[no-untyped-call]
        dheads = torch.autograd.grad(zero, saved.heads)
        del zero
        del saved.mixed, saved.heads
        functions = self.functions
        enter_back = functions.enter_back if wanted.input or wanted.weights else functions.enter_back_of_first
        weights = self.enter_weights(saved.copies, saved.dtype)
        entered = enter_back(left.x, *dheads, saved.entered, *saved.tables, weights, wanted)
        return entered.x, *self.gradients(entered, left)

    # ------------------------------------------------------------------------------------------- weights

    def copies(self, dtype: torch.dtype) -> Copies:
        """Return linear -> its trained weight and bias in `dtype`, or its adapters' joined a and b."""
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name in LINEARS:
            linear = getattr(self.block, name)
            if isinstance(linear, AdaptedLinear):
                found[name] = _joined(linear, dtype)
            elif not isinstance(linear, FrozenLinear):
                found[name] = linear.weight.detach().to(dtype), _converted(linear.bias, dtype)
        return found

    def enter_weights(self, copies: Copies, dtype: torch.dtype) -> parts.EnterWeights:
        block = self.block
        q_norm, k_norm = (None if norm is None else _norm(norm).weight for norm in (block.q_norm, block.k_norm))
        return parts.EnterWeights(_norm(block.attention_norm), self._linear("qkv", copies, dtype), dtype, q_norm, k_norm)

    def leave_weights(self, copies: Copies, dtype: torch.dtype) -> parts.LeaveWeights:
        return parts.LeaveWeights(self._linear("attention_out", copies, dtype), _norm(self.block.mlp_norm),
                                  self._linear("mlp_in", copies, dtype), self._linear("mlp_out", copies, dtype), dtype)

    def _linear(self, name: str, copies: Copies, dtype: torch.dtype) -> parts.Linear:
        linear = getattr(self.block, name)
        base = linear.base if isinstance(linear, AdaptedLinear) else linear
        if not isinstance(base, FrozenLinear):
            return parts.Linear(*copies[name])
        a, b = copies.get(name, (None, None))
        if isinstance(base, ScaledLinear):
            return parts.Linear(base.codes, _converted(base.bias, dtype), a, b, base.scales)
        return parts.Linear(base.matrix(dtype).detach(), _converted(base.bias, dtype), a, b)

    def gradients(self, entered: parts.EnteredBack | None, left: parts.LeftBack) -> tuple[Tensor | None, ...]:
        """Return those of `trained`, in fp32. `entered` is None where nothing before attention is trained."""
        block, entered = self.block, entered or parts.EnteredBack()
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


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed: () int32, any value that the type has."""
    return torch.empty((), dtype=torch.int64, device=device).random_(-2**31, 2**31).to(torch.int32)


class _WithGradient(torch.autograd.Function):
    """A zero whose gradient for x is `gradient`. torch.autograd.grad imports sympy, for 0.3 s, where it is given a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: HandWritten, rotary: Rotary | None, lengths: tuple[int, ...], attention: Attention,
                *trained: Tensor) -> Tensor:
        out, ctx.saved = block.forward(x, rotary, lengths, attention, record=True)
        ctx.block = block
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saved is None:
            raise RuntimeError("a hand-written block frees what its backward pass has used, so that pass runs only once")
        saved, ctx.saved = ctx.saved, None
        with torch.autocast(gradient.device.type, enabled=False):
            dx, *weights = ctx.block.backward(gradient.float(), saved, needs_x=ctx.needs_input_grad[0])
        return dx, None, None, None, None, *weights
