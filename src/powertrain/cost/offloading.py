"""When a tensor that a block keeps is better off in the host's memory than made again, in seconds.

Its copies run beside the computation: out while the next block's forward pass computes, back while a block's backward pass
does. As long as what a block sends takes no longer than that, it costs nothing; beyond, each way costs what it exceeds.
The break-even, for P FLOP/s and a link of B bytes/s each way:

    hidden     bytes of a block <= B / P x FLOPs of the block's shorter pass
    exposed    a number of i bytes takes i / B seconds a way, and 2k / P seconds to be made again from k others:
               waiting one way is the shorter from a contraction length of k = i P / 2B on, waiting both ways from twice that

An RTX 4090 (130 TFLOP/s reached, 25 GB/s) hides all that an 8B model's blocks keep under LoRA, an H200 (700 TFLOP/s, 50 GB/s)
about two fifths of it. Peak rates stand for the computation: the most that a copy can be asked to keep up with.
Source: performance.md 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from powertrain.cost.gradients import linears, lowest_layer
from powertrain.cost.work import forward_flops, training_flops
from powertrain.records import Hardware, ModelFacts
from powertrain.shapes import DTYPE_BYTES

PRODUCTS = {"inner": "mlp_in", "heads": "qkv"}               # kind of tensor -> what gave it, and could again
HOST_ROOM = 0.5              # share of the host's free memory: pinned, it is lost to everybody else


@dataclass(frozen=True)
class Link:
    """Between a GPU and its host, and the rates on both sides of it."""

    bytes_per_s: float                       # each way
    flops_per_s: float                       # of the GPU, at most
    room_bytes: int                          # of the host's memory
    item: int                                # bytes of a number


def link_of(hardware: Hardware, dtype: str) -> Link | str:
    """The link as it is known, for products in `dtype`; else why nothing can be planned with it."""
    if hardware.device != "cuda":
        return f"a {hardware.device} has no host beside it"
    if hardware.host_link_bytes_per_s is None or hardware.host_free_memory_bytes is None:
        return "how fast this GPU and its host copy is not known (`powertrain facts --measure` measures it)"
    flops_per_s = hardware.peak_flops_per_s.get(dtype) or hardware.datasheet_flops_per_s.get(dtype)
    if flops_per_s is None:
        return f"how fast this GPU computes in {dtype} is not known, and so what would hide a copy"
    room_bytes = int(HOST_ROOM * hardware.host_free_memory_bytes)
    return Link(hardware.host_link_bytes_per_s, flops_per_s, room_bytes, DTYPE_BYTES[dtype])


def columns_of(model: ModelFacts) -> dict[str, int]:
    """Kind of tensor that a block keeps -> its numbers a token."""
    parts = {linear.name: linear for linear in linears(model)}
    return {**{kind: parts[name].outputs for kind, name in PRODUCTS.items()}, "mixed": model.heads * model.head_width,
            "normalised": 2 * model.width}


def block_flops(model: ModelFacts, lengths: Sequence[int]) -> tuple[float, float]:
    """FLOPs of one block, forward and backward, on a pass of documents of these lengths."""
    forward = forward_flops(model, lengths, head_share=0.0)
    backward = training_flops(model, lengths, head_share=0.0) - forward
    return forward / model.layers, backward / (model.layers - lowest_layer(model))


def hidden_bytes(model: ModelFacts, tokens: int, link: Link) -> float:
    """What a block may send without being waited for, of one document."""
    return link.bytes_per_s * min(block_flops(model, [tokens])) / link.flops_per_s


def sent_bytes(model: ModelFacts, saved: Mapping[str, str], tokens: int, link: Link) -> int:
    """What one block sends to the host."""
    return tokens * link.item * sum(count for kind, count in columns_of(model).items() if saved.get(kind) == "offload")


def waited_s(model: ModelFacts, saved: Mapping[str, str], lengths: Sequence[int], link: Link) -> float:
    """Seconds that a block waits for its copies, out and back, as far as its computation does not hide them."""
    copy_s = sent_bytes(model, saved, sum(lengths), link) / link.bytes_per_s
    return sum(max(0.0, copy_s - flops / link.flops_per_s) for flops in block_flops(model, lengths))


def added_s(model: ModelFacts, saved: Mapping[str, str], tokens: int, link: Link) -> float:
    """Seconds that a block takes longer on one document: what it makes again, and what it waits for."""
    again = sum(2.0 * tokens * part.weights for part in linears(model)
                if any(name == part.name and saved.get(kind) == "recompute" for kind, name in PRODUCTS.items()))
    return again / link.flops_per_s + waited_s(model, saved, [tokens], link)
