"""A block's forward and backward pass as one call each of our own kernel; see kernel.cpp.

What autograd does in more than a hundred calls, whose beginning takes a small model longer than the work. All weights are
trained, and attention is the ragged kernel's: with another one, such as generation's, the block is run as it is.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.models.config import ACTIVATIONS, ModelConfig
from powertrain.models.decoder import Block, Norm
from powertrain.models.kernels.attention import Attention, ragged_attention
from powertrain.models.kernels.build import BLOCK, load
from powertrain.models.kernels.frozen import compute_dtype
from powertrain.models.kernels.fused.block import LINEARS
from powertrain.models.kernels.ragged.attention import DTYPES, check, documents_of
from powertrain.models.kernels.rows.parts import ADDRESS, INTEGER, NormOf, passed
from powertrain.models.model import Rotary
from powertrain.records import WrongUse
from powertrain.shapes import one_call_bytes, one_call_saved


class Shape(ctypes.Structure):
    """As kernel.cpp declares it."""

    _fields_ = [*((name, INTEGER) for name in ("tokens", "width", "mlp_width", "heads", "kv_heads", "head_width",
                                               "rotary_width", "window", "documents")),
                *((name, ADDRESS) for name in ("starts", "order", "cosines", "sines")),
                ("scale", ctypes.c_float), *((name, ctypes.c_int32) for name in ("activation", "gated", "adds"))]


class Pair(ctypes.Structure):
    """A weight and a bias, or their gradients."""

    _fields_ = [("weight", ADDRESS), ("bias", ADDRESS)]


class Weights(ctypes.Structure):
    """As kernel.cpp declares it."""

    _fields_ = [("attention_norm", NormOf), ("mlp_norm", NormOf), *((name, Pair) for name in LINEARS)]


class Gradients(ctypes.Structure):
    """As kernel.cpp declares it."""

    _fields_ = [(name, Pair) for name in ("attention_norm", "mlp_norm", *LINEARS)]


def why_not(block: Block) -> str | None:
    """Return why a block cannot be one call, or None."""
    c = block.config
    if c.qk_norm or c.parallel_residual:
        return "it has norms of queries and keys" if c.qk_norm else "its residual is parallel"
    if c.dropout:
        return "it has dropout"
    if any(size % 2 for size in (c.width, c.mlp_width, c.head_width)):
        return "its widths are not even"
    if any(type(getattr(block, name)) is not nn.Linear for name in LINEARS) or not all(
            x.requires_grad and x.dtype is torch.float32 and x.is_contiguous() for x in block.parameters()):
        return "not all of its weights are trained in fp32"
    return None


@dataclass(frozen=True)
class OneCall:
    """One block, to be called as `decoder.Block.forward` is. Raises WrongUse for blocks that the kernel does not have."""

    block: Block
    modules: tuple[Any, ...] = field(init=False)     # norms and linears, as Gradients has them
    trained: tuple[nn.Parameter, ...] = field(init=False)

    def __post_init__(self) -> None:
        if (why := why_not(self.block)) is not None:
            raise WrongUse(f"a block cannot be one call: {why}")
        names = ("attention_norm", "mlp_norm", *LINEARS)
        object.__setattr__(self, "modules", tuple(getattr(self.block, name) for name in names))
        object.__setattr__(self, "trained", tuple(self.block.parameters()))

    def __call__(self, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...], attention: Attention) -> Tensor:
        dtype = compute_dtype(x)
        if attention is not ragged_attention:
            plain: Tensor = self.block(x, rotary, lengths, attention)
            return plain
        check(x.device.type, dtype, self.block.config.head_width)
        tables = None if rotary is None else (rotary[0].contiguous(), rotary[1].contiguous())
        out: Tensor = _OneCall.apply(x, self, tables, lengths, dtype, *self.trained)  # type: ignore[no-untyped-call]
        return out

    def shape(self, tokens: int, tables: Rotary | None, documents: tuple[Any, Any], *, adds: bool = False) -> Shape:
        """Return the shape of a pass; it points to the tables and to `documents`, of `documents_of`.

        `adds`: the weights have gradients already, to which those of the pass are added.
        """
        c, (starts, order) = self.block.config, documents
        if starts[-1] != tokens:
            raise ValueError(f"documents of {starts[-1]} tokens in a pass of {tokens}")
        width, cosines, sines = (0, None, None) if tables is None else (tables[0].shape[-1], *addresses(*tables))
        return Shape(tokens, c.width, c.mlp_width, c.heads, c.kv_heads, c.head_width, width, c.window or 0, len(order),
                     ctypes.addressof(starts), ctypes.addressof(order), cosines, sines, c.head_width ** -0.5,
                     ACTIVATIONS.index(c.activation), c.gated_mlp, adds)

    def weights(self) -> tuple[Weights, tuple[Tensor, ...]]:
        """Return where the weights lie, and what must not be freed as long as they are read."""
        *norms, qkv, out, mlp_in, mlp_out = self.modules
        of_norms, scales = zip(*(norm_of(norm, self.block.config) for norm in norms), strict=True)
        return Weights(*of_norms, *(Pair(*addresses(x.weight, x.bias)) for x in (qkv, out, mlp_in, mlp_out))), scales

    def saved(self, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return memory for what the backward pass reads: numbers in the dtype of products, and statistics in fp32."""
        numbers, statistics = one_call_saved(self.block.config, tokens)
        return torch.empty(numbers, dtype=dtype), torch.empty(statistics)


class _OneCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: OneCall, tables: Rotary | None, lengths: tuple[int, ...], dtype: torch.dtype,
                *trained: Tensor) -> Tensor:
        x = x.float().contiguous()
        documents, (weights, scales) = documents_of(lengths), block.weights()
        out, saved, shape = torch.empty_like(x), block.saved(len(x), dtype), block.shape(len(x), tables, documents)
        forward, backward = one_call_bytes(block.block.config, len(x), dtype.itemsize)
        call("block_forward", dtype, shape, weights, x, out, *saved, torch.empty(forward, dtype=torch.uint8), forward)
        ctx.kept = block, dtype, shape, weights, saved, backward, (tables, documents, scales)    # the last: what is pointed to
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise RuntimeError("a block frees what its backward pass has used, so that pass runs only once")
        (block, dtype, shape, weights, saved, backward, pointed_to), ctx.kept = ctx.kept, None
        given = given.float().contiguous()
        dx, found = torch.empty_like(given), {id(x): torch.empty_like(x) for x in block.trained}
        gradients = Gradients(*(Pair(*addresses(found[id(module.weight)], None if module.bias is None else
                                                 found[id(module.bias)])) for module in block.modules))
        call("block_backward", dtype, shape, weights, given, dx, *saved, torch.empty(backward, dtype=torch.uint8), backward,
              gradients)
        del pointed_to
        return dx, None, None, None, None, *found.values()


def norm_of(norm: Norm, config: ModelConfig) -> tuple[NormOf, Tensor]:
    """Return a norm as the kernel reads it, and the scale that it points to."""
    scale = norm.weight.detach() + 1 if norm.offset else norm.weight
    return NormOf(*addresses(scale, norm.bias), config.norm_epsilon, config.norm == "rms"), scale


def addresses(*tensors: Tensor | None) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)


def call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Call a pass of the kernel for a dtype of products: tensors by their addresses, structures by reference."""
    if failed := getattr(load(BLOCK), f"{name}_{DTYPES[dtype]}")(*map(passed, arguments)):
        raise MemoryError(f"not enough memory for {name}") if failed == 1 else IndexError("a token or a position has no row")
