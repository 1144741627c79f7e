"""The decoder: one readable model on a flat batch of tokens, which eight families are configurations of.

Documents lie end to end in one row of T tokens with `positions` restarting, so there is no padding and no batch
dimension; only attention looks across tokens, and it is handed in as a kernel (attention.py). Linears that read the
same input are one linear (q, k and v; gate and up): one large product instead of three small ones. The places where
techniques act are arguments: `attention`, and `run_block`, which may compile or checkpoint a block.

Rotary positions turn pair i of a head's dimensions by base^(-2i / width) a token. A model trained on C tokens meets angles
beyond C that it has never seen:

  linear     all pairs turn slower by the factor, so that no angle is new; near tokens get harder to tell apart
  llama3     only the pairs that turn seldom in C, which carry far positions; a ramp between them and the fast ones
  yarn       as llama3 with a ramp over dimensions instead of frequencies, and a softmax made sharper with the length
  longrope   a factor for each pair, found by search; one set for documents up to C tokens and one for longer ones

Every formula is written in the order of transformers' modeling_rope_utils: at token 100,000 one rounding of a
frequency is an angle of a hundredth.
Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (position interpolation); Llama 3.1; Peng et al. 2023 (YaRN); Ding et al.
2024 (LongRoPE).

Legend: T tokens, V vocabulary, H heads, K kv heads, D head width.
"""

import dataclasses
import itertools
import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.models.config import ModelConfig, RotaryScaling
from powertrain.models.kernels.attention import Attention, index_on, math_attention
from powertrain.models.model import Model, Rotary, RunBlock
from powertrain.records import Batch, WrongUse
from powertrain.shapes import linear_shapes

INITIAL_DEVIATION = 0.02              # of all matrices: GPT-2


class Norm(nn.Module):
    """Layer norm or RMS norm over the last dimension, with fp32 statistics whatever the dtype of x."""

    def __init__(self, width: int, config: ModelConfig, kind: str | None = None) -> None:
        super().__init__()
        self.kind, self.epsilon, self.offset = kind or config.norm, config.norm_epsilon, config.norm_offset
        self.weight = nn.Parameter(torch.empty(width))
        has_bias = self.kind == "layer" and config.norm_bias
        self.bias = nn.Parameter(torch.empty(width)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + 1 if self.offset else self.weight.float()
        if self.kind == "rms":
            return F.rms_norm(x.float(), weight.shape, weight, self.epsilon).to(x.dtype)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.epsilon).to(x.dtype)


class Block(nn.Module):
    """Attention and an MLP, each on a norm of the residual x (T, width)."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.heads, self.kv_heads = config.heads, config.kv_heads    # fewer where processes divide them
        shapes = linear_shapes(config)

        def linear(name: str, bias: bool) -> nn.Linear:
            outputs, inputs = shapes[name]
            return nn.Linear(inputs, outputs, bias=bias)

        self.attention_norm = Norm(config.width, config)
        self.qkv = linear("qkv", config.qkv_bias)
        self.attention_out = linear("attention_out", config.output_bias)
        self.mlp_norm = Norm(config.width, config)
        self.mlp_in = linear("mlp_in", config.mlp_bias)      # gate, then up, if gated
        self.mlp_out = linear("mlp_out", config.mlp_bias)
        self.q_norm = Norm(config.head_width, config, "rms") if config.qk_norm else None
        self.k_norm = Norm(config.head_width, config, "rms") if config.qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...], attention: Attention) -> Tensor:
        mixed = self.attend(self.attention_norm(x), rotary, lengths, attention)
        if self.config.parallel_residual:
            return x + mixed + self.transform(self.mlp_norm(x))
        x = x + mixed
        return x + self.transform(self.mlp_norm(x))

    def attend(self, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...], attention: Attention) -> Tensor:
        """Compute the attention branch: (T, width) -> (T, width)."""
        c = self.config
        heads = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, c.head_width))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        mixed = attention(q, k, v, lengths, layer=self.index, dropout=c.dropout if self.training else 0.0,
                          window=c.window, scale=c.head_width ** -0.5)
        return F.dropout(self.attention_out(mixed.flatten(1)), c.dropout, self.training)

    def transform(self, x: Tensor) -> Tensor:
        """Compute the MLP branch: (T, width) -> (T, width)."""
        inner = self.mlp_in(x)
        if self.config.gated_mlp:
            gate, up = inner.chunk(2, dim=-1)
            inner = activate(gate, self.config.activation) * up
        else:
            inner = activate(inner, self.config.activation)
        return F.dropout(self.mlp_out(inner), self.config.dropout, self.training)


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply one of config.ACTIVATIONS to x."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary positions to the first dimensions of each head of x (T, H, D), in fp32; the rest stays as it is.

    Dimension i is paired with i + rotary width / 2, as in GPT-NeoX and Hugging Face's Llama.
    """
    width = cosines.shape[-1]
    turned = x[..., :width].float()
    left, right = turned.chunk(2, dim=-1)
    turned = (turned * cosines + torch.cat((-right, left), dim=-1) * sines).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def run_plainly(block: Block, index: int, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...],
                attention: Attention) -> Tensor:
    """Call the block."""
    del index
    out: Tensor = block(x, rotary, lengths, attention)
    return out


class Decoder(Model):
    """Token ids to logits. Weights are fp32 and drawn with torch's global generator: seed it first.

    `base` is where its weights were loaded from, which is what an adapter's files say that they adapt.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.base = config, ""
        self.embedding = _embedding(config.vocabulary, config.width)
        learned = config.positions == "learned"
        self.position_embedding = _embedding(config.context, config.width) if learned else None
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm = Norm(config.width, config)
        self.head = None if config.tied_head else nn.Linear(config.width, config.classes, bias=False)
        self.initialise()

    @property
    def input_embeddings(self) -> tuple[nn.Module]:
        return (self.embedding,)

    @property
    def head_weight(self) -> Tensor:
        """Return the head's matrix (V, width), or the embedding where they are tied; of a reward model (1, width)."""
        return self.embedding.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw all weights anew: matrices normal, biases zero, norms at identity.

        The two matrices that write to the residual stream are smaller by sqrt(2 layers), so that its variance does not
        grow with depth. Source: Radford et al. 2019 (GPT-2), section 2.3.
        """
        if self.embedding.weight.is_meta:
            return                           # weights are to be loaded, and to draw none takes seconds
        residual = INITIAL_DEVIATION / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                writes = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=residual if writes else INITIAL_DEVIATION)
            elif name.endswith("bias") or self.config.norm_offset:
                nn.init.zeros_(parameter)
            else:
                nn.init.ones_(parameter)

    def embed(self, batch: Batch) -> Tensor:
        """Return the embedded tokens (T, width) in fp32, whatever dtype the embedding is stored in.

        Raises WrongUse for a document that is longer than learned positions reach.
        """
        x: Tensor = self.embedding(batch.tokens).float()
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.position_embedding is not None:
            self.check_lengths(batch)
            x = x + self.position_embedding(batch.positions)
        return F.dropout(x, self.config.dropout, self.training)

    def check_lengths(self, batch: Batch) -> None:
        """Raise WrongUse for a document that is longer than learned positions reach."""
        longest = max(batch.lengths, default=0)
        if self.position_embedding is not None and longest > self.config.context:
            raise WrongUse(f"a document of {longest} tokens is longer than the context of {self.config.context}, beyond which "
                           f"{self.config.family} has no positions; cut it, or make the context {longest}")

    def hidden(self, batch: Batch, *, attention: Attention = math_attention,
               run_block: RunBlock | None = None) -> Tensor:
        """Return the head's input (T, width), after the last norm."""
        run_block = run_block or run_plainly
        x, rotary = self.embed(batch), rotary_tables(self.config, batch)
        for index, block in enumerate(self.blocks):
            if isinstance(block, Block):     # else another process has it
                x = run_block(block, index, x, rotary, batch.lengths, attention)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (T, V) of `hidden` (T, width), in its dtype or autocast's, whatever dtype the head is stored in."""
        weight = self.head_weight
        if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            weight = weight.to(hidden.dtype)
        return F.linear(hidden, weight)

    def forward(self, batch: Batch, *, attention: Attention = math_attention,
                run_block: RunBlock | None = None) -> Tensor:
        """Return (T, V): for each token the logits of the one that follows it."""
        return self.logits(self.hidden(batch, attention=attention, run_block=run_block))


def give_reward_head(model: Decoder) -> None:
    """Replace the head by a new one that gives one score, drawn in fp32 with torch's global generator."""
    model.config = dataclasses.replace(model.config, rewards=True, tied_head=False)
    model.head = nn.Linear(model.config.width, 1, bias=False)
    nn.init.normal_(model.head.weight, std=INITIAL_DEVIATION)


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters with weight decay (matrices and embeddings), and those without (biases and norms).

    Source: nanoGPT.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in trainable if p.dim() >= 2], [p for p in trainable if p.dim() < 2]


# ------------------------------------------------------------------------------------------------ rotary positions


def rotary_tables(config: ModelConfig, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines of the batch's positions, each (T, 1, rotary width) fp32; None with learned positions.

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
    """Return (T,) bool: whether the token's document is longer than `tokens`, counting what a cache holds of it."""
    _, *ends = itertools.accumulate(batch.lengths, initial=-1)
    device = batch.positions.device
    is_long = batch.positions[index_on(tuple(ends), device)] >= tokens
    return is_long.repeat_interleave(index_on(batch.lengths, device), output_size=sum(batch.lengths))


@lru_cache(maxsize=64)
def frequencies_on(config: ModelConfig, is_long: bool, device: torch.device) -> Tensor:
    """Return `inverse_frequencies` on a device, made outside inference mode, so that a later backward pass may keep them."""
    with torch.inference_mode(False):
        return inverse_frequencies(config, is_long).to(device)


def inverse_frequencies(config: ModelConfig, is_long: bool = False) -> Tensor:
    """Return (rotary width / 2,) fp32 radians a token, on the CPU, because other devices' pow differs in the last bit.

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
    """Stretch the pairs that turn less than `slow_turns` times in the original context, with a ramp up to `fast_turns`."""
    wavelength, context = 2 * math.pi / plain, scaling.original_context
    is_slow, is_fast = wavelength > context / scaling.slow_turns, wavelength < context / scaling.fast_turns
    ramp = (context / wavelength - scaling.slow_turns) / (scaling.fast_turns - scaling.slow_turns)
    between = (1 - ramp) * plain / scaling.factor + ramp * plain
    stretched = torch.where(is_slow, plain / scaling.factor, plain)
    return torch.where(~is_slow & ~is_fast, between, stretched)


def yarn_frequencies(slowness: Tensor, base: float, scaling: RotaryScaling) -> Tensor:
    """Stretch pairs as `llama3_frequencies` does, with the ramp over the pairs' indices."""
    pairs = len(slowness)

    def pair_of(turns: float) -> float:
        """Return the index, as a fraction, of the pair that turns `turns` times in the original context."""
        return (2 * pairs * math.log(scaling.original_context / (turns * 2 * math.pi))) / (2 * math.log(base))

    first, last = pair_of(scaling.fast_turns), pair_of(scaling.slow_turns)
    if scaling.whole_dimensions:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    span = last - first or 0.001
    kept = 1 - torch.clamp((torch.arange(pairs, dtype=torch.float32, device="cpu") - first) / span, 0, 1)
    return 1.0 / (scaling.factor * slowness) * (1 - kept) + 1.0 / slowness * kept


def _embedding(rows: int, width: int) -> nn.Embedding:
    """Return an embedding. On the meta device its weights are not drawn: torch imports for a second before it does that."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width) if torch.empty(0).is_meta else None)
