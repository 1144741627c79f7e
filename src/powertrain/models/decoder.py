"""The decoder: one readable model on a flat batch of tokens, which eight families are configurations of.

Documents lie end to end in one row of T tokens with `positions` restarting, so there is no padding and no batch
dimension; only attention looks across tokens, and it is handed in as a kernel (attention.py). Linears that read the
same input are one linear (q, k and v; gate and up): one large product instead of three small ones. The places where
techniques act are arguments: `attention`, and `run_block`, which may compile or checkpoint a block.

Legend: T tokens, V vocabulary, H heads, K kv heads, D head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.models.config import ModelConfig
from powertrain.models.kernels.attention import Attention, math_attention
from powertrain.models.model import Model, Rotary, RunBlock
from powertrain.models.rotary import rotary_tables
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
        """The attention branch: (T, width) -> (T, width)."""
        c = self.config
        heads = self.qkv(x).unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_width))
        q, k, v = heads.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        mixed = attention(q, k, v, lengths, layer=self.index, dropout=c.dropout if self.training else 0.0,
                          window=c.window, scale=c.head_width ** -0.5)
        return F.dropout(self.attention_out(mixed.flatten(1)), c.dropout, self.training)

    def transform(self, x: Tensor) -> Tensor:
        """The MLP branch: (T, width) -> (T, width)."""
        inner = self.mlp_in(x)
        if self.config.gated_mlp:
            gate, up = inner.chunk(2, dim=-1)
            inner = activate(gate, self.config.activation) * up
        else:
            inner = activate(inner, self.config.activation)
        return F.dropout(self.mlp_out(inner), self.config.dropout, self.training)


def activate(x: Tensor, activation: str) -> Tensor:
    """One of config.ACTIVATIONS."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions on the first dimensions of each head of x (T, H, D), in fp32; the rest passes.

    Dimension i is paired with i + rotary width / 2, as in GPT-NeoX and Hugging Face's Llama.
    """
    width = cosines.shape[-1]
    turned = x[..., :width].float()
    left, right = turned.chunk(2, dim=-1)
    turned = (turned * cosines + torch.cat((-right, left), dim=-1) * sines).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def run_plainly(block: Block, index: int, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...],
                attention: Attention) -> Tensor:
    """Calls the block."""
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
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.context, config.width) if learned else None
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm = Norm(config.width, config)
        self.head = None if config.tied_head else nn.Linear(config.width, config.vocabulary, bias=False)
        self.initialise()

    @property
    def input_embeddings(self) -> tuple[nn.Module]:
        return (self.embedding,)

    @property
    def head_weight(self) -> Tensor:
        """(V, width): the head's matrix, or the embedding where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def initialise(self) -> None:
        """Draws all weights anew: matrices normal, biases zero, norms at identity.

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
        """(T, width) fp32, whatever dtype the embedding is stored in.

        Raises WrongUse for a document that is longer than learned positions reach.
        """
        x: Tensor = self.embedding(batch.tokens).float()
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.position_embedding is not None:
            longest = max(batch.lengths, default=0)
            if longest > self.config.context:
                raise WrongUse(f"a document of {longest} tokens is longer than the context of {self.config.context}, "
                               f"beyond which {self.config.family} has no positions; cut it, or make the context "
                               f"{longest}")
            x = x + self.position_embedding(batch.positions)
        return F.dropout(x, self.config.dropout, self.training)

    def hidden(self, batch: Batch, *, attention: Attention = math_attention,
               run_block: RunBlock | None = None) -> Tensor:
        """(T, width): what the head reads, after the last norm."""
        run_block = run_block or run_plainly
        x, rotary = self.embed(batch), rotary_tables(self.config, batch)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = run_block(block, index, x, rotary, batch.lengths, attention)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """(T, width) -> (T, V), in the dtype of hidden or of autocast, whatever dtype the head is stored in."""
        weight = self.head_weight
        if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            weight = weight.to(hidden.dtype)
        return F.linear(hidden, weight)

    def forward(self, batch: Batch, *, attention: Attention = math_attention,
                run_block: RunBlock | None = None) -> Tensor:
        """(T, V): for each token the logits of the one that follows it."""
        return self.logits(self.hidden(batch, attention=attention, run_block=run_block))


def decays(parameter: Tensor) -> bool:
    """Whether weight decay pulls on it: matrices and embeddings yes, biases and norms no, as in nanoGPT."""
    return parameter.dim() >= 2


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters that weight decay pulls on, and those that it leaves alone."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in trainable if decays(p)], [p for p in trainable if not decays(p)]
