"""Questions with known answers: from any data, or from what a run held out, for each kind of model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as LibraryTokenizer

from powertrain.data.example import Example
from powertrain.data.examples.making import ROWS_LOOKED_AT
from powertrain.data.examples.store import ExampleStore
from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.row import BadRow, Conversation, Pair, Row, Sample, Span
from powertrain.data.rows.schemas import Schema, find_schema
from powertrain.recipe import Recipe
from powertrain.records import IGNORE, WrongUse
from powertrain.use.opening import OpenedModel

WINDOW, STRIDE = 512, 128    # tokens of a window of a long context, and what two share: as BERT was trained


@dataclass(frozen=True, eq=False)
class Window:
    """A question with a part of its context, as a head for spans reads them."""

    example: Example
    places: tuple[tuple[int, int], ...]      # of each token, its characters in the context; of examples of a run, no matter
    first: int                               # token of the context
    stop: int


@dataclass(frozen=True, eq=False)
class Question:
    shown: str                               # what was asked, to look at
    references: tuple[str, ...]              # none: it has no answer, and "" is right
    ids: tuple[int, ...] = ()                # the prompt, or what an encoder reads
    windows: tuple[Window, ...] = ()         # of a head for spans
    context: str = ""                        # that `places` are in; "" where the answer is decoded from its tokens


@dataclass(frozen=True, eq=False)
class Questions:
    items: Sequence[Question]
    said: str                                # what they were read as
    format: str                              # its name
    skipped: int = 0                         # bad rows


def questions_in(opened: OpenedModel, source: str, *, most: int, cache: Path) -> Questions:
    """The first `most` questions of `source`, read as the run's own data were if there is a run.

    Raises WrongUse for data without answers, or that the model cannot be asked.
    """
    data = (opened.found.recipe or Recipe()).data
    found = read_rows(source, cache=cache, split=data.split, text_field=data.text_field, most=max(most, ROWS_LOOKED_AT))
    rows = [row for row in found if isinstance(row, Row)]
    looked_at = rows[:ROWS_LOOKED_AT]
    schema, said = schema_for(opened, looked_at)
    if schema.kind == "text":
        raise WrongUse(f"{source} is text without questions, so that no answer can be right or wrong; leave --metric out for "
                       "its loss, or give rows with answers")
    # where the model writes one answer, all the right ones
    spans = _schema_of(looked_at, data.columns, "span") if opened.task != "span" else None
    items, skipped = [], 0
    for row in rows:
        try:
            items.append(_question(opened, schema.read(row.fields), _references(spans, row)))
        except BadRow:
            skipped += 1
    if not items:
        raise WrongUse(f"none of the {len(rows)} rows of {source} could be read as {schema.name}; `powertrain data check` says "
                       "why")
    return Questions(items[:most], said, schema.name, skipped)


def held_out_questions(opened: OpenedModel, store: ExampleStore, *, most: int) -> Questions:
    """The first `most` of what a run held out: each prompt exactly as it was trained, and the answer that it was trained on."""
    if store.kind == "text":
        raise WrongUse("this run learned texts without questions, so that no answer can be right or wrong; leave --metric out "
                       "for its loss, or give rows with answers by --data FILE")
    read = _span_again if store.kind == "span" else _pair_again if store.kind == "pair" else _turn_again
    items = [read(store, store.validation[i]) for i in range(min(most, len(store.validation)))]
    return Questions(items, f"what the run held out: {len(store.validation):,} examples", store.schema)


# ------------------------------------------------------------------------------------------------ from rows


def schema_for(opened: OpenedModel, rows: Sequence[Row]) -> tuple[Schema, str]:
    """How to read rows, as the run's own were if there is a run, and what was said; a decoder is asked what others point at.

    Training wants such data to be named (data.format), since it would learn another task; measuring does not.
    """
    data = (opened.found.recipe or Recipe()).data
    try:
        return find_schema(rows, name=data.format, columns=data.columns, task=opened.task)
    except WrongUse as refused:
        if data.format is not None or opened.task != "causal":
            raise
        known = next((found for task in ("span", "seq2seq") if (found := _schema_of(rows, data.columns, task))), None)
        if known is None:
            raise refused from None
        return find_schema(rows, name=known.name, columns=data.columns, task=opened.task)


def _schema_of(rows: Sequence[Row], columns: Mapping[str, str], task: str) -> Schema | None:
    try:
        return find_schema(rows, name=None, columns=columns, task=task)[0]
    except WrongUse:
        return None


def _references(spans: Schema | None, row: Row) -> tuple[str, ...] | None:
    if spans is None:
        return None
    try:
        sample = spans.read(row.fields)
    except BadRow:
        return None
    return sample.answers if isinstance(sample, Span) else None


def _question(opened: OpenedModel, sample: Sample, references: tuple[str, ...] | None) -> Question:
    if isinstance(sample, Conversation):
        last = max(number for number, message in enumerate(sample.messages) if message.role == "assistant")
        _, ids = opened.conversation_ids(sample.messages[:last])
        asked = sample.messages[last - 1].content if last else ""
        return Question(asked, references or (sample.messages[last].content,), tuple(ids))
    if isinstance(sample, Pair):
        return Question(sample.source, references or (sample.target,), tuple(opened.prompt_ids(sample.source)))
    assert isinstance(sample, Span), type(sample)
    return Question(sample.question, sample.answers, windows=tuple(windows_of(opened, sample)), context=sample.context)


def windows_of(opened: OpenedModel, sample: Span) -> list[Window]:
    """The question with each part of its context, in the way that data/examples/encoding.py cuts examples."""
    library = LibraryTokenizer.from_str(opened.chat_tokenizer.library.to_str())
    wanted = (opened.found.recipe or Recipe()).data.max_length or WINDOW
    length = min(opened.context or wanted, wanted)
    library.enable_truncation(length, stride=min(STRIDE, length // 4), strategy="only_second")
    try:
        encoding = library.encode(sample.question, sample.context)
    except Exception as error:               # the library raises bare Exception
        raise BadRow(f"its question leaves no room for the context ({error})") from error
    windows = []
    for part in (encoding, *encoding.overflowing):
        inside = [number for number, sequence in enumerate(part.sequence_ids) if sequence == 1]
        if inside:
            example = Example(np.array(part.ids, dtype=np.int64), np.full(2, IGNORE, dtype=np.int64),
                              segments=np.array(part.type_ids, dtype=np.int64))
            windows.append(Window(example, tuple(part.offsets), inside[0], inside[-1] + 1))
    return windows


# ------------------------------------------------------------------------------------------------ from examples


def _turn_again(store: ExampleStore, example: Example) -> Question:
    """The last trained turn: what is read before it, and what it says."""
    trained = np.flatnonzero(example.targets != IGNORE)
    breaks = np.flatnonzero(np.diff(trained) > 1)
    first = int(trained[breaks[-1] + 1] if len(breaks) else trained[0])
    answer = example.targets[first:int(trained[-1]) + 1]
    ids = example.inputs[:first + 1].tolist()
    return Question(store.tokenizer.decode(ids), (_decoded(store, answer),), tuple(ids))


def _pair_again(store: ExampleStore, example: Example) -> Question:
    assert example.source is not None
    ids = example.source.tolist()
    return Question(store.tokenizer.decode(ids), (_decoded(store, example.targets[example.targets != IGNORE]),), tuple(ids))


def _span_again(store: ExampleStore, example: Example) -> Question:
    first, last = (int(place) for place in example.targets)
    segments = np.zeros(len(example.inputs)) if example.segments is None else example.segments
    inside = np.flatnonzero(segments == 1)
    begin = int(inside[0]) if len(inside) else 1
    window = Window(example, (), begin, len(example.inputs))
    answers = () if first == last == 0 else (_decoded(store, example.inputs[first:last + 1]),)
    return Question(store.tokenizer.decode(example.inputs[:begin].tolist()), answers, windows=(window,))


def _decoded(store: ExampleStore, ids: Any) -> str:
    """Without special tokens: what ends the answer is no part of it."""
    text: str = store.tokenizer.library.decode(np.asarray(ids).tolist(), skip_special_tokens=True)
    return text.strip()
