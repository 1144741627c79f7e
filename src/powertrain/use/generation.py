"""Sampling text from a model, one token at a time, with a key/value cache.

The cache is an attention kernel that remembers the keys and values of every layer, so the decoder has one path only; a
model behind the bridge has its library's cache. The prompt is one forward pass; after it each token is one. A prompt
that begins as the last one did, as each turn of a conversation does, is read from where it differs. When the context is
full, its last half is fed again, as a prompt: the cost of a pass over half a context, once in half a context of tokens.
Drawing uses a generator of its own, so that training's random numbers stay what they were.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.models.bridge.model import BridgedModel, Reader, Writer
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.providers import decoder_start_in
from powertrain.models.kernels.attention import sdpa_attention
from powertrain.models.model import Model, evaluating
from powertrain.records import IGNORE, Batch, RunFailed, WrongUse

REPLACEMENT = "\ufffd"      # what decoding gives for the bytes of an unfinished character
LONGEST_CHARACTER = 4       # bytes of UTF-8, so tokens at most
FIRST_ROOM = 256            # tokens that the cache has room for at first; it doubles

Precision = Callable[[], AbstractContextManager[Any]]        # makes the context of a forward pass, such as an autocast


class TextTokens(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def end_of_text(self) -> int | None: ...

    def encode(self, text: str) -> Sequence[int] | Any: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and how many at most. Raises WrongUse for a number out of its range.

    A `temperature` of 0 takes the likeliest token. `top_k` keeps the k likeliest; `top_p` of those the fewest whose
    probabilities reach p (nucleus sampling, Holtzman et al. 2020).
    """

    tokens: int
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise WrongUse(f"{self.tokens} tokens were asked for; ask for at least 1")
        if self.temperature < 0:
            raise WrongUse(f"the temperature is {self.temperature}; use 0 for the likeliest token, or a number above it")
        if self.top_k is not None and self.top_k < 1:
            raise WrongUse(f"top_k is {self.top_k}; it is how many of the likeliest tokens are drawn from, at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise WrongUse(f"top_p is {self.top_p}; it is the share of probability that is drawn from, above 0 and at most 1")


@dataclass
class CachedAttention:
    """An attention kernel for one document that is fed in pieces."""

    tokens: int = 0                                            # of the document, before the piece that is being fed
    keys: dict[int, Tensor] = field(default_factory=dict)      # layer -> (room, K, D), of which `tokens` rows are filled
    values: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                 window: int | None, scale: float) -> Tensor:
        end = self.tokens + len(k)
        keys = self.keys[layer] = self._written(self.keys.get(layer), k)
        values = self.values[layer] = self._written(self.values.get(layer), v)
        if not self.tokens:
            return sdpa_attention(q, k, v, lengths, layer=layer, dropout=dropout, window=window, scale=scale)
        if len(q) == 1:
            first = max(0, end - window) if window else 0
            return attend_to_all(q, keys[first:end], values[first:end], scale)
        return attend_after(q, keys[:end], values[:end], window, scale)

    def _written(self, shelf: Tensor | None, piece: Tensor) -> Tensor:
        """The shelf with the piece behind its tokens: the same one while it has room, else one twice as large."""
        end = self.tokens + len(piece)
        if shelf is None or len(shelf) < end:
            larger = piece.new_empty(max(FIRST_ROOM, 2 * end), *piece.shape[1:])
            if shelf is not None:
                larger[:self.tokens] = shelf[:self.tokens]
            shelf = larger
        shelf[self.tokens:end] = piece
        return shelf


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query (1, H, D) over all keys and values (T, K, D), softmax in fp32 -> (1, H, D)."""
    kv_heads = k.shape[1]
    grouped = q.view(kv_heads, -1, q.shape[-1])                                    # (K, H / K, D)
    scores = grouped @ k.permute(1, 2, 0) * scale                                  # (K, H / K, T)
    weights = torch.softmax(scores.float(), -1).to(v.dtype)
    return (weights @ v.transpose(0, 1)).reshape(q.shape)


def attend_after(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """The last n queries (n, H, D) of a document of T keys and values (T, K, D), each over what is not after it."""
    places = torch.arange(len(k), device=q.device)
    own = places[len(k) - len(q):, None]                                           # (n, 1)
    seen = places <= own
    if window:
        seen &= places > own - window
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))                         # (1, heads, tokens, D)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


class Feed:
    """A model that is fed one document and tells the logits of what comes next. `ids` is what it was fed."""

    goes_on = True                           # past its context, by reading the last half of it again

    def __init__(self, model: nn.Module, context: int, precision: Precision = nullcontext) -> None:
        self.model, self.context, self.precision = model, context, precision
        self.device = next(model.parameters()).device
        self.ids: list[int] = []

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> Tensor:
        """The logits (V,) fp32 after these further tokens."""
        with self.precision(), evaluating(self.model):
            logits = self.read(list(ids))
        self.ids += ids
        return logits.float()

    def begin(self, ids: Sequence[int]) -> list[int]:
        """Goes back to where what was fed differs from `ids`; what of them is still to be fed, at least the last."""
        common = 0
        while common < min(len(self.ids), len(ids) - 1) and self.ids[common] == ids[common]:
            common += 1
        kept = self.rewind(common)
        del self.ids[kept:]
        return list(ids[kept:])

    def read(self, ids: list[int]) -> Tensor:
        """The logits (V,) after `self.ids` and these."""
        raise NotImplementedError

    def rewind(self, tokens: int) -> int:
        """Forgets all but the first `tokens`, or even more; how many are left."""
        raise NotImplementedError


class DecoderFeed(Feed):
    """Our decoder."""

    def __init__(self, model: Decoder, precision: Precision = nullcontext) -> None:
        super().__init__(model, model.config.context, precision)
        self.decoder, self.cache = model, CachedAttention()

    def read(self, ids: list[int]) -> Tensor:
        change = self.decoder.config.positions_change_at
        if change is not None and 0 < len(self.ids) <= change < len(self.ids) + len(ids):
            self.cache, ids = CachedAttention(), self.ids + ids         # the keys so far were turned for a short document
        tokens = torch.tensor(ids, device=self.device)
        positions = torch.arange(self.cache.tokens, self.cache.tokens + len(ids), device=self.device)
        batch = Batch(tokens, torch.full_like(tokens, IGNORE), positions, (len(ids),), 0)
        hidden = self.decoder.hidden(batch, attention=self.cache)
        self.cache.tokens += len(ids)
        return self.decoder.logits(hidden[-1])

    def rewind(self, tokens: int) -> int:
        change = self.decoder.config.positions_change_at
        if change is not None and tokens <= change < len(self.ids):
            tokens = 0
        self.cache.tokens = tokens
        return tokens


class LibraryFeed(Feed):
    """A model behind the bridge. `source` is what its encoder reads first; if it has one an answer ends with its context."""

    def __init__(self, model: BridgedModel, precision: Precision = nullcontext, source: Sequence[int] | None = None) -> None:
        super().__init__(model, sys.maxsize if model.context is None else model.context, precision)
        self.bridged, self.source, self.goes_on = model, source, source is None
        self.reader = self._begun()

    def _begun(self) -> Reader:
        return Reader(self.bridged) if self.source is None else Writer(self.bridged, self.source)

    def read(self, ids: list[int]) -> Tensor:
        return self.reader(ids)

    def rewind(self, tokens: int) -> int:
        if tokens == len(self.ids):
            return tokens
        self.reader = self._begun()          # not every library cache can be cut
        return 0


def open_feed(model: Model, prompt: Sequence[int], precision: Precision = nullcontext) -> tuple[Feed, list[int]]:
    """A feed for `model`, and what it is fed to answer `prompt`: that, or for an encoder-decoder its decoder's start.

    Raises WrongUse for a model that writes no text.
    """
    if isinstance(model, Decoder):
        return DecoderFeed(model, precision), list(prompt)
    assert isinstance(model, BridgedModel), type(model)
    if model.task == "span":
        raise WrongUse("this model marks answers within a text and writes no text; measure it with `powertrain evaluate`")
    if model.task == "causal":
        return LibraryFeed(model, precision), list(prompt)
    network = model.network
    start = decoder_start_in(network.config.to_dict(), network.generation_config.to_dict(), model.base)
    return LibraryFeed(model, precision, source=prompt), [start]


def choose(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    """One token id from logits (V,): the likeliest if the temperature is 0, else drawn.

    Raises RunFailed where the logits are no numbers.
    """
    logits = logits.cpu()                # the generator's device: the same seed draws the same text on every device
    if sampling.temperature == 0:
        likeliest = int(logits.argmax())
        _refuse_no_number(float(logits[likeliest]))      # which counts as the largest
        return likeliest
    ranked, ids = torch.sort(logits / sampling.temperature, descending=True)
    kept = len(ranked) if sampling.top_k is None else min(sampling.top_k, len(ranked))
    shares = torch.softmax(ranked[:kept], -1)
    _refuse_no_number(float(shares[0]))
    if sampling.top_p is not None:
        before = shares.cumsum(-1) - shares
        shares = shares * (before < sampling.top_p)
    return int(ids[torch.multinomial(shares, 1, generator=draws)])


def _refuse_no_number(found: float) -> None:
    if math.isnan(found):
        raise RunFailed("the model's scores are no numbers, so no token is likelier than another: its weights are broken, as "
                        "by a learning_rate that is too high; use an earlier checkpoint of it")


class TextStream:
    """Token ids in, text out, as soon as it is whole: a character may be split over tokens.

    Each piece is what the new ids add to the text of the ids before them, because an id's text may depend on those.
    """

    def __init__(self, tokenizer: TextTokens, before: Sequence[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(before)
        self.told = len(self.ids)         # ids whose text was given out
        self.first = 0                    # where decoding starts: some ids before `told`

    def add(self, token: int) -> str:
        """The text that is now whole, often of this token only; "" while a character is unfinished."""
        self.ids.append(token)
        piece = self.rest()
        unfinished = piece.endswith(REPLACEMENT) and len(self.ids) - self.told < LONGEST_CHARACTER
        if not piece or unfinished:
            return ""
        self.first, self.told = self.told, len(self.ids)
        return piece

    def rest(self) -> str:
        """The text not yet given out, unfinished characters and all."""
        known = self.tokenizer.decode(self.ids[self.first:self.told]) if self.told > self.first else ""
        return self.tokenizer.decode(self.ids[self.first:])[len(known):]


def generate(model: Model, tokenizer: TextTokens, prompt: str, *, tokens: int, temperature: float = 0.8,
             top_k: int | None = None, top_p: float | None = None, seed: int = 0, stops: Collection[int] = (),
             precision: Precision = nullcontext) -> Iterator[str]:
    """Pieces of the text that follows `prompt`, as they are drawn, up to `tokens` tokens or the end of the text.

    An empty prompt starts a document: after end_of_text if the tokenizer has one, else after token 0. The text ends at
    end_of_text and at each of `stops`. Raises WrongUse for numbers out of their range.
    """
    sampling = Sampling(tokens, temperature, top_k, top_p, seed)
    read = [int(token) for token in tokenizer.encode(prompt)]
    feed, ids = open_feed(model, read or [0 if tokenizer.end_of_text is None else tokenizer.end_of_text], precision)
    return stream(tokenizer, read[-1:], generate_ids(feed, ids, sampling), stops)


def stream(tokenizer: TextTokens, before: Sequence[int], drawn: Iterator[int], stops: Collection[int] = ()) -> Iterator[str]:
    """The text of `drawn`, which follows the ids `before`, until end_of_text or one of `stops`."""
    text = TextStream(tokenizer, before)
    for token in drawn:
        if token == tokenizer.end_of_text or token in stops:
            break
        if piece := text.add(token):
            yield piece
    if rest := text.rest():
        yield rest


def generate_ids(feed: Feed, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """Ids that follow those of `prompt` (at least one). Only the last context of a prompt is read.

    The model evaluates while a token is computed, and is in the mode it was in whenever one is handed out.
    """
    draws = torch.Generator().manual_seed(sampling.seed)
    fresh = feed.begin(list(prompt)[-feed.context:])
    for _ in range(sampling.tokens):
        if len(feed.ids) + len(fresh) > feed.context:
            if not feed.goes_on:
                return
            fresh = feed.begin((feed.ids + fresh)[-max(1, feed.context // 2):])
        token = choose(feed(fresh), sampling, draws)
        fresh = [token]
        yield token
