"""What the parts of a block take and give; see parts.py, also for the legend of shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Linear(NamedTuple):
    """A linear and its adapters, all in the type that products are computed in: y = x (weight + b a)^T + bias.

    With `scales`, `weight` is the codes of a frozen base in 8 bits (models/kernels/scaled.py).
    """

    weight: Tensor                   # (out, in)
    bias: Tensor | None = None       # (out,)
    a: Tensor | None = None          # (R, in): the A of all adapters, one below the other
    b: Tensor | None = None          # (out, R): scale x B of each, in its rows and columns, and zeros
    scales: Tensor | None = None     # (out,) fp32


class NormWeights(NamedTuple):
    """fp32. Gemma's 1 + weight is made before."""

    weight: Tensor                   # (d,)
    bias: Tensor | None = None       # (d,)


class Normalised(NamedTuple):
    """What a norm's backward pass needs of its input."""

    n: Tensor                        # (T, d) in the type of products: the input less its mean, over its deviation
    rate: Tensor                     # (T, 1) fp32: one over the deviation


class LinearGradients(NamedTuple):
    """None for what is not trained. In the types of the products; a and b as in `Linear`."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


class NormGradients(NamedTuple):
    weight: Tensor | None = None
    bias: Tensor | None = None


class Wanted(NamedTuple):
    """Which gradients a block has to make."""

    weights: bool                    # of all its weights; else only those of adapters
    input: bool                      # of the residual that it was given


class Entered(NamedTuple):
    """What the backward pass of the half before attention needs."""

    normalised: Normalised
    ranks: Tensor | None             # (T, R) of the adapters of qkv
    raw: Tensor | None               # (T, H + K, D): queries and keys before their own norm, where they have one


class Left(NamedTuple):
    """What the backward pass of the half after attention needs, and what attention gave."""

    normalised: Normalised
    inner: Tensor                    # (T, f), or (T, 2 f) if gated: what the MLP's first product gave
    out_ranks: Tensor | None
    in_ranks: Tensor | None
    down_ranks: Tensor | None


class LeftBack(NamedTuple):
    """Gradients made by the half after attention."""

    x: Tensor                        # (T, d) fp32, of the residual that its norm read
    mixed: Tensor                    # (T, H D), of what attention gave
    norm: NormGradients
    out: LinearGradients
    mlp_in: LinearGradients
    mlp_out: LinearGradients


class EnteredBack(NamedTuple):
    """Gradients made by the half before attention. None for what nobody needs."""

    x: Tensor | None = None          # (T, d) fp32
    norm: NormGradients = NormGradients()
    q_norm: Tensor | None = None     # (D,) fp32
    k_norm: Tensor | None = None
    qkv: LinearGradients = LinearGradients()


class LeaveWeights(NamedTuple):
    out: Linear
    norm: NormWeights
    mlp_in: Linear
    mlp_out: Linear
    dtype: torch.dtype               # of products


class EnterWeights(NamedTuple):
    norm: NormWeights
    qkv: Linear
    dtype: torch.dtype               # of products
    q_norm: Tensor | None = None     # (D,) fp32
    k_norm: Tensor | None = None


class Seeds(NamedTuple):
    """What the two branches' dropout is a function of, () int32; None without dropout."""

    attention: Tensor | None = None
    mlp: Tensor | None = None
