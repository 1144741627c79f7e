"""The decoder that a config asks for, counted without building it. Loads no torch."""

from __future__ import annotations

import math

from powertrain.models.config import ModelConfig
from powertrain.records import ModelFacts

Shapes = dict[str, tuple[int, ...]]


def model_facts(config: ModelConfig) -> ModelFacts:
    """The facts of `config`, every weight trained.

    `shapes` names the weights as models/decoder.py does: those outside the blocks and those of block 0.
    """
    block, outside = block_shapes(config), outside_shapes(config)
    parameters = config.layers * _elements(block) + _elements(outside)
    linear: Shapes = {name: shape for name, shape in block.items() if len(shape) == 2}
    return ModelFacts(
        family=config.family, layers=config.layers, width=config.width, heads=config.heads,
        kv_heads=config.kv_heads, head_width=config.head_width, mlp_width=config.mlp_width,
        gated_mlp=config.gated_mlp, vocabulary=config.vocabulary, context=config.context, dropout=config.dropout,
        tied_head=config.tied_head, parameters=parameters, trainable=parameters,
        matmul_parameters=config.layers * _elements(linear), head_parameters=config.vocabulary * config.width,
        shapes={**outside, **block},
    )


def block_shapes(config: ModelConfig) -> Shapes:
    """Weight name -> shape of block 0: one fused projection for q, k and v, and one for gate and up."""
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    gates = 2 if config.gated_mlp else 1
    shapes = {
        **_norm("attention_norm", config.width, config.norm_bias),
        **_linear("qkv", config.width, queries + 2 * keys, config.qkv_bias),
        **_linear("attention_out", queries, config.width, config.output_bias),
        **_norm("mlp_norm", config.width, config.norm_bias),
        **_linear("mlp_in", config.width, gates * config.mlp_width, config.mlp_bias),
        **_linear("mlp_out", config.mlp_width, config.width, config.mlp_bias),
    }
    if config.qk_norm:
        shapes |= {**_norm("q_norm", config.head_width, False), **_norm("k_norm", config.head_width, False)}
    return {f"blocks.0.{name}": shape for name, shape in shapes.items()}


def outside_shapes(config: ModelConfig) -> Shapes:
    """Weight name -> shape of what is not in a block. A tied head is the embedding, and counts once."""
    shapes: Shapes = {"embedding.weight": (config.vocabulary, config.width)}
    if config.positions == "learned":
        shapes["position_embedding.weight"] = (config.context, config.width)
    shapes |= _norm("norm", config.width, config.norm_bias)
    if not config.tied_head:
        shapes["head.weight"] = (config.vocabulary, config.width)
    return shapes


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Shapes:
    weight: Shapes = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def _norm(name: str, width: int, bias: bool) -> Shapes:
    weight: Shapes = {f"{name}.weight": (width,)}
    return weight | {f"{name}.bias": (width,)} if bias else weight


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
