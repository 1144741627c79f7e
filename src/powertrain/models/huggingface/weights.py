"""Our weights made of Hugging Face's, and the other way round, as names.py pairs them.

Loading fills our tensors from theirs part by part and lets go of each part, so that one copy of the model is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from powertrain.models.config import ModelConfig
from powertrain.models.huggingface.names import Row, map_weights
from powertrain.records import WrongUse

BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}     # of all names but the head's; the others': "model."
HEADS = ("lm_head.weight", "embed_out.weight")
NAMES_SHOWN = 4           # of missing or left-over weights in an error: more would hide the sentence


def to_hf_weights(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A decoder's state under Hugging Face's names and in its layouts, each tensor contiguous."""
    given: dict[str, Tensor] = {}
    for row in map_weights(config):
        if row.ours in state:
            tensor = state[row.ours]
        else:               # only gpt2 without biases comes here
            weight = state[row.ours.removesuffix("bias") + "weight"]
            tensor = weight.new_zeros(weight.shape[0])
        tensor = rearrange(tensor, row.layout, config)
        parts = torch.split(tensor, list(row.sizes)) if row.sizes else (tensor,)
        given |= {name: part.contiguous() for name, part in zip(row.theirs, parts, strict=True)}
    return given


class Stored(Protocol):
    """Hugging Face's tensors, which are read when they are asked for."""

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> Tensor: ...


def name_weights(config: ModelConfig, stored: Stored) -> dict[str, str]:
    """Name that the family gives a tensor -> its name in the folder, which lacks the prefix if the head was not saved."""
    prefix = PREFIXES.get(config.family, "model.")
    return {name if name.startswith(prefix) or name in HEADS else prefix + name: name
            for name in stored if not name.endswith(BUFFERS)}


def has_head_of_its_own(config: ModelConfig, stored: Stored) -> bool:
    """Whether the folder holds a head that differs from the embedding: then its config.json is wrong to tie them."""
    named = name_weights(config, stored)
    embedding, head = map_weights(config)[0].theirs[0], next((name for name in HEADS if name in named), None)
    if head is None or embedding not in named:
        return False
    return not torch.equal(stored.read(named[embedding]), stored.read(named[head]))


def fill_weights(config: ModelConfig, stored: Stored, shapes: Mapping[str, tuple[int, ...]],
                 dtype: torch.dtype | None) -> dict[str, Tensor]:
    """A decoder's state, of `dtype`, or where that is None of the dtypes that are stored.

    Raises WrongUse for weights that are missing, left over, or not of `shapes`, and for dtypes that are not of training.
    """
    rows, named = map_weights(config), name_weights(config, stored)
    if config.tied_head:
        alone = next((named.pop(name) for name in HEADS if name in named), None)
        if alone is not None:
            named.setdefault(rows[0].theirs[0], alone)
    expected = {name for row in rows for name in row.theirs}
    refuse("the folder lacks {} weights of the model that its config.json describes", expected - named.keys())
    refuse("the model of config.json has no place for {} weights of the folder", named.keys() - expected)
    for row in rows:
        refuse_other_shapes(row, shapes[row.ours], {name: stored.shape(named[name]) for name in row.theirs})
    return {row.ours: fill(row, config, stored, [named[name] for name in row.theirs], shapes[row.ours], dtype) for row in rows}


def fill(row: Row, config: ModelConfig, stored: Stored, names: list[str], shape: tuple[int, ...],
         dtype: torch.dtype | None) -> Tensor:
    """Our tensor, filled from its counterparts, which are converted on the way."""
    dtype = dtype or common_dtype(names, stored)
    filled = torch.empty(shape, dtype=dtype, device="cpu")
    pieces = torch.split(filled, list(row.sizes)) if row.sizes else (filled,)
    for piece, name in zip(pieces, names, strict=True):
        put(piece, stored.read(name), row.layout, config)
    return filled


def put(ours: Tensor, theirs: Tensor, layout: str, config: ModelConfig) -> None:
    """Writes theirs into ours, with no copy between."""
    if layout == "interleaved":
        ours, theirs = (torch.unflatten(tensor, 0, (outer, inner, config.head_width))
                        for tensor, outer, inner in ((ours, 3, config.heads), (theirs, config.heads, 3)))
        theirs = theirs.transpose(0, 1)
    ours.copy_(theirs.t() if layout == "transposed" and theirs.dim() == 2 else theirs)


def common_dtype(names: list[str], stored: Stored) -> torch.dtype:
    """The one dtype of all these tensors, or that which holds all; fp32 for fp64, which nothing here trains in."""
    dtype = stored.dtype(names[0])
    for name in names[1:]:
        dtype = torch.promote_types(dtype, stored.dtype(name))
    return torch.float32 if dtype == torch.float64 else dtype


def refuse_other_shapes(row: Row, ours: tuple[int, ...], theirs: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WrongUse for a tensor that has not the shape that the config gives it."""
    shape = tuple(reversed(ours)) if row.layout == "transposed" else ours
    for name, rows in zip(row.theirs, row.sizes or shape[:1], strict=True):
        if theirs[name] != (rows, *shape[1:]):
            raise WrongUse(f"{name} is {theirs[name]} in the folder, and its config.json makes it {(rows, *shape[1:])}; check "
                           f"that both come from the same model")


def refuse(what: str, names: set[str]) -> None:
    """Raises WrongUse if there are any names; `what` has a gap for how many."""
    if names:
        shown = ", ".join(sorted(names)[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
        raise WrongUse(f"{what.format(len(names))}: {shown}; check that both come from the same model")


def rearrange(tensor: Tensor, layout: str, config: ModelConfig) -> Tensor:
    """From our layout to theirs; `put` is the way back."""
    if layout == "transposed" and tensor.dim() == 2:
        return tensor.t()
    if layout != "interleaved":
        return tensor
    return torch.unflatten(tensor, 0, (3, config.heads, config.head_width)).transpose(0, 1).flatten(0, 2)
