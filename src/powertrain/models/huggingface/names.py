"""Our weights' names and Hugging Face's: which is which, in what layout, in which files. Loads no torch.

Each row of a map pairs one of our tensors with one or more of theirs, which are stacked along the first dimension to
make ours. `transposed`: GPT-2 stores linears as (in, out). `interleaved`: GPT-NeoX stores q, k and v of
one head after the other, where ours has all q, then all k, then all v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from powertrain.models.config import ModelConfig

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"


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
