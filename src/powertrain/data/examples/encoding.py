"""Samples to token ids and the ranges of them that are trained: one encoder for each kind of sample.

The tokenizer runs over a batch of texts at once, on all cores. A token is trained if it starts in a trained place of the
text. A beginning of sequence stands once in front, and an end behind every turn or text is trained like any other token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as LibraryTokenizer

from powertrain.data.examples.templates import ChatTemplate, Marked
from powertrain.data.examples.tokenizer import ExampleTokenizer, Place, Tokenised, each_or_reason, places_of
from powertrain.data.examples.words import Ids
from powertrain.data.rows.row import BadRow, Conversation, Pair, Preference, Rating, Sample, Span, Text
from powertrain.records import WrongUse

TrainOn = Literal["assistant", "all"]

SPAN_STRIDE = 128                            # tokens that two windows of a context share: transformers' run_qa.py
LONGEST_KEPT_TAIL = 200                      # characters of a prompt's end whose ids are remembered
MOST_KEPT_TAILS = 1000                       # most templates have one or two, whatever was asked


@dataclass(frozen=True, eq=False)
class Encoded:
    """An example as it is stored.

    For a causal model `ids` holds the inputs and, behind them, the last target. For an encoder-decoder `ids` holds the
    target only. `trained` are the ranges of `ids` that are targets; the first id of a causal example is never a target.
    """

    ids: Ids
    trained: tuple[Place, ...] = ()
    source: Ids | None = None
    segments: Ids | None = None
    answer: Place | None = None              # of a span: its first and its last token; of compared answers: preferences.py
    margin: float = 0.0                      # of a pair of answers

    @property
    def trained_tokens(self) -> int:
        return 2 if self.segments is not None else sum(stop - start for start, stop in self.trained)


@dataclass
class EncodedRow:
    """The result of one row: its examples, or why there are none."""

    examples: list[Encoded] = field(default_factory=list)
    refused: str = ""                        # why there are none: "bad", "untrained", "long", "tie"
    reason: str = ""
    tokens: int = 0                          # of the whole row, before anything was cut
    too_long: bool = False                   # beyond the limit: cut, dropped, or with nothing trained left
    lost: int = 0                            # tokens that were cut off its end
    untrained_end: int = 0                   # tokens behind the last trained one, left out because nothing learns from them
    boundary: bool = False                   # its prompt, tokenised alone, has other tokens than in front of the answer
    rewritten: bool = False                  # the template rewrites some earlier turns, which are not trained


def prompt_of(sample: Sample) -> str:
    """Return the prompt. Samples with equal prompts are all trained on or all held out."""
    if isinstance(sample, Conversation):
        first = next((i for i, message in enumerate(sample.messages) if message.role == "assistant"), len(sample.messages))
        asked = sample.messages[:first] or sample.messages
        return "\0".join(f"{message.role}\0{message.content.strip()}" for message in asked)
    if isinstance(sample, Preference):
        return prompt_of(Conversation(sample.chosen.messages[:sample.shared]))
    if isinstance(sample, Rating):
        return prompt_of(Conversation(sample.conversation.messages[:sample.shared]))
    if isinstance(sample, Pair):
        return sample.source.strip()
    return f"{sample.question.strip()}\0{sample.context.strip()}" if isinstance(sample, Span) else sample.text.strip()


@dataclass(frozen=True, eq=False)
class Encoder:
    """Makes examples of samples of one kind. Only conversations need a template."""

    tokenizer: ExampleTokenizer
    max_length: int                          # tokens that the model reads of an example
    drop: bool = False                       # leave longer examples out instead of cutting them
    template: ChatTemplate | None = None
    train_on: TrainOn = "assistant"

    def encode(self, samples: Sequence[Any]) -> list[EncodedRow]:
        """Return the result of each sample, in order."""
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------ conversations


class ConversationEncoder(Encoder):
    @cached_property
    def _tails(self) -> dict[str, bytes]:
        return {}

    def encode(self, samples: Sequence[Conversation]) -> list[EncodedRow]:
        rows = [EncodedRow() for _ in samples]
        marked: dict[int, Marked] = {}
        assert self.template is not None
        for number, sample in enumerate(samples):
            try:
                marked[number] = self.template.marked(sample.messages, self.train_on, sample.tools)
            except BadRow as error:
                rows[number].refused, rows[number].reason = "bad", str(error)
        ends: list[tuple[EncodedRow, str, Ids]] = []
        for (number, one), (found, places) in zip(marked.items(), self._placed(list(marked.values())), strict=True):
            row = rows[number]
            if isinstance(found, str):
                row.refused, row.reason = "bad", found
                continue
            row.rewritten = one.rewritten
            if self.train_on != "all":
                ends += [(row, *_prompt_end(found, start[0], place[0]))
                         for start, place in zip(places, one.trained, strict=True)]
            self._cut(row, found.ids, places)
        self._check_boundaries(ends)
        return rows

    def _placed(self, marked: Sequence[Marked]) -> list[tuple[Tokenised | str, list[Place]]]:
        """Return each text's tokens, and the ranges of them that are trained."""
        found = self.tokenizer.tokenise([one.text for one in marked])
        places = [places_of(tokens, one.trained) for tokens, one in zip(found, marked, strict=True)]
        untold = [number for number, place in enumerate(places) if place is None]
        for number, tokens in zip(untold, self.tokenizer.offsets([marked[number].text for number in untold]), strict=True):
            found[number], places[number] = tokens, places_of(tokens, marked[number].trained)
        return [(tokens, place or []) for tokens, place in zip(found, places, strict=True)]

    def _check_boundaries(self, ends: Sequence[tuple[EncodedRow, str, Ids]]) -> None:
        """Note the rows whose prompt, encoded alone as generation will do, has other tokens than it was trained with."""
        news = list(dict.fromkeys([tail for _, tail, _ in ends if tail not in self._tails]))
        encoded = {tail: b"" if isinstance(found, str) else found.ids.tobytes()
                   for tail, found in zip(news, self.tokenizer.tokenise(news), strict=True)}
        for row, tail, inside in ends:
            alone = encoded[tail] if tail in encoded else self._tails[tail]
            row.boundary |= alone != inside.tobytes()
        if len(self._tails) < MOST_KEPT_TAILS:
            self._tails.update({tail: ids for tail, ids in encoded.items() if len(tail) <= LONGEST_KEPT_TAIL})

    def _cut(self, row: EncodedRow, ids: Ids, trained: Sequence[Place]) -> None:
        """Make `row` the example of `ids`, without the tokens behind its last trained token or beyond the limit."""
        row.tokens = len(ids)
        trained = _clipped(trained, 1, len(ids))  # nothing comes before the first token that could predict it
        if not trained:
            row.refused, row.reason = "untrained", "it has no token that is trained"
            return
        kept = trained[-1][1]
        row.untrained_end = len(ids) - kept
        if kept > self.max_length + 1:       # of which the last one is only a target
            row.too_long = True
            if self.drop:
                row.refused, row.reason = "long", f"{kept - 1} tokens, beyond max_length={self.max_length}"
                return
            row.lost = kept - self.max_length - 1
            kept = self.max_length + 1
            trained = _clipped(trained, 1, kept)
            if not trained:
                row.refused = "untrained"
                row.reason = f"its prompt is longer than max_length={self.max_length}, so that nothing trained is left"
                return
            kept = trained[-1][1]
        row.examples = [Encoded(ids[:kept], tuple(trained))]


def _prompt_end(found: Tokenised, token: int, character: int) -> tuple[str, Ids]:
    """Return the end of a prompt from its last special token on, and the tokens of this end in the whole text.

    A text is cut at its special tokens before it is encoded, so text before the last one cannot change these tokens.
    """
    first, begin = found.last_special(token) or (0, 0)
    return found.text[begin:character], found.ids[first:token]


# ------------------------------------------------------------------------------------------------ texts


class TextEncoder(Encoder):
    """Trains every token. A text beyond the limit goes on in a further example, whose first input is the last target before."""

    def encode(self, samples: Sequence[Text]) -> list[EncodedRow]:
        before, _ = self.tokenizer.frame
        first, end = np.array(before, dtype=np.int64), np.array([self.tokenizer.end_of_text], dtype=np.int64)
        longest = self.max_length
        rows = []
        for found in self.tokenizer.tokenise([sample.text for sample in samples]):
            if isinstance(found, str):
                rows.append(EncodedRow(refused="bad", reason=found))
                continue
            framed = not before or tuple(found.ids[:1].tolist()) == before
            whole = np.concatenate((found.ids, end) if framed else (first, found.ids, end))
            pieces = [whole[start:start + longest + 1] for start in range(0, len(whole) - 1, longest)]
            rows.append(EncodedRow([Encoded(piece, ((1, len(piece)),)) for piece in pieces], tokens=len(whole)) if pieces else
                        EncodedRow(refused="untrained", reason="its text has no tokens", tokens=len(whole)))
        return rows


# ------------------------------------------------------------------------------------------------ encoder-decoders


class PairEncoder(Encoder):
    """Encodes source and target with the special tokens that the tokenizer puts around a text; the target also gets an end."""

    def encode(self, samples: Sequence[Pair]) -> list[EncodedRow]:
        sources = self.tokenizer.tokenise([sample.source for sample in samples])
        targets = self.tokenizer.tokenise([sample.target for sample in samples])
        return [EncodedRow(refused="bad", reason=source) if isinstance(source, str) else
                EncodedRow(refused="bad", reason=target) if isinstance(target, str) else
                self._row(source.ids.tolist(), target.ids.tolist()) for source, target in zip(sources, targets, strict=True)]

    def _row(self, source: list[int], target: list[int]) -> EncodedRow:
        if not target:
            return EncodedRow(refused="untrained", reason="its target has no tokens")
        before, behind = self.tokenizer.frame
        end, longest = self.tokenizer.end_of_text, self.max_length
        room = longest - len(before) - len(behind)
        whole = [*before, *target, *(behind if end in behind else (*behind, end))]
        lost = max(0, len(source) - room) + max(0, len(whole) - longest)
        row = EncodedRow(tokens=len(source) + len(before) + len(behind) + len(whole), lost=lost, too_long=lost > 0)
        if lost and self.drop:
            row.refused, row.reason = "long", f"{len(source)} and {len(whole)} tokens, beyond max_length={longest}"
            return row
        # a source that was cut keeps its frame; a target that was cut has not ended, so it is given no end
        ids = np.array(whole[:longest], dtype=np.int64)
        row.examples = [Encoded(ids, ((0, len(ids)),),
                                source=np.array([*before, *source[:max(0, room)], *behind], dtype=np.int64))]
        return row


# ------------------------------------------------------------------------------------------------ answers in a context


class SpanEncoder(Encoder):
    """Encodes question and context as the tokenizer joins a pair, and finds the first and last token of the answer.

    A context that is too long gives several windows, each overlapping the one before; a window that does not hold the
    whole answer points at token 0. Source: transformers, examples/pytorch/question-answering/run_qa.py.
    """

    @cached_property
    def _library(self) -> LibraryTokenizer:
        library = LibraryTokenizer.from_str(self.tokenizer.library.to_str())
        library.enable_truncation(self.max_length, stride=min(SPAN_STRIDE, self.max_length // 4),
                                  strategy="only_second")
        return library

    def encode(self, samples: Sequence[Span]) -> list[EncodedRow]:
        pairs = [(sample.question, sample.context) for sample in samples]
        return [self._row(sample, found)
                for sample, found in zip(samples, each_or_reason(self._library, pairs, True), strict=True)]

    def _row(self, sample: Span, encoding: Encoding | str) -> EncodedRow:
        longest = self.max_length
        if isinstance(encoding, str):
            return EncodedRow(refused="bad", reason=encoding if "runcat" not in encoding else
                              f"its question leaves no room for the context within max_length={longest}")
        windows = [encoding, *encoding.overflowing]
        if len(windows) > 1 and self.drop:
            return EncodedRow(refused="long", reason=f"it needs {len(windows)} windows of max_length={longest}", too_long=True)
        examples = [Encoded(np.array(window.ids, dtype=np.int64), segments=np.array(window.type_ids, dtype=np.int64),
                            answer=self._place(window, sample)) for window in windows]
        return EncodedRow(examples, tokens=sum(len(example.ids) for example in examples))

    def _place(self, window: Encoding, sample: Span) -> Place:
        if not sample.answers:
            return 0, 0
        start, stop = sample.starts[0], sample.starts[0] + len(sample.answers[0])
        sequences = window.sequence_ids
        context = [(number, place) for number, place in enumerate(window.offsets)
                   if sequences[number] == 1 and place[1] > place[0]]
        if not context or context[0][1][0] > start or context[-1][1][1] < stop:
            return 0, 0
        inside = [number for number, (first, last) in context if last > start and first < stop]
        return (inside[0], inside[-1]) if inside else (0, 0)


def _clipped(places: Sequence[Place], first: int, stop: int) -> list[Place]:
    clipped = [(max(start, first), min(end, stop)) for start, end in places]
    return [(start, end) for start, end in clipped if start < end]


def check_length(kind: str, max_length: int, tokenizer: ExampleTokenizer) -> None:
    """Raise WrongUse if not one token of a text would fit beside what the tokenizer puts around it."""
    around = tokenizer.library.num_special_tokens_to_add(kind == "span")
    if max_length <= (around if kind in ("pair", "span") else 0):
        raise WrongUse(f"data.max_length={max_length} leaves no room: the tokenizer puts {around} special tokens around a "
                       f"text; use {around + 2} or more")


