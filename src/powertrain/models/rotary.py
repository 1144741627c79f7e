"""Rotary positions: how fast each pair of a head's dimensions turns, and the ways to stretch that to longer documents.

Pair i turns by base^(-2i / width) a token. A model trained on C tokens meets angles beyond C that it has never seen:

  linear     all pairs turn slower by the factor, so that no angle is new; near tokens get harder to tell apart
  llama3     only the pairs that turn seldom in C, which carry far positions; a ramp between them and the fast ones
  yarn       as llama3 with a ramp over dimensions instead of frequencies, and a softmax made sharper with the length
  longrope   a factor for each pair, found by search; one set for documents up to C tokens and one for longer ones

Every formula is written in the order of transformers' modeling_rope_utils: at token 100,000 one rounding of a
frequency is an angle of a hundredth.
Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (position interpolation); Llama 3.1; Peng et al. 2023 (YaRN); Ding et al.
2024 (LongRoPE).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from powertrain.models.config import ModelConfig, RotaryScaling
from powertrain.models.kernels.attention import index_on
from powertrain.records import Batch


def rotary_tables(config: ModelConfig, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of the batch's positions, each (T, 1, rotary width) fp32; None with learned positions.

    With longrope each document is stretched by its own length, so that its neighbours do not matter; padding counts.
    """
    if not config.rotary_width:
        return None
    device, change = batch.positions.device, config.positions_change_at
    frequencies = frequencies_on(config, False, device)
    if change is not None:
        is_long = beyond(batch, change)[:, None]
        frequencies = torch.where(is_long, frequencies_on(config, True, device), frequencies)
    angles = batch.positions.float()[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    sharper = config.rotary_scaling.attention_factor if config.rotary_scaling else 1.0
    return angles.cos() * sharper, angles.sin() * sharper


def beyond(batch: Batch, tokens: int) -> Tensor:
    """(T,) bool: whether the token's document is longer than that, counting what a cache holds of it."""
    ends, last = [], -1
    for length in batch.lengths:
        last += length
        ends.append(last)
    device = batch.positions.device
    is_long = batch.positions[index_on(tuple(ends), device)] >= tokens
    return is_long.repeat_interleave(index_on(batch.lengths, device), output_size=last + 1)


@lru_cache(maxsize=64)
def frequencies_on(config: ModelConfig, is_long: bool, device: torch.device) -> Tensor:
    """`inverse_frequencies` on a device, made outside inference mode, so that a later backward pass may keep them."""
    with torch.inference_mode(False):
        return inverse_frequencies(config, is_long).to(device)


def inverse_frequencies(config: ModelConfig, is_long: bool = False) -> Tensor:
    """(rotary width / 2,) fp32 radians a token, on the CPU, whose pow differs from other devices' in the last bit.

    `is_long`: of documents longer than longrope's original context.
    """
    width, base, scaling = config.rotary_width, config.rotary_base, config.rotary_scaling
    slowness = base ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    if scaling is None:
        return 1.0 / slowness
    if scaling.kind == "linear":
        return 1.0 / slowness / scaling.factor
    if scaling.kind == "llama3":
        return llama3_frequencies(1.0 / slowness, scaling)
    if scaling.kind == "yarn":
        return yarn_frequencies(slowness, base, scaling)
    factors = torch.tensor(scaling.long_factors if is_long else scaling.short_factors, dtype=torch.float32, device="cpu")
    return 1.0 / (factors * slowness)


def llama3_frequencies(plain: Tensor, scaling: RotaryScaling) -> Tensor:
    """Pairs that turn less than `slow_turns` times in the original context are stretched, a ramp up to `fast_turns`."""
    wavelength, context = 2 * math.pi / plain, scaling.original_context
    is_slow, is_fast = wavelength > context / scaling.slow_turns, wavelength < context / scaling.fast_turns
    ramp = (context / wavelength - scaling.slow_turns) / (scaling.fast_turns - scaling.slow_turns)
    between = (1 - ramp) * plain / scaling.factor + ramp * plain
    stretched = torch.where(is_slow, plain / scaling.factor, plain)
    return torch.where(~is_slow & ~is_fast, between, stretched)


def yarn_frequencies(slowness: Tensor, base: float, scaling: RotaryScaling) -> Tensor:
    """As `llama3_frequencies`, with the ramp over the pairs' indices."""
    pairs = len(slowness)

    def pair_of(turns: float) -> float:
        """The index, not whole, of the pair that turns so often in the original context."""
        return (2 * pairs * math.log(scaling.original_context / (turns * 2 * math.pi))) / (2 * math.log(base))

    first, last = pair_of(scaling.fast_turns), pair_of(scaling.slow_turns)
    if scaling.whole_dimensions:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    span = last - first or 0.001
    kept = 1 - torch.clamp((torch.arange(pairs, dtype=torch.float32, device="cpu") - first) / span, 0, 1)
    return 1.0 / (scaling.factor * slowness) * (1 - kept) + 1.0 / slowness * kept
