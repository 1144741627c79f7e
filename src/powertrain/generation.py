"""Sampling text from a decoder, one token at a time, with a key/value cache.

The cache is an attention kernel that remembers the keys and values of every layer, so the decoder has one path only.
The prompt is one forward pass; after it each token is one. When the context is full, its last half is fed again, as a
prompt: the cost of a pass over half a context, once in half a context of tokens.
Drawing uses a generator of its own, so that training's random numbers stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from powertrain.models.attention import sdpa_attention
from powertrain.models.decoder import Decoder
from powertrain.records import IGNORE, Batch, WrongUse

REPLACEMENT = "\ufffd"      # what decoding gives for the bytes of an unfinished character
LONGEST_CHARACTER = 4       # bytes of UTF-8, so tokens at most


class TextTokens(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def end_of_text(self) -> int | None: ...

    def encode(self, text: str) -> Sequence[int] | Any: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass
class CachedAttention:
    """An attention kernel for one document that is fed in pieces: first its prompt, then a token at a time."""

    keys: dict[int, Tensor] = field(default_factory=dict)      # layer -> (tokens so far, K, D)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                 window: int | None, scale: float) -> Tensor:
        if layer not in self.keys:
            self.keys[layer], self.values[layer] = k, v
            return sdpa_attention(q, k, v, lengths, layer=layer, dropout=dropout, window=window, scale=scale)
        assert len(q) == 1, f"after the prompt tokens come one at a time, not {len(q)}"
        self.keys[layer] = torch.cat((self.keys[layer], k))[-(window or 0):]
        self.values[layer] = torch.cat((self.values[layer], v))[-(window or 0):]
        return attend_to_all(q, self.keys[layer], self.values[layer], scale)


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query (1, H, D) over all keys and values (T, K, D), softmax in fp32 -> (1, H, D)."""
    kv_heads = k.shape[1]
    grouped = q.view(kv_heads, -1, q.shape[-1])                                    # (K, H / K, D)
    scores = grouped @ k.permute(1, 2, 0) * scale                                  # (K, H / K, T)
    weights = torch.softmax(scores.float(), -1).to(v.dtype)
    return (weights @ v.transpose(0, 1)).reshape(q.shape)


class Feed:
    """A decoder that is fed one document and tells the logits of what comes next."""

    def __init__(self, model: Decoder, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        self.model, self.precision = model, precision
        self.device = model.embedding.weight.device
        self.restart()

    def restart(self) -> None:
        """Forgets all tokens."""
        self.cache, self.position = CachedAttention(), 0

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> Tensor:
        """The logits (V,) fp32 after these further tokens."""
        tokens = torch.tensor(ids, device=self.device)
        positions = torch.arange(self.position, self.position + len(ids), device=self.device)
        batch = Batch(tokens, torch.full_like(tokens, IGNORE), positions, (len(ids),), 0)
        self.position += len(ids)
        with self.precision():
            hidden = self.model.hidden(batch, attention=self.cache)
            return self.model.logits(hidden[-1]).float()


def choose(logits: Tensor, *, temperature: float, top_k: int | None, top_p: float | None,
           draws: torch.Generator) -> int:
    """One token id from logits (V,): the likeliest if `temperature` is 0, else drawn.

    `top_k` keeps the k likeliest; `top_p` of those the fewest whose probabilities reach p (nucleus sampling, Holtzman
    et al. 2020).
    """
    logits = logits.cpu()                # the generator's device: the same seed draws the same text on every device
    if temperature == 0:
        return int(logits.argmax())
    ranked, ids = torch.sort(logits / temperature, descending=True)
    kept = len(ranked) if top_k is None else min(top_k, len(ranked))
    shares = torch.softmax(ranked[:kept], -1)
    if top_p is not None:
        before = shares.cumsum(-1) - shares
        shares = shares * (before < top_p)
    return int(ids[torch.multinomial(shares, 1, generator=draws)])


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


def generate(model: Decoder, tokenizer: TextTokens, prompt: str, *, tokens: int, temperature: float = 0.8,
             top_k: int | None = None, top_p: float | None = None, seed: int = 0,
             precision: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[str]:
    """Pieces of the text that follows `prompt`, as they are drawn, up to `tokens` tokens or the end of the text.

    An empty prompt starts a document: after end_of_text if the tokenizer has one, else after token 0. `precision` makes
    the context of each forward pass, such as an autocast.
    Raises WrongUse for numbers out of their range.
    """
    check_sampling(tokens, temperature, top_k, top_p)
    read = [int(token) for token in tokenizer.encode(prompt)]
    ids = read or [0 if tokenizer.end_of_text is None else tokenizer.end_of_text]
    drawn = generate_ids(model, ids, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
                         precision=precision)
    return stream(tokenizer, read[-1:], drawn)


def stream(tokenizer: TextTokens, before: Sequence[int], drawn: Iterator[int]) -> Iterator[str]:
    """The text of `drawn`, which follows the ids `before`, until end_of_text."""
    text = TextStream(tokenizer, before)
    for token in drawn:
        if token == tokenizer.end_of_text:
            break
        if piece := text.add(token):
            yield piece
    if rest := text.rest():
        yield rest


def generate_ids(model: Decoder, prompt: Sequence[int], *, tokens: int, temperature: float = 0.8,
                 top_k: int | None = None, top_p: float | None = None, seed: int = 0,
                 precision: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[int]:
    """`tokens` ids that follow those of `prompt` (at least one). Only the last context of a prompt is read.

    The model evaluates while a token is computed, and is in the mode it was in whenever one is handed out.
    """
    draws = torch.Generator().manual_seed(seed)
    feed, context = Feed(model, precision), model.config.context
    ids, fresh = list(prompt), list(prompt)[-context:]
    for _ in range(tokens):
        if feed.position + len(fresh) > context:
            feed.restart()
            fresh = ids[-max(1, context // 2):]
        with evaluating(model):
            logits = feed(fresh)
        token = choose(logits, temperature=temperature, top_k=top_k, top_p=top_p, draws=draws)
        ids.append(token)
        fresh = [token]
        yield token


@contextmanager
def evaluating(model: Decoder) -> Iterator[None]:
    """Puts a model in evaluation mode, and afterwards back in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def check_sampling(tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises WrongUse for a number out of its range."""
    if tokens < 1:
        raise WrongUse(f"{tokens} tokens were asked for; ask for at least 1")
    if temperature < 0:
        raise WrongUse(f"the temperature is {temperature}; use 0 for the likeliest token, or a number above it")
    if top_k is not None and top_k < 1:
        raise WrongUse(f"top_k is {top_k}; it is how many of the likeliest tokens are drawn from, at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise WrongUse(f"top_p is {top_p}; it is the share of probability that is drawn from, above 0 and at most 1")
