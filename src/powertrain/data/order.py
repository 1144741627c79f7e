"""Which examples a step reads, and which of them share a forward pass: pure functions, so that a run resumes without state.

The order is built on raw Philox output, whose stream numpy keeps across versions; the order that Generator.permutation() gives
is not promised. Source: numpy's NEP 19 (stream compatibility).

Few examples are sorted by random numbers, so every order is equally likely. Of many that would take memory and time at each
epoch; there a permutation with a key says where each place of the epoch leads, and nothing is stored. Runs that were begun
before it was so (data.order=sorted) sort any number.
"""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Order = Literal["keyed", "sorted"]
SORTED_MOST = 1 << 16                        # examples that are sorted in either order: half a MiB
CHUNK = 1 << 12                              # places of a keyed permutation that are computed at once
DRAWN_AT_ONCE = 1 << 20                      # numbers: 8 MiB
ROUNDS = 4                                   # of a keyed permutation, each of both halves
SPLIT_STREAM = 2**64 - 1                     # the stream that draws the validation set: no epoch reaches this number


def seeded_order(seed: int, stream: int, count: int) -> npt.NDArray[np.int64]:
    """Return a permutation of `count` numbers, the same on every machine: (count,) int64."""
    key = np.array([seed, stream], dtype=np.uint64)
    # stable: two equal draws are possible, if unlikely, and must not depend on the sort's whim
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable").astype(np.int64, copy=False)


def keyed_places(seed: int, stream: int, count: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where a permutation of `count` numbers sends these places, each below `count`: (places,) int64.

    A Feistel network over the bits of `count`; what it sends beyond `count` is sent on until it lies below. Sources: Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains" (cycle walking); Steele et al. 2014 (splitmix64, the round function).
    """
    bits = max(2, (count - 1).bit_length())
    low = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64((1 << width) - 1) for width in (bits // 2, bits - bits // 2))
    keys = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(2 * ROUNDS)
    found = places.astype(np.uint64)
    beyond = np.arange(len(found))
    while len(beyond):
        high, rest = found[beyond] >> low, found[beyond] & low_mask
        for first, second in keys.reshape(ROUNDS, 2):
            high ^= _mixed(rest + first) & high_mask
            rest ^= _mixed(high + second) & low_mask
        found[beyond] = high << low | rest
        beyond = beyond[found[beyond] >= count]
    return found.astype(np.int64)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


def in_seeded_order(seed: int, stream: int, count: int) -> Iterator[int]:
    """Yield what `seeded_order` returns, of which no more than about DRAWN_AT_ONCE numbers are in memory.

    The lowest draws come first: each part of the order is what was drawn between two bounds, from the stream drawn anew.
    """
    parts = -(-count // DRAWN_AT_ONCE)
    for part in range(parts):
        low, high = (np.uint64(min(2**64 - 1, (part + more) * 2**64 // parts)) for more in (0, 1))
        generator, places, draws = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)), [], []
        for first in range(0, count, DRAWN_AT_ONCE):
            drawn = generator.random_raw(min(DRAWN_AT_ONCE, count - first))
            inside = np.flatnonzero((drawn >= low) & ((drawn < high) | (part == parts - 1)))
            places.append(first + inside)
            draws.append(drawn[inside])
        yield from np.concatenate(places)[np.argsort(np.concatenate(draws), kind="stable")].tolist()


def draw_share(counts: Sequence[int] | npt.NDArray[Any], share: float, seed: int, most: int | None = None) -> list[int]:
    """Return the numbers of the units that validate, of units with these `counts`: `most` at most, and at least one.

    In the seed's order, each unit is drawn that brings the sum of the drawn counts nearer to `share` of all.
    """
    counts = np.asarray(counts)
    missing, least = share * int(counts.sum()), int(counts.min())
    drawn: list[int] = []
    for unit in in_seeded_order(seed, SPLIT_STREAM, len(counts)):
        if missing < 0.5 or 2 * missing <= least or len(drawn) == most:
            break
        if (of_unit := int(counts[unit])) < 2 * missing:
            drawn.append(unit)
            missing -= of_unit
    return drawn or [int(counts.argmin())]


def draw_tokens(lengths: npt.NDArray[np.int64], wanted: float, seed: int, source: int) -> npt.NDArray[np.int64]:
    """Return how often each example (N,) of a source is drawn, so that their tokens come as near to `wanted` as they can.

    All examples are drawn equally often, and some in a seeded order once more.
    """
    total = int(lengths.sum())
    whole, rest = divmod(wanted, total) if total else (0, 0)
    times = np.full(len(lengths), int(whole), dtype=np.int64)
    order = seeded_order(seed, SPLIT_STREAM - 1 - source, len(lengths))
    sums = lengths[order].cumsum()
    more = int(sums.searchsorted(rest))      # examples whose sum stays below
    if more < len(order) and sums[more] - rest <= rest - (sums[more - 1] if more else 0):
        more += 1                            # one more comes nearer
    times[order[:more]] += 1
    return times


@lru_cache(maxsize=2)  # a step may span two epochs, and the next step asks for the same ones
def epoch_order(seed: int, epoch: int, examples: int) -> npt.NDArray[np.int64]:
    """Return the order of `examples` in the 0-based `epoch`: (examples,) int64, read-only because it is shared."""
    order = seeded_order(seed, epoch, examples)
    order.setflags(write=False)
    return order


def cursor(step: int, train_batch_size: int, examples: int) -> tuple[int, int]:
    """Return epoch and position in it (both 0-based) of the first example of the 0-based optimizer step `step`."""
    return divmod(step * train_batch_size, examples)


@lru_cache(maxsize=4)
def _keyed_chunk(seed: int, epoch: int, examples: int, chunk: int) -> npt.NDArray[np.int64]:
    """Return the examples at the places of a chunk of the 0-based `epoch`: (CHUNK,) int64, fewer in the last one."""
    places = np.arange(chunk * CHUNK, min((chunk + 1) * CHUNK, examples))
    return keyed_places(seed, epoch, examples, places)


def _next_part(seed: int, epoch: int, examples: int, position: int, order: Order) -> npt.NDArray[np.int64]:
    """Return the examples of the 0-based `epoch` from `position` on, as many as are at hand."""
    if order == "sorted" or examples <= SORTED_MOST:
        return epoch_order(seed, epoch, examples)[position:]
    return _keyed_chunk(seed, epoch, examples, position // CHUNK)[position % CHUNK:]


def step_examples(seed: int, step: int, train_batch_size: int, examples: int, order: Order = "keyed") -> npt.NDArray[np.int64]:
    """Return the indices of the examples of the 0-based optimizer step `step`: (train_batch_size,) int64.

    The epochs run end to end: a step may finish one and begin the next, and no example is left out or seen twice.
    """
    epoch, position = cursor(step, train_batch_size, examples)
    parts = []
    missing = train_batch_size
    while missing > 0:
        part = _next_part(seed, epoch, examples, position, order)[:missing]
        parts.append(part)
        missing -= len(part)
        position += len(part)
        if position == examples:
            epoch, position = epoch + 1, 0
    return np.concatenate(parts)


def pass_seed(seed: int, step: int, place: int) -> int:
    """Return the seed of what one pass of a step (from 0) draws, such as dropout: the same in whichever process it runs."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {place}".encode(), digest_size=8).digest()) >> 1


def pack(lengths: Sequence[int], budget: int, *, crossover: float) -> list[list[int]]:
    """Return the indices of the documents of each pass: every document once, none split, as many tokens as `budget` at most.

    A document longer than the budget is a pass of its own. `crossover` is the length at which a document's attention
    costs as much as its matrix products, so that a document of l tokens costs l + l * l / crossover. Costliest pass
    first; within a pass the shortest document first, as kernels that group by length like it. Equal arguments give
    equal passes.

    Best fit, longest first, fixes how many passes there are (Johnson 1973: at most 11/9 of the fewest, plus one). The
    documents are then dealt out again, costliest first and each to the cheapest pass that has room, because attention makes
    one long document dearer than two short ones of as many tokens. Where that deal fails, the best fit stands.
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
    """Put each document, in this order, into the fullest pass that has room for it."""
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
    """Deal each document, in this order, to the cheapest of `count` passes that has room for it; None where none has."""
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
