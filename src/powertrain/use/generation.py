"""Sampling text from a model, one token at a time, with a key/value cache.

The cache is an attention kernel that keeps the keys and values of every layer, so the decoder has only one code path; a model
behind the bridge uses its library's cache. The prompt is one forward pass, and each new token is one more, on a CPU by a
kernel of our own (decode.py). A prompt that begins like the last one, as each turn of a conversation does, is read from its
first different token. When the context is full, its last half is fed again as a prompt, which costs a pass over half a
context for each half context of new tokens. Drawing uses its own random generator, so training's random numbers do not
change.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from powertrain.models.bridge.model import BridgedModel, Reader, Writer
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.providers import decoder_start_in
from powertrain.models.kernels.attention import Attention, sdpa_attention, torch_attention
from powertrain.models.model import Model, evaluating
from powertrain.records import IGNORE, Batch, RunFailed, WrongUse
from powertrain.run.material import TextTokenizer
from powertrain.run.prepare import Prepared
from powertrain.training.setup import Setup
from powertrain.use.decode import find_step

REPLACEMENT = "\ufffd"      # decoding returns this for the bytes of an unfinished character
LONGEST_CHARACTER = 4       # bytes of UTF-8, so tokens at most
FIRST_ROOM = 256            # tokens that the cache has room for at first; it doubles


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and how many at most. Raises WrongUse for a number out of its range.

    A `temperature` of 0 takes the likeliest token. `top_k` keeps the k likeliest tokens. `top_p` keeps of those the fewest
    whose probabilities add up to p (nucleus sampling, Holtzman et al. 2020).
    """

    tokens: int
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise WrongUse(f"{self.tokens} tokens were asked for; ask for at least 1")
        if not 0 <= self.temperature < math.inf:         # not a number is refused too
            raise WrongUse(f"the temperature is {self.temperature}; use 0 for the likeliest token, or a number above it")
        if self.top_k is not None and self.top_k < 1:
            raise WrongUse(f"top_k is {self.top_k}; tokens are drawn from the top_k likeliest, so use 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise WrongUse(f"top_p is {self.top_p}; use a share of probability above 0 and at most 1")


@dataclass
class CachedAttention:
    """An attention kernel for one document that is fed in pieces."""

    dtype: torch.dtype | None = None                           # of keys and values; None: as they come
    first: Attention = sdpa_attention                          # of the first piece
    tokens: int = 0                                            # of the document, before the piece that is being fed
    keys: dict[int, Tensor] = field(default_factory=dict)      # layer -> (room, K, D), of which `tokens` rows are filled
    values: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                 window: int | None, scale: float) -> Tensor:
        end = self.tokens + len(k)
        keys = self.keys[layer] = self._written(self.keys.get(layer), k)
        values = self.values[layer] = self._written(self.values.get(layer), v)
        if not self.tokens:
            return self.first(q, k, v, lengths, layer=layer, dropout=dropout, window=window, scale=scale)
        if len(q) == 1:
            first = max(0, end - window) if window else 0
            return attend_to_all(q, keys[first:end].to(q.dtype), values[first:end].to(q.dtype), scale)
        return attend_after(q, keys[:end].to(q.dtype), values[:end].to(q.dtype), window, scale)

    def make_room(self, layers: int, kv_heads: int, head_width: int) -> None:
        """Let there be room for one token more in every layer."""
        for shelves in (self.keys, self.values):
            for layer in range(layers):
                shelf = shelves[layer] if self.tokens else torch.empty(0, kv_heads, head_width)
                shelves[layer] = self._with_room(shelf, self.tokens + 1)

    def _written(self, shelf: Tensor | None, piece: Tensor) -> Tensor:
        """Return the shelf with the piece written behind its tokens: the same tensor while it has room, else a larger one."""
        end = self.tokens + len(piece)
        shelf = self._with_room(piece.new_empty(0, *piece.shape[1:], dtype=self.dtype) if shelf is None else shelf, end)
        shelf[self.tokens:end] = piece
        return shelf

    def _with_room(self, shelf: Tensor, end: int) -> Tensor:
        if len(shelf) >= end:
            return shelf
        larger = shelf.new_empty(max(FIRST_ROOM, 2 * end), *shelf.shape[1:])
        larger[:self.tokens] = shelf[:self.tokens]
        return larger


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute attention of one query (1, H, D) over all keys and values (T, K, D), softmax in fp32 -> (1, H, D)."""
    kv_heads = k.shape[1]
    grouped = q.view(kv_heads, -1, q.shape[-1])                                    # (K, H / K, D)
    scores = grouped @ k.permute(1, 2, 0) * scale                                  # (K, H / K, T)
    weights = torch.softmax(scores.float(), -1).to(v.dtype)
    return (weights @ v.transpose(0, 1)).reshape(q.shape)


def attend_after(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """Compute attention of a document's last n queries (n, H, D) over its keys and values (T, K, D); none sees later tokens."""
    places = torch.arange(len(k), device=q.device)
    own = places[len(k) - len(q):, None]                                           # (n, 1)
    seen = places <= own
    if window:
        seen &= places > own - window
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))                         # (1, heads, tokens, D)
    return torch_attention(q, k, v, seen, 0.0, scale)[0].transpose(0, 1)


class Feed:
    """A model that is fed one document and returns the logits of the next token. `ids` are the tokens fed so far."""

    goes_on = True                           # beyond its context, by reading the last half of it again

    def __init__(self, model: nn.Module, context: int) -> None:
        self.model, self.context = model, context
        self.device = next(model.parameters()).device
        self.ids: list[int] = []

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Feed these further tokens and return the logits (V,) fp32 after them."""
        with evaluating(self.model):
            logits = self.read(list(ids))
        self.ids += ids
        return logits.float()

    def begin(self, ids: Sequence[int]) -> list[int]:
        """Go back to the first token that differs from `ids`. Return those of `ids` still to be fed, at least the last."""
        common = 0
        while common < min(len(self.ids), len(ids) - 1) and self.ids[common] == ids[common]:
            common += 1
        kept = self.rewind(common)
        del self.ids[kept:]
        return list(ids[kept:])

    def read(self, ids: list[int]) -> Tensor:
        """Return the logits (V,) after `self.ids` and these."""
        raise NotImplementedError

    def rewind(self, tokens: int) -> int:
        """Forget the tokens after the first `tokens`, or more of them. Return how many are kept."""
        raise NotImplementedError


class DecoderFeed(Feed):
    """Powertrain's decoder."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model, model.config.context)
        self.decoder, self.step = model, find_step(model)
        self.cache = self._nothing_read()

    def _nothing_read(self) -> CachedAttention:
        if self.step is None:
            return CachedAttention()
        return CachedAttention(torch.float32, self.step.attention)

    def read(self, ids: list[int]) -> Tensor:
        change = self.decoder.config.positions_change_at
        if change is not None and 0 < len(self.ids) <= change < len(self.ids) + len(ids):
            self.cache, ids = self._nothing_read(), self.ids + ids         # the keys so far were turned for a short document
        if self.step is None:
            return self.decoder.logits(self._read(ids)[-1])
        if len(ids) > 1:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.step.reads_in_bf16):
                self._read(ids[:-1])
        return self.step(self.decoder, ids[-1:], [self.cache])[0]

    def _read(self, ids: list[int]) -> Tensor:
        """Return the head's input (T, width) of further tokens, whose keys and values the cache then holds."""
        tokens = torch.tensor(ids, device=self.device)
        positions = torch.arange(self.cache.tokens, self.cache.tokens + len(ids), device=self.device)
        batch = Batch(tokens, torch.full_like(tokens, IGNORE), positions, (len(ids),), 0)
        hidden = self.decoder.hidden(batch, attention=self.cache)
        self.cache.tokens += len(ids)
        return hidden

    def rewind(self, tokens: int) -> int:
        change = self.decoder.config.positions_change_at
        if change is not None and tokens <= change < len(self.ids):
            tokens = 0
        self.cache.tokens = tokens
        return tokens


class LibraryFeed(Feed):
    """A model behind the bridge. An encoder reads `source` first; its answer ends where the context is full."""

    def __init__(self, model: BridgedModel, source: Sequence[int] | None = None) -> None:
        super().__init__(model, sys.maxsize if model.context is None else model.context)
        self.goes_on = source is None
        self.begin_reading: Callable[[], Reader] = partial(Reader, model) if source is None else partial(Writer, model, source)
        self.reader = self.begin_reading()

    def read(self, ids: list[int]) -> Tensor:
        return self.reader(ids)

    def rewind(self, tokens: int) -> int:
        if tokens == len(self.ids):
            return tokens
        self.reader = self.begin_reading()   # not every library cache can be cut
        return 0


def open_feed(model: Model, prompt: Sequence[int], before: Feed | None = None) -> tuple[Feed, list[int]]:
    """Return a feed for `model`, and the ids to feed first: `prompt`, or the start token of an encoder-decoder's decoder.

    `before`, the feed of an earlier prompt, is used again unless an encoder read that prompt; what both prompts begin with is
    then read once. Raises WrongUse for a model that writes no text.
    """
    if before is not None and before.goes_on:
        return before, list(prompt)
    if isinstance(model, Decoder):
        if model.config.rewards:
            raise WrongUse("this model scores answers and writes no text; measure it with `powertrain evaluate`")
        if max(prompt, default=0) >= model.config.vocabulary:
            raise WrongUse("the tokenizer has tokens that the model's embedding has no row for; copy or download both again")
        return DecoderFeed(model), list(prompt)
    assert isinstance(model, BridgedModel), type(model)
    if model.task == "span":
        raise WrongUse("this model marks answers within a text and writes no text; measure it with `powertrain evaluate`")
    if model.task == "causal":
        return LibraryFeed(model), list(prompt)
    network = model.network
    start = decoder_start_in(network.config.to_dict(), network.generation_config.to_dict(), model.base)
    return LibraryFeed(model, prompt), [start]


def choose(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    """Return one token id from logits (V,): the likeliest if the temperature is 0, else one that is drawn.

    Raises RunFailed where a logit is NaN or infinite; -inf is a token that cannot be drawn.
    """
    logits = logits.cpu() / (sampling.temperature or 1.0)        # the same seed draws the same text on every device
    if not math.isfinite(float(logits.max())):           # NaN counts as the largest
        raise RunFailed("the model's logits are NaN or infinite, so no token can be chosen. Its weights are broken; a common "
                        "reason is a learning_rate that is too high. Use an earlier checkpoint of the model")
    if sampling.temperature == 0:
        return int(logits.argmax())
    ranked, ids = torch.sort(logits, descending=True)
    kept = len(ranked) if sampling.top_k is None else min(sampling.top_k, len(ranked))
    shares = torch.softmax(ranked[:kept], -1)
    if sampling.top_p is not None:
        before = shares.cumsum(-1) - shares
        shares = shares * (before < sampling.top_p)
    return int(ids[torch.multinomial(shares, 1, generator=draws)])


def generate(model: Model, tokenizer: TextTokenizer, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Yield pieces of the text that follows `prompt`, as they are drawn, up to the end of the text.

    An empty prompt starts a document: after end_of_text if the tokenizer has one, else after token 0.
    """
    read = [int(token) for token in tokenizer.encode(prompt)]
    feed, ids = open_feed(model, read or [tokenizer.end_of_text or 0])
    return stream(tokenizer, read[-1:], generate_ids(feed, ids, sampling))


def stream(tokenizer: TextTokenizer, before: Sequence[int], drawn: Iterator[int], stops: Collection[int] = ()) -> Iterator[str]:
    """Yield the text of the ids `drawn`, which follow the ids `before`, until end_of_text or one of `stops`.

    A character may be split over tokens and is held back until it is whole. Each piece is the text that the new ids add to the
    text of the earlier ids, because the text of an id may depend on them.
    """
    ids = list(before)
    first, told = 0, len(ids)                # ids before `told` have returned their text; decoding starts at `first`

    def rest() -> str:
        known = tokenizer.decode(ids[first:told]) if told > first else ""
        return tokenizer.decode(ids[first:])[len(known):]

    for token in drawn:
        if token == tokenizer.end_of_text or token in stops:
            break
        ids.append(token)
        piece = rest()
        if piece and not (piece.endswith(REPLACEMENT) and len(ids) - told < LONGEST_CHARACTER):
            first, told = told, len(ids)
            yield piece
    if left := rest():
        yield left


def generate_ids(feed: Feed, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """Yield ids that follow those of `prompt` (at least one). Of a longer prompt only the last context is read.

    The model is in evaluation mode while a token is computed, and back in its earlier mode whenever an id is yielded.
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


def write_sample(prepared: Prepared, setup: Setup, tokens: int) -> str:
    """Return the text that a run's model writes after the recipe's prompt at an evaluation, of at most so many tokens."""
    wanted, material = prepared.recipe.sample, prepared.material
    with setup.precision.context(setup.device):
        return "".join(generate(setup.model, material.tokenizer, material.as_prompt(wanted.prompt),
                                Sampling(tokens, wanted.temperature, wanted.top_k, seed=prepared.recipe.seed)))
