"""The decoder that a config asks for, counted without building it; and facts read back from a run's folder. Loads no torch."""

import math
from collections.abc import Mapping
from typing import Any

from powertrain.models.adapters.targets import AdapterConfig, adapted_layers, count_adapter_parameters, find_targets
from powertrain.models.config import ModelConfig
from powertrain.models.selection import ALIKE, Selection, all_names, other_names, selected
from powertrain.records import (
    DataFacts,
    Facts,
    Hardware,
    IdleGpu,
    ModelFacts,
    OptimizerFacts,
    PeerLink,
    Reached,
    Software,
    UnknownFact,
)
from powertrain.shapes import linear_shapes

Shapes = dict[str, tuple[int, ...]]


def model_facts(config: ModelConfig, *, method: str = "scratch", path: str = "", adapters: AdapterConfig | None = None,
                frozen_dtype: str = "fp32", unquantised_dtype: str = "", selection: Selection = ALIKE) -> ModelFacts:
    """Return the facts of `config`: every weight trained, or only `adapters` beside weights stored in `frozen_dtype`.

    `selection`: which weights the recipe freezes, and how fast each of the others learns.

    Where that is a 4-bit type, `unquantised_dtype` is that of the weights which stay as their files have them.

    `shapes` names the weights as models/decoder.py does: those outside the blocks and those of block 0, and with them the
    adapters of the first block that has some. Raises WrongUse for targets that the model does not have.
    """
    block, outside = block_shapes(config), outside_shapes(config)
    own = config.layers * _elements(block) + _elements(outside)
    linear: Shapes = {name: shape for name, shape in block.items() if len(shape) == 2}
    adapted, adapter_parameters, layers = _adapters(config, adapters)
    dropout = 0.0 if adapters is None else adapters.dropout
    sizes = {name: math.prod(shape) for name, shape in all_names({**outside, **block, **adapted}, config.layers, layers).items()
             if adapters is None or ".adapters." in name or (config.rewards and name == "head.weight")}
    frozen, rates = selected(selection, sizes, other_names(config, sizes), config.layers)
    return ModelFacts(
        family=config.family, layers=config.layers, width=config.width, heads=config.heads,
        kv_heads=config.kv_heads, head_width=config.head_width, mlp_width=config.mlp_width,
        gated_mlp=config.gated_mlp, vocabulary=config.vocabulary, context=config.context, dropout=config.dropout,
        tied_head=config.tied_head, parameters=own + adapter_parameters,
        trainable=sum(sizes.values()) - sum(sizes[name] for name in frozen), frozen=frozen, rates=rates,
        matmul_parameters=config.layers * _elements(linear), head_parameters=config.classes * config.width,
        task="reward" if config.rewards else "causal",
        shapes={**outside, **block, **adapted}, path=path, method=method, adapter_parameters=adapter_parameters,
        adapted_layers=layers, frozen_dtype=frozen_dtype, window=config.window, adapter_dropout=dropout,
        unquantised_dtype=unquantised_dtype, parallel_residual=config.parallel_residual, rotary_width=config.rotary_width,
    )


def block_shapes(config: ModelConfig) -> Shapes:
    """Return weight name -> shape of block 0: one fused projection for q, k and v, and one for gate and up."""
    linears = linear_shapes(config)
    shapes = {
        **_weights("attention_norm", (config.width,), config.norm_bias),
        **_weights("qkv", linears["qkv"], config.qkv_bias),
        **_weights("attention_out", linears["attention_out"], config.output_bias),
        **_weights("mlp_norm", (config.width,), config.norm_bias),
        **_weights("mlp_in", linears["mlp_in"], config.mlp_bias), **_weights("mlp_out", linears["mlp_out"], config.mlp_bias),
    }
    if config.qk_norm:
        shapes |= {"q_norm.weight": (config.head_width,), "k_norm.weight": (config.head_width,)}
    return {f"blocks.0.{name}": shape for name, shape in shapes.items()}


def outside_shapes(config: ModelConfig) -> Shapes:
    """Return weight name -> shape of the weights outside the blocks. A tied head is the embedding, and counts once."""
    shapes: Shapes = {"embedding.weight": (config.vocabulary, config.width)}
    if config.positions == "learned":
        shapes["position_embedding.weight"] = (config.context, config.width)
    shapes |= _weights("norm", (config.width,), config.norm_bias)
    if not config.tied_head:
        shapes["head.weight"] = (config.classes, config.width)
    return shapes


def _adapters(config: ModelConfig, adapters: AdapterConfig | None) -> tuple[Shapes, int, tuple[int, ...]]:
    """Return the shapes of the adapters in the first block that has some, the numbers in all blocks, and these blocks."""
    if adapters is None:
        return {}, 0, ()
    layers = adapted_layers(config, adapters)
    shapes: Shapes = {}
    for slot in find_targets(config, adapters.target_modules):
        rows, name = slot.last - slot.first, f"{slot.linear}.adapters.{slot.name}"
        if slot.layer != layers[0]:
            continue
        shapes |= {f"{name}.A": (adapters.r, slot.in_features), f"{name}.B": (rows, adapters.r)}
        if adapters.use_dora:
            shapes[f"{name}.magnitude"] = (rows,)
        if adapters.kind == "lslora":
            shapes |= {f"{name}.a": (4,), f"{name}.log_sigma": ()}
    return shapes, count_adapter_parameters(config, adapters), layers


def _weights(name: str, shape: tuple[int, ...], bias: bool) -> Shapes:
    return {f"{name}.weight": shape, **({f"{name}.bias": shape[:1]} if bias else {})}


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


# ------------------------------------------------------------------------------------------------ stored facts


def hardware_from_json(data: Mapping[str, Any]) -> Hardware:
    """Return the hardware of a facts.json. Raises KeyError, TypeError or AttributeError where it has another form."""
    hardware = dict(data)
    capability = hardware.get("compute_capability")
    hardware |= {"instructions": tuple(hardware.get("instructions") or ()),
                 "compute_capability": tuple(capability) if capability else None,
                 "idle_gpu": IdleGpu(**hardware["idle_gpu"]) if hardware.get("idle_gpu") else None,
                 "speeds": {kind: Reached(**seen) for kind, seen in (hardware.get("speeds") or {}).items()},
                 "links": {among: PeerLink(**link) for among, link in (hardware.get("links") or {}).items()}}
    return Hardware(**hardware)


def facts_from_json(data: Mapping[str, Any]) -> Facts:
    """Return the facts of a run's facts.json. Raises UnknownFact where another version wrote other fields."""
    try:
        model = dict(data["model"])
        model |= {"adapted_layers": tuple(model.get("adapted_layers") or ()), "frozen": tuple(model.get("frozen") or ()),
                  "rates": tuple((float(factor), int(count)) for factor, count in model.get("rates") or ()),
                  "shapes": {name: tuple(shape) for name, shape in (model.get("shapes") or {}).items()}}
        return Facts(hardware_from_json(data["hardware"]), Software(**data["software"]), ModelFacts(**model),
                     DataFacts(**data["data"]), OptimizerFacts(**data.get("optimizer", {})),         # older runs have AdamW
                     data.get("loss_has_terms", False), data.get("has_reference", False))
    except (KeyError, TypeError) as error:
        raise UnknownFact(f"the facts are those of another version of powertrain ({error})") from None
