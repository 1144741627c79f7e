"""The decode step by our own kernel: on a CPU, for models that do not train. See models/kernels/decode/kernel.cpp.

Whoever writes text asks `find_step`. Without a step, torch computes each token, with the same results up to rounding.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from powertrain.models.adapters.attached import AdaptedLinear, Lora
from powertrain.models.config import ACTIVATIONS
from powertrain.models.decoder import Block, Decoder, Norm, rotary_tables
from powertrain.models.kernels.attention import ragged_attention, sdpa_attention
from powertrain.models.kernels.build import DECODE, RAGGED, CannotBuild, load
from powertrain.models.model import evaluating
from powertrain.records import IGNORE, Batch

PLAIN = (torch.float32, torch.bfloat16)      # what weights may be stored in
LONG = 256                                   # tokens of a prompt from which ragged attention is faster than torch's
INTEGER, FLOAT, ADDRESS = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Document(Protocol):
    """What has been read of a document: shelves of each layer's keys and values, (room, K, D) fp32."""

    tokens: int
    keys: dict[int, Tensor]
    values: dict[int, Tensor]

    def make_room(self, layers: int, kv_heads: int, head_width: int) -> None:
        """Let there be room for one token more in every layer."""


# ------------------------------------------------------------------------------------------------ as kernel.cpp declares them


class LinearOf(ctypes.Structure):
    _fields_ = [*((name, ADDRESS) for name in ("weight", "bias", "a", "b")),
                *((name, INTEGER) for name in ("outputs", "inputs", "rank", "is_bf16"))]


class NormOf(ctypes.Structure):
    _fields_ = [("weight", ADDRESS), ("bias", ADDRESS)]


class BlockOf(ctypes.Structure):
    _fields_ = [("attention_norm", NormOf), ("mlp_norm", NormOf), ("q_norm", ADDRESS), ("k_norm", ADDRESS),
                *((name, LinearOf) for name in ("qkv", "attention_out", "mlp_in", "mlp_out"))]


class ModelOf(ctypes.Structure):
    _fields_ = [*((name, INTEGER) for name in (
                    "layers", "width", "heads", "kv_heads", "head_width", "mlp_width", "rotary_width", "most_rank", "window",
                    "is_rms", "is_gated", "is_parallel", "activation")),
                ("epsilon", FLOAT), ("scale", FLOAT), ("blocks", ADDRESS), ("norm", NormOf), ("head", LinearOf)]


class DocumentsOf(ctypes.Structure):
    _fields_ = [("rows", INTEGER), *((name, ADDRESS) for name in ("counts", "keys", "values", "cosines", "sines"))]


# ------------------------------------------------------------------------------------------------ the step


class CannotStep(Exception):
    """The message says why, in one sentence."""


class DecodeStep:
    """Computes the next token's logits of one or several documents. Raises CannotStep where the kernel does not do that."""

    def __init__(self, decoder: Decoder) -> None:
        _check(decoder)
        try:
            self.library = load(DECODE)
        except CannotBuild as error:
            raise CannotStep(str(error)) from None
        # a prompt's products are in bf16, as in training, where weights are and the processor has such products
        self.reads_in_bf16 = decoder.head_weight.dtype is torch.bfloat16 and _has_bf16()
        self.attention = attend_to_prompt if self.reads_in_bf16 and decoder.config.head_width % 2 == 0 else sdpa_attention
        self.library.decode_floats.restype = INTEGER
        config, blocks = decoder.config, [block for block in decoder.blocks if isinstance(block, Block)]
        self.held: list[Any] = []            # what the addresses lead to
        head = decoder.head or decoder.embedding
        described = (BlockOf * len(blocks))(*map(self._block, blocks))
        self.model = ModelOf(
            len(blocks), config.width, config.heads, config.kv_heads, config.head_width, config.mlp_width, config.rotary_width,
            max(linear.rank for block in described for linear in (block.qkv, block.attention_out, block.mlp_in, block.mlp_out)),
            config.window or 0, config.norm == "rms", config.gated_mlp, config.parallel_residual,
            ACTIVATIONS.index(config.activation), config.norm_epsilon, config.head_width ** -0.5,
            ctypes.addressof(described), self._norm(decoder.norm), self._linear(head.weight, None))
        self.held.append(described)

    @torch.no_grad()
    def __call__(self, decoder: Decoder, tokens: Sequence[int], documents: Sequence[Document]) -> Tensor:
        """Return the logits (N, V) fp32 behind one new token of each of N documents, which each then hold it."""
        with evaluating(decoder):
            return self._logits(decoder, tokens, documents)

    def _logits(self, decoder: Decoder, tokens: Sequence[int], documents: Sequence[Document]) -> Tensor:
        ids, counts = torch.tensor(tokens), torch.tensor([document.tokens for document in documents])
        batch = Batch(ids, torch.full_like(ids, IGNORE), counts, (1,) * len(tokens), 0)
        x, rotary = decoder.embed(batch), rotary_tables(decoder.config, batch)
        for document in documents:
            document.make_room(self.model.layers, self.model.kv_heads, self.model.head_width)
        keys, values = (self._addresses([getattr(document, name) for document in documents]) for name in ("keys", "values"))
        cosines, sines = (0, 0) if rotary is None else (table.data_ptr() for table in rotary)
        found = DocumentsOf(len(tokens), counts.data_ptr(), ctypes.addressof(keys), ctypes.addressof(values), cosines, sines)
        step = (ctypes.byref(self.model), ctypes.byref(found), torch.get_num_threads())
        work, logits = torch.empty(self.library.decode_floats(*step)), torch.empty(len(tokens), self.model.head.outputs)
        self.library.decode_step(*step, *(ADDRESS(tensor.data_ptr()) for tensor in (x, work, logits)))
        for document in documents:
            document.tokens += 1
        return logits

    def _addresses(self, shelves: Sequence[dict[int, Tensor]]) -> ctypes.Array[ctypes.c_void_p]:
        """Return where each layer's shelf of each document lies."""
        found = [shelf[layer].data_ptr() for layer in range(self.model.layers) for shelf in shelves]
        return (ADDRESS * len(found))(*found)

    def _address(self, tensor: Tensor | None) -> int | None:
        """Return where the numbers of a tensor lie end to end, and keep them there; None for None."""
        if tensor is None:
            return None
        self.held.append(tensor.detach().contiguous())
        return int(self.held[-1].data_ptr())

    def _floats(self, tensor: Tensor | None) -> int | None:
        return self._address(None if tensor is None else tensor.float())

    def _norm(self, norm: Norm) -> NormOf:
        weight = norm.weight.float()
        return NormOf(self._address(weight + 1 if norm.offset else weight), self._floats(norm.bias))

    def _block(self, block: Block) -> BlockOf:
        heads = [None if norm is None else self._norm(norm).weight for norm in (block.q_norm, block.k_norm)]
        linears = (block.qkv, block.attention_out, block.mlp_in, block.mlp_out)
        return BlockOf(self._norm(block.attention_norm), self._norm(block.mlp_norm), *heads, *map(self._adapted, linears))

    def _adapted(self, linear: nn.Module) -> LinearOf:
        if not isinstance(linear, AdaptedLinear):
            assert isinstance(linear, nn.Linear), type(linear)
            return self._linear(linear.weight, linear.bias)
        adapters = [(slot, linear.adapter(slot)) for slot in linear.slots]
        a = torch.cat([adapter.A for _, adapter in adapters])
        b, rank = torch.zeros(linear.base.out_features, len(a)), linear.config.r
        for number, (slot, adapter) in enumerate(adapters):
            b[slot.first:slot.last, number * rank:(number + 1) * rank] = adapter.B * adapter.scale
        return self._linear(linear.base.weight, linear.base.bias, a, b)

    def _linear(self, weight: Tensor, bias: Tensor | None, a: Tensor | None = None, b: Tensor | None = None) -> LinearOf:
        return LinearOf(self._address(weight), self._floats(bias), self._floats(a), self._floats(b), *weight.shape,
                        0 if a is None else len(a), weight.dtype is torch.bfloat16)


def attend_to_prompt(q: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Compute attention of a whole prompt; see models/kernels/attention.py."""
    kernel = ragged_attention if len(q) >= LONG else sdpa_attention
    return kernel(q, *rest, **named)


def _check(decoder: Decoder) -> None:
    if type(decoder) is not Decoder:
        raise CannotStep("several processes compute the model's blocks")
    if decoder.config.positions_change_at is not None:
        raise CannotStep("all positions of a document change with its length")
    if decoder.head_weight.dtype not in PLAIN:
        raise CannotStep("the kernel takes weights in fp32 and bf16")
    for module in decoder.modules():
        if isinstance(module, AdaptedLinear) and any(type(adapter) is not Lora for adapter in module.adapters.values()):
            raise CannotStep("the kernel takes no adapters but LoRA's")
        if isinstance(module, nn.Linear) and (module.weight is None or module.weight.dtype not in PLAIN):
            raise CannotStep("the kernel takes weights in fp32 and bf16")


def _has_bf16() -> bool:
    try:
        return bool(load(RAGGED).has_bf16())
    except CannotBuild:
        return False


@dataclass(frozen=True)
class Known:
    """The step of a model, or why it has none, and what of the weights that was made from."""

    weights: tuple[Any, ...]
    step: DecodeStep | None
    why: str


KNOWN: WeakKeyDictionary[Decoder, Known] = WeakKeyDictionary()


def find_step(decoder: Decoder) -> DecodeStep | None:
    """Return the decode step of a model, made at its first use; None where torch has to compute each token."""
    return None if torch.is_autocast_enabled("cpu") else _known(decoder).step


def why_no_step(decoder: Decoder) -> str:
    """Return why torch has to compute each token of a model, in one sentence; "" where it has not."""
    return _known(decoder).why


def _known(decoder: Decoder) -> Known:
    if any(weight.requires_grad for weight in decoder.parameters()):
        return Known((), None, "the model trains")
    if any(weight.device.type != "cpu" for weight in decoder.parameters()):
        return Known((), None, "the model is on another device")
    weights = tuple((weight.data_ptr(), weight._version) for weight in decoder.parameters())
    known = KNOWN.get(decoder)
    if known is None or known.weights != weights:
        try:
            known = Known(weights, DecodeStep(decoder), "")
        except CannotStep as error:
            known = Known(weights, None, str(error))
        KNOWN[decoder] = known
    return known
