"""Which of a hand-written block's tensors are made again, or wait in the host's memory, so that a step fits.

Keeping a tensor is worth the FLOPs that making it again would take, per byte: its contraction length, for what a product
gave. So what has the shortest goes first, the larger one of two that are equal; what attention gave is never made again and
comes last, with what the others are made from: those can only wait elsewhere, which takes a GPU with a host. Blocks that
keep everything are left as many as fit; those that do not are the lowest, whose tensors wait longest for their use.
Source: performance.md 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from powertrain.cost.gradients import linears, lowest_layer
from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts

PRODUCTS = {"inner": "mlp_in", "heads": "qkv"}               # what gave them
NEVER = float("inf")


@dataclass(frozen=True)
class Kind:
    """One kind of tensor that a block keeps."""

    name: str
    columns: int                             # numbers a token
    contraction: float                       # multiplications and additions per number, were it made again


def kinds_by_worth(model: ModelFacts) -> list[Kind]:
    """What is made again or waits elsewhere first, first."""
    parts = {linear.name: linear for linear in linears(model)}
    found = [Kind(name, parts[product].outputs, parts[product].inputs) for name, product in PRODUCTS.items()]
    found += [Kind("normalised", 2 * model.width, NEVER), Kind("mixed", model.heads * model.head_width, NEVER)]
    return sorted(found, key=lambda kind: (kind.contraction, -kind.columns))


def lightest_that_fits(model: ModelFacts, workload: Workload, room_bytes: int, *, offloads: bool) -> Workload | None:
    """`workload` with as little put away as fits the room; None where all that can be is not enough."""
    blocks = model.layers - lowest_layer(model)
    for saved in _ladder(model, offloads=offloads):
        def fits(count: int, saved: Mapping[str, str] = saved) -> bool:
            light = replace(workload, saved=saved, saved_blocks=count)
            return sum(peak_memory(model, light).values()) <= room_bytes

        if not fits(blocks):
            continue
        least, most = 0, blocks              # the first does not fit, or was not asked; the second does
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if fits(middle) else (middle, most)
        return replace(workload, saved=saved, saved_blocks=most)
    return None


def _ladder(model: ModelFacts, *, offloads: bool) -> Iterator[Mapping[str, str]]:
    """More and more kinds."""
    saved: dict[str, str] = {}
    for kind in kinds_by_worth(model):
        if kind.contraction == NEVER and not offloads:
            return
        saved[kind.name] = "offload" if kind.contraction == NEVER else "recompute"
        yield dict(saved)
