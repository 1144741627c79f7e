"""Which of a fused block's tensors are computed again, or wait in the host's memory, so that a step fits; and what each costs.

Keeping a tensor is worth the FLOPs that computing it again would take, per byte: its contraction length, for the result of a
product. So the tensor with the shortest goes first, the larger one of two that are equal; what attention gave is never
computed again, nor is what the others are made from: those can only wait in the host's memory. Beside a GPU whose link to its
host is known, every mix of the two is weighed by the time that it adds, and the one that adds least to the step is taken.
Blocks that keep everything are left as many as fit; the others are the lowest, whose tensors wait longest for their use.

Copies to the host run beside the computation: out while the next block's forward pass computes, back while a block's backward
pass does. As long as what a block sends takes no longer than that, it costs nothing; beyond, each way costs what it exceeds.
The break-even, for P FLOP/s and a link of B bytes/s each way:

    hidden     bytes of a block <= B / P x FLOPs of the block's shorter pass
    exposed    a number of i bytes takes i / B seconds a way, and 2k / P seconds to be computed again from k others:
               waiting one way is the shorter from a contraction length of k = i P / 2B on, waiting both ways from twice that

An RTX 4090 (130 TFLOP/s reached, 25 GB/s) hides all that an 8B model's blocks keep under LoRA, an H200 (700 TFLOP/s, 50 GB/s)
about two fifths of it. Peak rates stand for the computation: the most that a copy can be asked to keep up with.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from powertrain.cost.memory import peak_memory
from powertrain.cost.weights import linears, lowest_layer
from powertrain.cost.work import forward_flops, training_flops
from powertrain.cost.workload import Workload
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
        return "the copy speed between this GPU and its host is unknown (`powertrain facts --measure` measures it)"
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


# ------------------------------------------------------------------------------------------------ which tensors

NEVER = float("inf")


@dataclass(frozen=True)
class Kind:
    """One kind of tensor that a block keeps."""

    name: str
    columns: int                             # numbers a token
    contraction: float                       # multiplications and additions per number, were it made again


def kinds_by_worth(model: ModelFacts) -> list[Kind]:
    """What is made again or waits elsewhere first, first."""
    inputs = {linear.name: linear.inputs for linear in linears(model)}
    found = [Kind(name, columns, inputs[PRODUCTS[name]] if name in PRODUCTS else NEVER)
             for name, columns in columns_of(model).items()]
    return sorted(found, key=lambda kind: (kind.contraction, -kind.columns))


def lightest_that_fits(model: ModelFacts, workload: Workload, room_bytes: int, link: Link | None = None) -> Workload | None:
    """`workload` with as little put away as fits the room, and with a `link` in the least time; None where nothing fits."""
    if link is None:
        return next((light for saved in _ladder(model) if (light := _fewest_blocks(model, workload, room_bytes, saved))), None)
    best, best_s = None, NEVER
    for block_s, saved in _ways(model, workload.block, link):
        if block_s >= best_s:
            break                            # one block of it takes as long as all of the best
        light = _fewest_blocks(model, workload, room_bytes, saved)
        if light is None or sent_bytes(model, saved, workload.block, link) * light.saved_blocks > link.room_bytes:
            continue
        if block_s * light.saved_blocks < best_s:
            best, best_s = light, block_s * light.saved_blocks
    return best


def _fewest_blocks(model: ModelFacts, workload: Workload, room_bytes: int, saved: Mapping[str, str]) -> Workload | None:
    """With `saved` in as few blocks as fit; None where all of them are not enough."""
    def fits(count: int) -> bool:
        light = replace(workload, saved=saved, saved_blocks=count)
        return sum(peak_memory(model, light).values()) <= room_bytes

    least, most = 0, model.layers - lowest_layer(model)      # the first does not fit, or was not asked; the second does
    if not fits(most):
        return None
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(middle) else (middle, most)
    return replace(workload, saved=saved, saved_blocks=most)


def _ladder(model: ModelFacts) -> Iterator[Mapping[str, str]]:
    """More and more of the kinds that can be made again."""
    saved: dict[str, str] = {}
    for kind in kinds_by_worth(model):
        if kind.contraction != NEVER:
            saved[kind.name] = "recompute"
            yield dict(saved)


def _ways(model: ModelFacts, tokens: int, link: Link) -> list[tuple[float, Mapping[str, str]]]:
    """(seconds that a block takes longer, what it does not keep), the shortest first; of equal ones what frees most."""
    kinds = kinds_by_worth(model)
    choices = [("keep", "offload") if kind.contraction == NEVER else ("keep", "offload", "recompute") for kind in kinds]
    found = []
    for actions in itertools.product(*choices):
        saved = {kind.name: action for kind, action in zip(kinds, actions, strict=True) if action != "keep"}
        freed = sum(kind.columns for kind in kinds if kind.name in saved)
        if saved:
            found.append((added_s(model, saved, tokens, link), -freed, saved))
    return [(block_s, saved) for block_s, _, saved in sorted(found, key=lambda way: way[:2])]
