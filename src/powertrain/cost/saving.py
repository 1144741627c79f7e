"""Which of a hand-written block's tensors are made again, or wait in the host's memory, so that a step fits.

Keeping a tensor is worth the FLOPs that making it again would take, per byte: its contraction length, for what a product
gave. So what has the shortest goes first, the larger one of two that are equal; what attention gave is never made again, nor
is what the others are made from: those can only wait elsewhere. Beside a GPU whose link to its host is known, every mix of
the two is weighed by the time that it adds (offloading.py), and the one that adds least to the step is taken: copies that
hide behind the computation before anything is made again. Blocks that keep everything are left as many as fit; those that
do not are the lowest, whose tensors wait longest for their use.
Source: performance.md 3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from powertrain.cost.gradients import linears, lowest_layer
from powertrain.cost.memory import peak_memory
from powertrain.cost.offloading import PRODUCTS, Link, added_s, columns_of, sent_bytes
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts

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
