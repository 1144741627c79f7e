"""Which documents share a forward pass. Pure arithmetic on their lengths.

A step's documents go into passes of at most N tokens by best fit, longest first (Johnson 1973: never more than 11/9 of
the fewest passes, plus one). That fixes how many passes there are; the documents are then dealt out again, costliest
first and each to the cheapest pass that has room, because attention makes one long document dearer than two short ones
of as many tokens. Where that deal does not come out, the best fit stands: its passes are then nearly full anyway.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int, *, crossover: float) -> list[list[int]]:
    """Indices of the documents of each pass: every document once, none split, as many tokens as `budget` at most.

    A document longer than the budget is a pass of its own. `crossover` is the length at which a document's attention
    costs as much as its matrix products, so that a document of l tokens costs l + l * l / crossover. Costliest pass
    first; within a pass the shortest document first, as kernels that group by length like it. Equal arguments give
    equal passes.
    """
    if budget < 1 or crossover <= 0:
        raise ValueError(f"passes of at most {budget} tokens, crossover {crossover}: both must be above 0")
    longest_first = sorted(range(len(lengths)), key=lambda document: (-lengths[document], document))
    alone = [[document] for document in longest_first if lengths[document] > budget]
    rest = longest_first[len(alone):]
    fitted = _best_fit(lengths, rest, budget)
    passes = alone + (_dealt(lengths, rest, budget, len(fitted), crossover) or fitted)
    ordered = [sorted(documents, key=lambda document: (lengths[document], document)) for documents in passes]
    return sorted(ordered, key=lambda documents: (-sum(_cost(lengths[d], crossover) for d in documents), documents))


def _cost(length: int, crossover: float) -> float:
    return length + length * length / crossover


def _best_fit(lengths: Sequence[int], documents: Sequence[int], budget: int) -> list[list[int]]:
    """Each document, in this order, into the fullest pass that has room for it."""
    passes: list[list[int]] = []
    rooms: list[tuple[int, int]] = []                    # (tokens left, pass), ascending
    for document in documents:
        place = bisect.bisect_left(rooms, (lengths[document], -1))
        left, found = rooms.pop(place) if place < len(rooms) else (budget, len(passes))
        if found == len(passes):
            passes.append([])
        passes[found].append(document)
        bisect.insort(rooms, (left - lengths[document], found))
    return passes


def _dealt(lengths: Sequence[int], documents: Sequence[int], budget: int, count: int,
           crossover: float) -> list[list[int]] | None:
    """Each document, in this order, to the cheapest of `count` passes that has room for it; None where none has."""
    passes: list[list[int]] = [[] for _ in range(count)]
    left, costs = [budget] * count, [0.0] * count
    for document in documents:
        open_passes = [i for i in range(count) if left[i] >= lengths[document]]
        if not open_passes:
            return None
        chosen = min(open_passes, key=lambda i: (costs[i], i))
        passes[chosen].append(document)
        left[chosen] -= lengths[document]
        costs[chosen] += _cost(lengths[document], crossover)
    return [documents for documents in passes if documents]
