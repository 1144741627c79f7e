"""Answers to many prompts at once: each step of the decoder computes the next token of several documents.

A step of one document reads all weights for one token, and a step of eight reads them once for eight. Each document has a
slot with its own keys and values. When a document ends, the next prompt is read and takes its slot, so short answers do not
wait for long ones. A prompt is read alone, as in generation.py. By the decode step (decode.py) an answer is the same bits
whatever is answered beside it or was before it. Without it, attention of a slot is that of generation.py's `attend_to_all`,
with the places behind its tokens masked, so greedy answers in fp32 are those that one at a time gives, up to ties of
rounding.

A model behind the bridge, and a document that would outgrow the context, is answered one at a time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from powertrain.models.decoder import Decoder
from powertrain.models.model import Model, evaluating
from powertrain.records import IGNORE, Batch
from powertrain.use.decode import find_step
from powertrain.use.generation import FIRST_ROOM, CachedAttention, DecoderFeed, Feed, Sampling, choose, generate_ids, open_feed


@dataclass(frozen=True)
class Job:
    """A prompt, with how it is answered."""

    number: int
    ids: tuple[int, ...]                     # at least one
    sampling: Sampling
    stops: frozenset[int]                    # tokens that end the answer


@dataclass(frozen=True)
class Done:
    number: int
    ids: tuple[int, ...]                     # of the answer, without the token that ended it
    stopped: bool                            # by that token, and not by the most tokens


@dataclass
class SlotAttention:
    """An attention kernel for one new token of each of N documents."""

    counts: list[int]                                          # tokens of each document, before the new one
    keys: dict[int, Tensor] = field(default_factory=dict)      # layer -> (N, room, K, D)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                 window: int | None, scale: float) -> Tensor:
        slots, end = torch.arange(len(q), device=q.device), max(self.counts) + 1
        places = torch.tensor(self.counts, device=q.device)                        # (N,): where the new token stands
        keys = self.keys[layer] = _with_room(self.keys[layer], end)
        values = self.values[layer] = _with_room(self.values[layer], end)
        keys[slots, places], values[slots, places] = k, v
        columns = torch.arange(end, device=q.device)
        unseen = columns > places[:, None]                                         # (N, end)
        if window:
            unseen |= columns <= places[:, None] - window
        kv_heads = k.shape[1]
        grouped = q.view(len(q), kv_heads, -1, q.shape[-1])                        # (N, K, H / K, D)
        scores = grouped @ keys[:, :end].permute(0, 2, 3, 1) * scale               # (N, K, H / K, end)
        weights = torch.softmax(scores.float().masked_fill(unseen[:, None, None], -torch.inf), -1).to(v.dtype)
        return (weights @ values[:, :end].transpose(1, 2)).reshape(q.shape)

    def take(self, slot: int, document: CachedAttention) -> None:
        """Put a document that was read alone into a slot."""
        self.counts[slot] = document.tokens
        for ours, theirs in ((self.keys, document.keys), (self.values, document.values)):
            for layer, shelf in theirs.items():
                if layer not in ours:
                    ours[layer] = shelf.new_zeros(len(self.counts), FIRST_ROOM, *shelf.shape[1:])
                ours[layer] = _with_room(ours[layer], document.tokens)
                ours[layer][slot, :document.tokens] = shelf[:document.tokens]


def _with_room(shelf: Tensor, tokens: int) -> Tensor:
    """Return a shelf (N, room, K, D) for so many tokens: the same one, or a larger copy."""
    if shelf.shape[1] >= tokens:
        return shelf
    larger = shelf.new_zeros(len(shelf), 2 * tokens, *shelf.shape[2:])
    larger[:, :shelf.shape[1]] = shelf
    return larger


@dataclass
class Slot:
    """A document that is being answered."""

    job: Job
    draws: torch.Generator
    read: CachedAttention | None             # for the decode step; None: it is among those of SlotAttention
    ids: list[int]                           # of the answer so far
    ended: bool = False                      # by a token that ends it


class Slots:
    """The documents that a decoder answers at once."""

    def __init__(self, decoder: Decoder, number: int) -> None:
        self.decoder, self.decode_step = decoder, find_step(decoder)
        self.device = next(decoder.parameters()).device
        self.attention = SlotAttention([0] * number)
        self.slots: list[Slot | None] = [None] * number

    @property
    def is_empty(self) -> bool:
        return not any(self.slots)

    def begin(self, job: Job) -> None:
        """Read a prompt alone, choose its first token, and give it a free slot."""
        alone = DecoderFeed(self.decoder)
        logits = alone(job.ids)
        place = self.slots.index(None)
        if self.decode_step is None:
            self.attention.take(place, alone.cache)
        read = None if self.decode_step is None else alone.cache
        slot = self.slots[place] = Slot(job, torch.Generator().manual_seed(job.sampling.seed), read, [])
        self._choose(slot, logits)

    def step(self) -> None:
        """Choose the next token of every document."""
        if self.decode_step is not None:
            filled = [(slot, slot.read) for slot in self.slots if slot and slot.read]
            found = self.decode_step(self.decoder, [slot.ids[-1] for slot, _ in filled], [read for _, read in filled])
            for (one, _), its in zip(filled, found, strict=True):
                self._choose(one, its)
            return
        # a slot that is free computes along, and nobody looks at the result
        last = [slot.ids[-1] if slot else 0 for slot in self.slots]
        logits = self._logits(last)
        for place, slot in enumerate(self.slots):
            if slot:
                self.attention.counts[place] += 1
                self._choose(slot, logits[place])

    def ended(self) -> Iterator[Done]:
        """Yield the documents that have ended, and free their slots."""
        for place, slot in enumerate(self.slots):
            if slot and (slot.ended or len(slot.ids) == slot.job.sampling.tokens):
                self.slots[place], self.attention.counts[place] = None, 0
                yield Done(slot.job.number, tuple(slot.ids), slot.ended)

    def _choose(self, slot: Slot, logits: Tensor) -> None:
        token = choose(logits, slot.job.sampling, slot.draws)
        slot.ended = token in slot.job.stops
        if not slot.ended:
            slot.ids.append(token)

    @torch.no_grad()
    def _logits(self, tokens: list[int]) -> Tensor:
        """Return the logits (documents, V) fp32 behind a new token of each document."""
        ids, positions = (torch.tensor(numbers, device=self.device) for numbers in (tokens, self.attention.counts))
        batch = Batch(ids, torch.full_like(ids, IGNORE), positions, (1,) * len(tokens), 0)
        with evaluating(self.decoder):
            return self.decoder.logits(self.decoder.hidden(batch, attention=self.attention)).float()


def answer_jobs(model: Model, jobs: Iterable[Job], at_once: int) -> Iterator[Done]:
    """Yield the answers of `jobs` as they are done, in no order; up to `at_once` of them are computed together."""
    if not isinstance(model, Decoder) or model.config.positions_change_at is not None or (
            at_once == 1 and find_step(model) is None):
        yield from _one_at_a_time(model, jobs)
        return
    slots = Slots(model, at_once)
    for job in jobs:
        if len(job.ids) + job.sampling.tokens > model.config.context:
            yield from _one_at_a_time(model, [job])
            continue
        slots.begin(job)
        yield from slots.ended()
        while None not in slots.slots:
            slots.step()
            yield from slots.ended()
    while not slots.is_empty:
        slots.step()
        yield from slots.ended()


def _one_at_a_time(model: Model, jobs: Iterable[Job]) -> Iterator[Done]:
    feed: Feed | None = None
    for job in jobs:
        feed, ids = open_feed(model, job.ids, feed)
        answer: list[int] = []
        stopped = False
        for token in generate_ids(feed, ids, job.sampling):
            stopped = token in job.stops
            if stopped:
                break
            answer.append(token)
        yield Done(job.number, tuple(answer), stopped)
