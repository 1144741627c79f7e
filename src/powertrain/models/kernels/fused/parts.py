"""The two halves of a decoder block, before and after attention, forward and backward, as functions of tensors.

They are what autograd would do with decoder.Block, written out, so that little is saved and nothing is computed that nobody
needs: no gradient of a frozen weight, and what only scales or adds is made again in the backward pass instead of kept.
Saved are the normalised inputs n (not the residual, and not n times the norm's weight), what attention needs, its result,
and what the MLP's first product gave: no product is ever made twice. Statistics, activations and the residual are fp32,
whatever type products are computed in. Each function is one region to torch.compile, which then reads and writes every
tensor between two products once.

Legend: T tokens, d width, f MLP width, H heads, K kv heads, D head width, R ranks of a linear's adapters together.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.models.config import ModelConfig
from powertrain.models.kernels.frozen import scaled_product, scaled_product_back
from powertrain.models.kernels.fused.in_place import plus_product

# ------------------------------------------------------------------------------------------------ values


class Linear(NamedTuple):
    """A linear and its adapters, all in the type that products are computed in: y = x (weight + b a)^T + bias.

    With `scales`, `weight` is the codes of a frozen base in 8 bits (models/kernels/frozen.py).
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


class Gradients(NamedTuple):
    """Of a linear or a norm; None for what is not trained. In the types of the products; a and b as in `Linear`."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


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
    norm: Gradients
    out: Gradients
    mlp_in: Gradients
    mlp_out: Gradients


class EnteredBack(NamedTuple):
    """Gradients made by the half before attention. None for what nobody needs."""

    x: Tensor | None = None          # (T, d) fp32
    norm: Gradients = Gradients()
    q_norm: Tensor | None = None     # (D,) fp32
    k_norm: Tensor | None = None
    qkv: Gradients = Gradients()


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


# ------------------------------------------------------------------------------------------------ halves


def is_kept(seed: Tensor, x: Tensor, dropout: float) -> Tensor:
    """Return a mask (T, d), True with probability 1 - dropout: well mixed bits of the seed and the place in x.

    Source: Wellons 2018, the integer hash "lowbias32".
    """
    rows, columns = (torch.arange(count, dtype=torch.int32, device=x.device) for count in x.shape)
    bits = rows[:, None] * x.shape[1] + columns + seed
    bits = (bits ^ (bits >> 16 & 0xffff)) * 0x7feb352d       # >> keeps the sign, which the mask takes away
    bits = (bits ^ (bits >> 15 & 0x1ffff)) * (0x846ca68b - 2**32)
    bits = bits ^ (bits >> 16 & 0xffff)
    return bits >= round(dropout * 2**32) - 2**31


@dataclass(frozen=True)
class Parts:
    """The functions, for blocks of one configuration."""

    config: ModelConfig

    # ------------------------------------------------------------------------------------------- forward

    def enter(self, x: Tensor, cosines: Tensor | None, sines: Tensor | None, weights: EnterWeights) -> tuple[Tensor, Entered]:
        """Return queries and keys at their positions, then values, (T, H + 2 K, D), of the residual x (T, d) fp32."""
        normalised, h = self._normalise(x, weights.norm, weights.dtype)
        y, ranks = product(h, weights.qkv)
        heads, raw = self.heads(y, cosines, sines, weights)
        return heads, Entered(normalised, ranks, raw)

    def heads(self, y: Tensor, cosines: Tensor | None, sines: Tensor | None,
              weights: EnterWeights) -> tuple[Tensor, Tensor | None]:
        """Return what attention reads of the product y (T, (H + 2 K) D), and `raw` of `Entered`."""
        c, dtype = self.config, y.dtype
        heads = torch.unflatten(y, -1, (c.heads + 2 * c.kv_heads, c.head_width))
        q, k, v = heads[:, :c.heads], heads[:, c.heads:-c.kv_heads], heads[:, -c.kv_heads:]
        raw = None
        if weights.q_norm is not None and weights.k_norm is not None:
            raw = heads[:, :c.heads + c.kv_heads]
            q = _unit(q, c.norm_epsilon)[0] * weights.q_norm
            k = _unit(k, c.norm_epsilon)[0] * weights.k_norm
        if cosines is not None and sines is not None:
            q, k = self._turn(q, cosines, sines, dtype), self._turn(k, cosines, sines, dtype)
        return torch.cat((q.to(dtype), k.to(dtype), v), dim=1), raw

    def leave(self, x: Tensor, mixed: Tensor, seeds: Seeds, weights: LeaveWeights) -> tuple[Tensor, Left]:
        """Return the next block's residual, (T, d) fp32, from this one's and what attention gave, mixed (T, H D)."""
        dtype = weights.dtype
        o, out_ranks = product(mixed, weights.out)
        between, normalised, h = self._join_normalise(x, o, seeds.attention, weights.norm, dtype)
        inner, in_ranks = product(h, weights.mlp_in)
        y, down_ranks = product(self._act(inner).to(dtype), weights.mlp_out)
        return self._add(between, y, seeds.mlp), Left(normalised, inner, out_ranks, in_ranks, down_ranks)

    def inner_again(self, n: Tensor, weights: LeaveWeights) -> Tensor:
        """Return `inner` of `Left`, made again from `n` of its norm."""
        return product(_scaled(n.float(), weights.norm).to(n.dtype), weights.mlp_in)[0]

    def heads_again(self, n: Tensor, cosines: Tensor | None, sines: Tensor | None, weights: EnterWeights) -> Tensor:
        """Return what attention reads, made again from `n` of the norm before it."""
        return self.heads(product(_scaled(n.float(), weights.norm).to(n.dtype), weights.qkv)[0], cosines, sines, weights)[0]

    # ------------------------------------------------------------------------------------------- backward

    def leave_back(self, dx: Tensor, mixed: Tensor, left: Left, seeds: Seeds, weights: LeaveWeights,
                   wanted: Wanted) -> LeftBack:
        """Return the gradients that follow from that of the next block's residual, dx (T, d) fp32."""
        c, dtype = self.config, weights.dtype
        dy = self._drop(dx, seeds.mlp).to(dtype)
        da, down_dranks = product_back(dy, weights.mlp_out)
        act, dinner = self._act_back(left.inner, da, dtype)
        mlp_out = weight_gradients(dy, act, left.down_ranks, down_dranks, weights.mlp_out, None, wanted)
        dh, in_dranks = product_back(dinner, weights.mlp_in)
        mlp_in = weight_gradients(dinner, left.normalised.n, left.in_ranks, in_dranks, weights.mlp_in, weights.norm, wanted)
        norm = _norm_gradients(dh, left.normalised, weights.norm, wanted)
        dbetween = self._normalise_back(dx, dh, left.normalised, weights.norm)
        do = self._drop(dx if c.parallel_residual else dbetween, seeds.attention).to(dtype)
        dmixed, out_dranks = product_back(do, weights.out)
        out = weight_gradients(do, mixed, left.out_ranks, out_dranks, weights.out, None, wanted)
        return LeftBack(dbetween, dmixed, norm, out, mlp_in, mlp_out)

    def enter_back(self, dx: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, entered: Entered, cosines: Tensor | None,
                   sines: Tensor | None, weights: EnterWeights, wanted: Wanted) -> EnteredBack:
        """Return the gradients that follow from those of queries (T, H, D), keys and values (T, K, D); dx is added to x's."""
        dy, q_norm, k_norm = self._heads_back(dq, dk, dv, entered, cosines, sines, weights)
        if not wanted.input and not wanted.weights:
            dranks = None if weights.qkv.b is None else dy @ weights.qkv.b
            qkv = weight_gradients(dy, entered.normalised.n, entered.ranks, dranks, weights.qkv, weights.norm, wanted)
            return EnteredBack(qkv=qkv)
        dh, dranks = product_back(dy, weights.qkv)
        qkv = weight_gradients(dy, entered.normalised.n, entered.ranks, dranks, weights.qkv, weights.norm, wanted)
        norm = _norm_gradients(dh, entered.normalised, weights.norm, wanted)
        read = self._normalise_back(dx, dh, entered.normalised, weights.norm) if wanted.input else None
        return EnteredBack(read, norm, q_norm if wanted.weights else None, k_norm if wanted.weights else None, qkv)

    # ------------------------------------------------------------------------------------------- elementwise

    def _heads_back(self, dq: Tensor, dk: Tensor, dv: Tensor, entered: Entered, cosines: Tensor | None, sines: Tensor | None,
                    weights: EnterWeights) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradient of what the first product gave, (T, (H + 2 K) D), and those of the norms of q and k (D,)."""
        c, dtype = self.config, weights.dtype
        if cosines is not None and sines is not None:
            # in fp32 where more of the chain follows
            turned = dtype if entered.raw is None else torch.float32
            dq, dk = self._turn(dq, cosines, -sines, turned), self._turn(dk, cosines, -sines, turned)
        q_norm = k_norm = None
        if entered.raw is not None and weights.q_norm is not None and weights.k_norm is not None:
            q, k = entered.raw[:, :c.heads], entered.raw[:, c.heads:]
            dq, q_norm = _unit_back(dq, q, weights.q_norm, c.norm_epsilon)
            dk, k_norm = _unit_back(dk, k, weights.k_norm, c.norm_epsilon)
        return torch.cat((dq.to(dtype), dk.to(dtype), dv.to(dtype)), dim=1).flatten(1), q_norm, k_norm

    def _add(self, between: Tensor, branch: Tensor, seed: Tensor | None) -> Tensor:
        """Return the residual with the MLP's branch added, (T, d) fp32."""
        return between + self._drop(branch, seed)

    def _drop(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """Return x after dropout, (T, d) fp32. What is dropped is not stored: the backward pass works it out again."""
        if seed is None:
            return x.float()
        return torch.where(is_kept(seed, x, self.config.dropout), x.float() * (1 / (1 - self.config.dropout)), 0.0)

    def _normalise(self, x: Tensor, norm: NormWeights, dtype: torch.dtype) -> tuple[Normalised, Tensor]:
        """Return what the norm's backward pass needs, and its result h in `dtype`."""
        n, rate = _unit(x if self.config.norm == "rms" else x - x.mean(-1, keepdim=True), self.config.norm_epsilon)
        return Normalised(n.to(dtype), rate), _scaled(n, norm).to(dtype)

    def _join_normalise(self, x: Tensor, branch: Tensor, seed: Tensor | None, norm: NormWeights,
                        dtype: torch.dtype) -> tuple[Tensor, Normalised, Tensor]:
        """Return the residual with the attention branch added, (T, d) fp32, and `_normalise` of what the MLP's norm reads."""
        joined = x + self._drop(branch, seed)
        return joined, *self._normalise(x if self.config.parallel_residual else joined, norm, dtype)

    def _normalise_back(self, dx: Tensor, dh: Tensor, normalised: Normalised, norm: NormWeights) -> Tensor:
        """Return dx plus the gradient of the norm's input, (T, d) fp32; dh is that of its result."""
        n, dn = normalised.n.float(), dh.float() * norm.weight
        along = (dn * n).mean(-1, keepdim=True)
        if self.config.norm == "rms":
            return dx + normalised.rate * (dn - n * along)
        return dx + normalised.rate * (dn - dn.mean(-1, keepdim=True) - n * along)

    def _turn(self, x: Tensor, cosines: Tensor, sines: Tensor, dtype: torch.dtype) -> Tensor:
        """Return decoder.rotate of x without a turned copy. Pieces are rounded to `dtype` before they are joined, not after."""
        half = cosines.shape[-1] // 2
        left, right, rest = x[..., :half].float(), x[..., half:2 * half].float(), x[..., 2 * half:]
        c, s = cosines[..., :half], sines[..., :half]
        return torch.cat(((left * c - right * s).to(dtype), (right * c + left * s).to(dtype), rest.to(dtype)), dim=-1)

    def _act(self, inner: Tensor) -> Tensor:
        """Return what the activation gives, times the second half of `inner` where the MLP is gated: (T, f) fp32."""
        if not self.config.gated_mlp:
            return _activate_with_slope(inner.float(), self.config.activation)[0]
        gate, up = inner.chunk(2, dim=-1)
        return _activate_with_slope(gate.float(), self.config.activation)[0] * up.float()

    def _act_back(self, inner: Tensor, dact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what `_act` gave (T, f), made again, and the gradient of `inner`; both in `dtype`."""
        if not self.config.gated_mlp:
            act, slope = _activate_with_slope(inner.float(), self.config.activation)
            return act.to(dtype), (dact.float() * slope).to(dtype)
        gate, up = inner.chunk(2, dim=-1)
        act, slope = _activate_with_slope(gate.float(), self.config.activation)
        dact, up = dact.float(), up.float()
        return (act * up).to(dtype), torch.cat(((dact * up * slope).to(dtype), (dact * act).to(dtype)), dim=-1)


# ------------------------------------------------------------------------------------------------ products


def product(x: Tensor, linear: Linear) -> tuple[Tensor, Tensor | None]:
    """Return x weight^T + bias with what adapters add, (T, in) -> (T, out), and x a^T (T, R), where there are adapters."""
    ranks = None if linear.a is None else x @ linear.a.t()
    if linear.scales is None:
        y = F.linear(x, linear.weight, linear.bias)
        return y if ranks is None or linear.b is None else plus_product(y, ranks, linear.b.t()), ranks
    # in 8 bits scales, bias and what adapters add meet in one loop, in fp32
    y = scaled_product(x, linear.weight, linear.scales)
    y = y if linear.bias is None else y + linear.bias
    return (y if ranks is None or linear.b is None else y + ranks @ linear.b.t()).to(x.dtype), ranks


def product_back(dy: Tensor, linear: Linear) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x (T, in) and of x a^T (T, R), where there are adapters, from that of what `product` gave."""
    dranks = None if linear.b is None else dy @ linear.b
    if linear.scales is None:
        dx = dy @ linear.weight
        return dx if dranks is None or linear.a is None else plus_product(dx, dranks, linear.a), dranks
    dx = scaled_product_back(dy, linear.weight, linear.scales)
    return (dx if dranks is None or linear.a is None else dx + dranks @ linear.a).to(dy.dtype), dranks


def weight_gradients(dy: Tensor, x: Tensor, ranks: Tensor | None, dranks: Tensor | None, linear: Linear,
                     norm: NormWeights | None, wanted: Wanted) -> Gradients:
    """Return a linear's gradients. Where its input is a norm's result, x is the n of the norm, and `norm` its weights.

    A product with n w + b is the product with n, its columns times w, and a rank-one term of b; so h need not be made.
    """
    weight = bias = a = b = None
    if wanted.weights:
        weight = _through_norm(dy.t() @ x, dy, norm)
        bias = None if linear.bias is None else dy.sum(0, dtype=torch.float32)
    if ranks is not None and dranks is not None:
        a = _through_norm(dranks.t() @ x, dranks, norm)
        b = (ranks.t() @ dy).t()             # this way round a CPU's libraries are faster
    return Gradients(weight, bias, a, b)


def _through_norm(gradient: Tensor, dy: Tensor, norm: NormWeights | None) -> Tensor:
    """Return dy^T h, (out, in) fp32, from `gradient`, dy^T n: h is the result of `norm`, or n itself where that is None."""
    if norm is None:
        return gradient.float()
    scaled = gradient * norm.weight          # fp32
    return scaled if norm.bias is None else scaled + dy.sum(0, dtype=torch.float32)[:, None] * norm.bias


# ------------------------------------------------------------------------------------------------ norms, positions, activations


def _norm_gradients(dh: Tensor, normalised: Normalised, norm: NormWeights, wanted: Wanted) -> Gradients:
    if not wanted.weights:
        return Gradients()
    return Gradients((dh.float() * normalised.n.float()).sum(0), None if norm.bias is None else dh.float().sum(0))


def _scaled(n: Tensor, norm: NormWeights) -> Tensor:
    """Return a norm's result in fp32, from n of `Normalised`."""
    return n * norm.weight if norm.bias is None else n * norm.weight + norm.bias


def _unit(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x over the root of the mean of its squares along the last dimension, and one over that root; fp32."""
    x = x.float()
    rate = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return x * rate, rate


def _unit_back(dy: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (T, heads, D) and of the weight (D,), from that of y = _unit(x)[0] * weight."""
    n, rate = _unit(x, epsilon)
    dn = dy.float() * weight
    return rate * (dn - n * (dn * n).mean(-1, keepdim=True)), (dy.float() * n).sum((0, 1))


def _normal_share(x: Tensor, bell: Tensor) -> Tensor:
    """Return the share of a normal distribution below x, within 8e-8; `bell` is exp(-x^2 / 2), which the slope needs too.

    Half of what torch.erf costs. Source: Abramowitz and Stegun 1964, 7.1.26.
    """
    t = 1 / (1 + 0.3275911 * math.sqrt(0.5) * x.abs())
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    above = 0.5 * series * bell
    return torch.where(x < 0, above, 1 - above)


def _activate_with_slope(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return one of config.ACTIVATIONS at x, and its derivative there."""
    if activation == "silu":
        share = torch.sigmoid(x)
        return x * share, share * (1 + x * (1 - share))
    if activation == "gelu":
        bell = torch.exp(-0.5 * x * x)
        share = _normal_share(x, bell)
        return x * share, share + x * bell * (1 / math.sqrt(2 * math.pi))
    root = math.sqrt(2 / math.pi)
    bend = torch.tanh(root * (x + 0.044715 * x * x * x))
    share = 0.5 * (1 + bend)
    return x * share, share + 0.5 * x * (1 - bend * bend) * root * (1 + 3 * 0.044715 * x * x)
