"""A decoder as llama.cpp computes it: which architecture, which settings, and how its tensors lie.

llama.cpp has one computation graph for each architecture; what a graph does not have, a file cannot ask for, so it is
refused here. Its tensors are ours, split and renamed, with three exceptions:

  llama, mistral   rotate neighbouring dimensions of a head, where we rotate dimension i and i + half: q and k are reordered
  gemma            norms multiply by their weight and not by 1 + weight: 1 is added
  gpt_neox         has a head of its own, also where ours is the embedding

Source: llama.cpp, src/models/*.cpp and conversion/*.py, as of llama-cpp-python 0.3.36; equal logits were seen there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from powertrain.models.config import ModelConfig, RotaryScaling
from powertrain.models.decoder import Decoder, inverse_frequencies
from powertrain.models.huggingface.families import map_weights
from powertrain.records import WrongUse

Metadata = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's graphs, as far as our families differ in it."""

    name: str
    activations: tuple[str, ...]
    biases: bool | None                  # True: in all linears; None: where the file has them; False: in q, k and v at most
    half_rotation: bool = True           # False: neighbours are rotated, so that q and k lie in another order
    scalings: tuple[str, ...] = ("linear", "yarn")
    part_rotation: bool = False          # may rotate a share of the head


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", ("silu",), None, half_rotation=False, scalings=("linear", "llama3", "yarn")),
    "mistral": Architecture("llama", ("silu",), None, half_rotation=False, scalings=("linear", "llama3", "yarn")),
    "qwen2": Architecture("qwen2", ("silu",), False),
    "qwen3": Architecture("qwen3", ("silu",), False),
    "phi3": Architecture("phi3", ("silu",), False, scalings=("linear", "yarn", "longrope"), part_rotation=True),
    "gemma": Architecture("gemma", ("gelu_tanh",), False),
    "gpt2": Architecture("gpt2", ("gelu_tanh",), True, scalings=()),
    "gpt_neox": Architecture("gptneox", ("gelu", "gelu_tanh"), True, part_rotation=True),
}


def find_architecture(config: ModelConfig) -> tuple[Architecture, tuple[str, ...]]:
    """Return the graph that computes this model, and notes for the user. Raises WrongUse where there is none."""
    found = ARCHITECTURES.get(config.family)
    if found is None:
        raise refusal(config, f"has no {config.family} architecture here")
    if config.activation not in found.activations:
        raise refusal(config, f"computes its {found.name} models with {found.activations[0]} and this one has "
                              f"{config.activation}")
    if found.biases is False and (config.output_bias or config.mlp_bias):
        raise refusal(config, f"has biases in its {found.name} models' q, k and v at most and this one has more")
    if config.family == "gemma" and not config.tied_head:
        raise refusal(config, "ties the head of its gemma models to the embedding and this one's is not")
    if config.rotary_width not in (0, config.head_width) and not found.part_rotation:
        raise refusal(config, f"rotates whole heads in its {found.name} models and this one {config.rotary_share:g} of each")
    scaling = config.rotary_scaling
    if scaling is not None and (scaling.kind not in found.scalings or not scaling.whole_dimensions):
        raise refusal(config, f"does not scale the rotary positions of its {found.name} models by {scaling.kind} in this way")
    return found, tuple(_notes(config))


def refusal(config: ModelConfig, because: str) -> WrongUse:
    return WrongUse(f"this {config.family} model cannot be a GGUF file: llama.cpp {because}; use --to merged, which "
                    "transformers and vLLM open")


def _notes(config: ModelConfig) -> Iterator[str]:
    if config.window is not None and config.window < config.context:
        yield (f"llama.cpp has no sliding window for {config.family}, so the file's context is the window's "
               f"{config.window:,} tokens instead of {config.context:,}: within it both compute the same")
    if config.family == "gpt_neox" and config.activation == "gelu":
        yield "llama.cpp approximates gpt_neox's exact GELU by a tanh, so logits differ in the third digit"
    if config.positions_change_at is not None:
        yield (f"llama.cpp turns positions by longrope's long factors whenever its context is set above "
               f"{config.positions_change_at:,} tokens, however short the text")


def architecture_metadata(config: ModelConfig) -> Metadata:
    """Return the settings of the graph, under llama.cpp's keys without the architecture's prefix."""
    norm = "layer_norm_rms_epsilon" if config.norm == "rms" else "layer_norm_epsilon"
    found: Metadata = {
        "vocab_size": config.vocabulary, "context_length": min(config.context, config.window or config.context),
        "embedding_length": config.width, "block_count": config.layers, "feed_forward_length": config.mlp_width,
        "attention.head_count": config.heads, "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_width, "attention.value_length": config.head_width,
        f"attention.{norm}": float(config.norm_epsilon)}
    if config.rotary_width:
        found |= {"rope.dimension_count": config.rotary_width, "rope.freq_base": float(config.rotary_base)}
    if config.family == "gpt_neox":
        found["use_parallel_residual"] = config.parallel_residual
    return found | (scaling_metadata(config.rotary_scaling) if config.rotary_scaling else {})


def scaling_metadata(scaling: RotaryScaling) -> Metadata:
    """Return the settings of scaled positions; llama3's factors are a tensor, longrope's are two tensors."""
    if scaling.kind == "llama3":
        return {}
    if scaling.kind == "longrope":
        return {"rope.scaling.original_context_length": scaling.original_context,
                "rope.scaling.attn_factor": scaling.attention_factor}
    found: Metadata = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "yarn":
        sharpened = 1 + 0.1 * math.log(max(scaling.factor, 1))      # what llama.cpp does by itself, as the paper has it
        found |= {"rope.scaling.original_context_length": scaling.original_context,
                  "rope.scaling.attn_factor": scaling.attention_factor / sharpened,
                  "rope.scaling.yarn_beta_fast": scaling.fast_turns, "rope.scaling.yarn_beta_slow": scaling.slow_turns}
    return found


def extra_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Return rotary factors, each (rotary width / 2,) fp32: the divisors of the pairs' frequencies."""
    scaling = config.rotary_scaling
    if scaling is None:
        return {}
    if scaling.kind == "llama3":
        plain = inverse_frequencies(replace(config, rotary_scaling=None))
        return {"rope_freqs.weight": plain / inverse_frequencies(config)}
    if scaling.kind == "longrope":
        return {"rope_factors_long.weight": torch.tensor(scaling.long_factors),
                "rope_factors_short.weight": torch.tensor(scaling.short_factors)}
    return {}


def all_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the file with llama.cpp's name, fp32 on the CPU, made when it is asked for."""
    import gguf

    config, state = model.config, dict(model.named_parameters())
    yield from extra_tensors(config).items()
    architecture = ARCHITECTURES[config.family]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, config.layers)
    for row in map_weights(config):
        # gpt2 without biases: the graph adds zeros
        ours = state[row.ours].detach().float().cpu() if row.ours in state else \
            torch.zeros(state[row.ours.removesuffix("bias") + "weight"].shape[0])
        parts = ours.split(row.sizes) if row.sizes else (ours,) * len(row.theirs)  # type: ignore[no-untyped-call]
        for theirs, tensor in zip(row.theirs, parts, strict=True):
            name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert name is not None, theirs
            if not architecture.half_rotation and (".attn_q." in name or ".attn_k." in name):
                heads = config.heads if ".attn_q." in name else config.kv_heads
                # (head, half, dimension) -> (head, dimension, half)
                tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            yield name, (tensor + 1 if config.norm_offset and name.endswith("norm.weight") else tensor).contiguous()
    if config.family == "gpt_neox" and config.tied_head:
        yield "output.weight", state["embedding.weight"].detach().float().cpu().contiguous()
