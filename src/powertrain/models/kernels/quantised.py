"""A frozen base in 4 bits: bitsandbytes' NF4 and FP4, in blocks of 64 weights with one scale each.

The 4-bit codes are the quantiles of a normal distribution (NF4) or a small floating-point format (FP4); `double` stores the
scales in 8 bits too. A weight takes 4.5 bits, or 4.13 with double. Each product dequantises its matrix to the product's
dtype, once in the forward pass and once in the backward pass. Two things save that work without changing a bit of the result.
First, a checkpointed block that is recomputed for its backward pass dequantises once for both. Second, `keep_whole` keeps
dequantised copies of as many blocks as it is told.
Source: Dettmers et al. 2023 (QLoRA), section 3.

q, k and v are quantised apart, because transformers has them as separate modules and the numbers must be the same. Only
gpt_neox interleaves their rows in one module; there the scales are rounded in another order than in transformers.
"""

import importlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from powertrain.models.adapters.attached import has_adapters
from powertrain.models.adapters.targets import find_slots
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.frozen import FrozenLinear, compute_dtype, frozen_product
from powertrain.records import WrongUse
from powertrain.shapes import FOUR_BIT, QUANTISED_BLOCK


def load_library(name: str, needed: str, advice: str, **structured: Any) -> Any:
    """Return the optional module `name`. Raises WrongUse where it is not installed: "`needed` NAME, ...; `advice`".

    `structured` are further arguments of the error, such as the recipe's keys that are to blame.
    """
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)       # bitsandbytes, which peft imports, warns of a missing kernel that is not used here
    try:
        return importlib.import_module(name)
    except (ImportError, NotImplementedError) as error:      # unsloth raises the second without a GPU
        said = f"{needed} {name.partition('.')[0]}, which cannot be imported here ({error}); {advice}"
        raise WrongUse(said, **structured) from error
    finally:
        logger.setLevel(level)


def load_bitsandbytes() -> Any:
    """Return bitsandbytes.functional. Raises WrongUse if it is not installed."""
    return load_library("bitsandbytes.functional", "4-bit weights need", "pip install bitsandbytes, or use method=lora")


@dataclass(frozen=True)
class Packed:
    """Some rows of a matrix, two weights to a byte. `state`: bitsandbytes' QuantState, with the scales."""

    values: Tensor           # (bytes, 1) uint8
    state: Any
    rows: int

    @classmethod
    def of(cls, weight: Tensor, kind: str, double: bool) -> Self:
        """Return `weight` (rows, in) packed in 4 bits."""
        # A matrix of blocks, not the weight's own shape: bitsandbytes 0.50's CPU kernel looks for the scales row by row, and
        # for a width that is no multiple of 64 it takes the wrong ones. The packed bytes are the same either way.
        flat = weight.detach().contiguous()
        flat = flat.view(-1, QUANTISED_BLOCK) if weight.numel() % QUANTISED_BLOCK == 0 else flat.view(1, -1)
        values, state = load_bitsandbytes().quantize_4bit(flat, blocksize=QUANTISED_BLOCK, quant_type=kind,
                                                          compress_statistics=double)
        return cls(values, state, weight.shape[0])

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised rows (rows, in) in `dtype`."""
        from bitsandbytes.functional import dequantize_4bit

        state = self.state
        wanted = type(state)(absmax=state.absmax, shape=state.shape, code=state.code, blocksize=state.blocksize,
                             quant_type=state.quant_type, dtype=dtype, offset=state.offset, state2=state.state2)
        out: Tensor = dequantize_4bit(self.values, wanted)
        return out.view(self.rows, -1)

    def move(self, device: torch.device) -> "Packed":
        self.state.to(device)
        return Packed(self.values.to(device), self.state, self.rows)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of the codes and their scales; the tables that all matrices share do not count."""
        nested = self.state.state2.absmax.nbytes if self.state.nested else 0
        return int(self.values.nbytes + self.state.absmax.nbytes + nested)


class QuantisedLinear(FrozenLinear):
    """A frozen linear in 4 bits. It has no `weight`; `matrix` dequantises."""

    def __init__(self, linear: nn.Linear, rows: list[int], kind: str, double: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = None, linear.bias  # type: ignore[assignment]
        self.requires_grad_(False)
        self.kind = kind
        self.whole: Tensor | None = None     # dequantised once, and kept
        self.again: Tensor | None = None     # dequantised in a checkpoint's recomputation, for the backward pass that follows
        self.parts = [Packed.of(part, kind, double) for part in torch.split(linear.weight, rows)]

    def forward(self, x: Tensor) -> Tensor:
        # a forward pass inside a backward pass: a checkpoint recomputes its block
        is_computed_again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if not (x.requires_grad and is_computed_again):
            return super().forward(x)
        made = self.matrix(compute_dtype(x))
        self.again = made
        return frozen_product(x, self.bias, lambda dtype: made)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        if self.whole is not None and self.whole.dtype is dtype:
            return self.whole
        again, self.again = self.again, None
        return again if again is not None and again.dtype is dtype else self.unpack(dtype)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix (out, in) of the packed weights."""
        if len(self.parts) == 1:
            return self.parts[0].unpack(dtype)
        whole = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.device)
        for part, rows in zip(self.parts, torch.split(whole, [part.rows for part in self.parts]), strict=True):
            rows.copy_(part.unpack(dtype))
        return whole

    @property
    def device(self) -> torch.device:
        return self.parts[0].values.device

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of the packed weights."""
        return sum(part.memory_bytes for part in self.parts)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the packed weights and the dequantised copy."""
        return self.memory_bytes + (0 if self.whole is None else self.whole.nbytes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the packed weights when `.to` calls this; they keep their dtypes, whatever dtype is asked for."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(self.parts[0].values.new_empty(0)).device
        self.parts = [part.move(device) for part in self.parts]
        self.whole, self.again = None if self.whole is None else self.whole.to(device), None
        return self


def quantise_base(model: Decoder, *, type: str, double: bool) -> None:
    """Replace the linears of the blocks by 4-bit ones, in place and one after the other; call this before `add_adapters`.

    Embedding, norms and head stay as they are, as in transformers. The model is frozen.
    Raises WrongUse without bitsandbytes, for an unknown type, and for a model that has adapters or is quantised already.
    """
    if type not in FOUR_BIT:
        raise WrongUse(f"there is no 4-bit type {type!r}; use {' or '.join(FOUR_BIT)}")
    if has_adapters(model) or is_quantised(model):
        raise WrongUse("the model has adapters or is quantised already; quantise a base before anything is put on it")
    load_bitsandbytes()
    model.requires_grad_(False)
    rows: dict[str, list[int]] = {}
    for slot in find_slots(model.config):
        rows.setdefault(slot.linear, []).append(slot.last - slot.first)
    for name, sizes in rows.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, QuantisedLinear(linear, sizes, type, double))


def is_quantised(model: nn.Module) -> bool:
    return any(isinstance(module, QuantisedLinear) for module in model.modules())


def keep_whole(model: nn.Module, blocks: int, dtype: torch.dtype) -> None:
    """Dequantise the linears of the last `blocks` blocks once, to `dtype`; they keep their packed weights besides."""
    found = _by_block(model)
    for linear in itertools.chain(*found[len(found) - blocks:]):
        linear.whole = linear.unpack(dtype)


def whole_blocks(model: nn.Module, dtype: torch.dtype) -> int:
    """Return how many blocks need no dequantising for a product in `dtype`."""
    return sum(bool(linears) and all(linear.whole is not None and linear.whole.dtype is dtype for linear in linears)
               for linears in _by_block(model))


def _by_block(model: nn.Module) -> list[list[QuantisedLinear]]:
    return [[linear for linear in block.modules() if isinstance(linear, QuantisedLinear)]
            for block in model.get_submodule("blocks").children()]
