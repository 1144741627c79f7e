"""Which blocks of a model a replay runs: of many equal ones behind each other the first and the last.

Memory moves by the same amount with each of them, forward and backward, so it is fullest at one of the ends; what those
between take and give is what their neighbours did, as often.
"""

from __future__ import annotations

from dataclasses import dataclass

from powertrain.cost.gradients import has_frozen_base, lowest_layer
from powertrain.records import ModelFacts

ENDS = 2                                     # the first and the last of a row of equal units


@dataclass(frozen=True)
class Kind:
    """What makes two blocks equal to the replay."""

    is_adapted: bool
    is_checkpointed: bool
    reads_a_gradient: bool                   # its input needs one
    is_light: bool = False                   # not all that its backward pass needs is kept


@dataclass(frozen=True)
class Unit:
    """As many blocks as pass until the kinds repeat, and how many equal units there are in front of it that are not run."""

    kinds: tuple[Kind, ...]
    left_out: int = 0


def kinds_of(model: ModelFacts, every: int, light: int = 0) -> tuple[Kind, ...]:
    """Of all blocks, when every `every`-th one is checkpointed, if it has a backward pass; 0: none.

    `light`: how many of those that have a backward pass do not keep all that it needs, from below.
    """
    frozen, lowest = has_frozen_base(model), lowest_layer(model)
    return tuple(Kind(is_adapted=layer in model.adapted_layers,
                      is_checkpointed=bool(every) and layer % every == 0 and layer >= lowest,
                      reads_a_gradient=not frozen or layer > lowest,
                      is_light=lowest <= layer < lowest + light) for layer in range(model.layers))


def units_of(kinds: tuple[Kind, ...], period: int) -> list[Unit]:
    """The units to run, in order; those between the ends of a row of equal ones are left out."""
    found: list[Unit] = []
    first = 0
    while first < len(kinds):
        unit = kinds[first:first + period]
        count = 1
        while kinds[first + count * period:first + (count + 1) * period] == unit:
            count += 1
        found.append(Unit(unit))
        if count > 1:
            found.append(Unit(unit, left_out=count - ENDS))
        first += count * len(unit)
    return found
