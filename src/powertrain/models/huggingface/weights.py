"""Our weights and Hugging Face's: which is which, and how they are laid out.

Each row of a map pairs one of our tensors with one or more of theirs, which are stacked along the first dimension to
make ours. `transposed`: GPT-2 stores linears as (in, out). `interleaved`: GPT-NeoX stores q, k and v of
one head after the other, where ours has all q, then all k, then all v.

Loading fills our tensors from theirs part by part and lets go of each part, so that one copy of the model is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from powertrain.models.config import ModelConfig
from powertrain.records import WrongUse

BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}     # of all names but the head's; the others': "model."
HEADS = ("lm_head.weight", "embed_out.weight")
NAMES_SHOWN = 4           # of missing or left-over weights in an error: more would hide the sentence


@dataclass(frozen=True)
class Row:
    """One of our tensors and its counterparts. `sizes`: rows of each counterpart, where there are several."""

    ours: str
    theirs: tuple[str, ...]
    layout: str = "same"                 # or "transposed" or "interleaved"
    sizes: tuple[int, ...] = ()


def with_bias(ours: str, theirs: tuple[str, ...], has_bias: bool, layout: str = "same",
              sizes: tuple[int, ...] = ()) -> list[Row]:
    """The rows of one layer: its weight, and its bias if it has one."""
    kinds = ("weight", "bias") if has_bias else ("weight",)
    return [Row(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), layout, sizes) for kind in kinds]


def map_gpt2(config: ModelConfig) -> Iterator[Row]:
    """GPT-2 always has biases: a decoder without them is saved with zeros."""
    yield Row("embedding.weight", ("transformer.wte.weight",))
    yield Row("position_embedding.weight", ("transformer.wpe.weight",))
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        yield from with_bias(f"{ours}.attention_norm", (f"{theirs}.ln_1",), True)
        yield from with_bias(f"{ours}.qkv", (f"{theirs}.attn.c_attn",), True, "transposed")
        yield from with_bias(f"{ours}.attention_out", (f"{theirs}.attn.c_proj",), True, "transposed")
        yield from with_bias(f"{ours}.mlp_norm", (f"{theirs}.ln_2",), True)
        yield from with_bias(f"{ours}.mlp_in", (f"{theirs}.mlp.c_fc",), True, "transposed")
        yield from with_bias(f"{ours}.mlp_out", (f"{theirs}.mlp.c_proj",), True, "transposed")
    yield from with_bias("norm", ("transformer.ln_f",), True)
    if not config.tied_head:
        yield Row("head.weight", ("lm_head.weight",))


def map_neox(config: ModelConfig) -> Iterator[Row]:
    yield Row("embedding.weight", ("gpt_neox.embed_in.weight",))
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}", f"gpt_neox.layers.{i}"
        yield from with_bias(f"{ours}.attention_norm", (f"{theirs}.input_layernorm",), True)
        yield from with_bias(f"{ours}.qkv", (f"{theirs}.attention.query_key_value",), config.qkv_bias, "interleaved")
        yield from with_bias(f"{ours}.attention_out", (f"{theirs}.attention.dense",), config.output_bias)
        yield from with_bias(f"{ours}.mlp_norm", (f"{theirs}.post_attention_layernorm",), True)
        yield from with_bias(f"{ours}.mlp_in", (f"{theirs}.mlp.dense_h_to_4h",), True)
        yield from with_bias(f"{ours}.mlp_out", (f"{theirs}.mlp.dense_4h_to_h",), True)
    yield from with_bias("norm", ("gpt_neox.final_layer_norm",), True)
    if not config.tied_head:
        yield Row("head.weight", ("embed_out.weight",))


def map_llama(config: ModelConfig) -> Iterator[Row]:
    """llama, mistral, qwen2, qwen3 and gemma; phi3 too, whose q, k, v and gate, up are stored as ours are."""
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    fused = config.family == "phi3"
    yield Row("embedding.weight", ("model.embed_tokens.weight",))
    for i in range(config.layers):
        ours, attention, mlp = f"blocks.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
        gate_up = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
        yield Row(f"{ours}.attention_norm.weight", (f"model.layers.{i}.input_layernorm.weight",))
        yield from with_bias(f"{ours}.qkv", tuple(f"{attention}.{name}" for name in qkv), config.qkv_bias,
                             sizes=() if fused else (queries, keys, keys))
        yield from with_bias(f"{ours}.attention_out", (f"{attention}.o_proj",), config.output_bias)
        yield Row(f"{ours}.mlp_norm.weight", (f"model.layers.{i}.post_attention_layernorm.weight",))
        yield from with_bias(f"{ours}.mlp_in", tuple(f"{mlp}.{name}" for name in gate_up), config.mlp_bias,
                             sizes=() if fused else (config.mlp_width, config.mlp_width))
        yield from with_bias(f"{ours}.mlp_out", (f"{mlp}.down_proj",), config.mlp_bias)
        if config.qk_norm:
            yield Row(f"{ours}.q_norm.weight", (f"{attention}.q_norm.weight",))
            yield Row(f"{ours}.k_norm.weight", (f"{attention}.k_norm.weight",))
    yield Row("norm.weight", ("model.norm.weight",))
    if not config.tied_head:
        yield Row("head.weight", ("lm_head.weight",))


def map_weights(config: ModelConfig) -> tuple[Row, ...]:
    """Every weight of the family, as Hugging Face has them."""
    maps = {"gpt2": map_gpt2, "gpt_neox": map_neox}
    return tuple(maps.get(config.family, map_llama)(config))


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
