"""Questions with known answers, from any data or from a run's held-out examples, and the model's answers with their scores."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as LibraryTokenizer

from powertrain.data.example import Example, collate
from powertrain.data.examples.making import ROWS_LOOKED_AT
from powertrain.data.examples.store import ExampleStore
from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.row import BadRow, Conversation, Pair, Row, Sample, Span
from powertrain.data.rows.schemas import ANSWERS, COMPARED, Schema, find_schema
from powertrain.models.bridge.model import BridgedModel, best_span
from powertrain.models.decoder import Decoder
from powertrain.models.model import Model
from powertrain.recipe import Recipe
from powertrain.records import IGNORE, WrongUse
from powertrain.use.generation import Sampling
from powertrain.use.metrics import ANSWER_MARK, Scores, check_metric, mean, score
from powertrain.use.opening import OpenedModel
from powertrain.use.together import Job, answer_jobs

WINDOW, STRIDE = 512, 128    # tokens of a window of a long context, and those that two windows share: as BERT was trained
SHORT_WORDS = 6              # answers of at most so many words, in the median, are names and facts: F1 fits, ROUGE does not
AT_ONCE = 16                 # answers that are computed together, as far as their keys and values fit into:
CACHE_BYTES = 1 << 30
PROGRESS_S = 10.0            # between two messages about the progress


@dataclass(frozen=True, eq=False)
class Window:
    """A question with a part of its context, as a head for spans reads them."""

    example: Example
    places: tuple[tuple[int, int], ...]      # the characters of each token in the context; empty for examples of a run
    first: int                               # token of the context
    stop: int


@dataclass(frozen=True, eq=False)
class Question:
    shown: str                               # the question as text, to look at
    references: tuple[str, ...]              # right answers; empty: the question has no answer, and "" is right
    ids: tuple[int, ...] = ()                # the prompt, or what an encoder reads
    windows: tuple[Window, ...] = ()         # of a head for spans
    context: str = ""                        # that `places` are in; "" where the answer is decoded from its tokens


@dataclass(frozen=True, eq=False)
class Questions:
    items: Sequence[Question]
    said: str                                # how the rows were read
    format: str                              # the name of that schema
    skipped: int = 0                         # bad rows


def questions_in(opened: OpenedModel, source: str, *, most: int, cache: Path) -> Questions:
    """Return the first `most` questions of `source`, read like the run's own data if there is a run.

    Raises WrongUse for data without answers, and for data that the model cannot be asked about.
    """
    data = (opened.found.recipe or Recipe()).data
    found = read_rows(source, cache=cache, split=data.split, text_field=data.text_field, most=max(most, ROWS_LOOKED_AT))
    rows = [row for row in found if isinstance(row, Row)]
    looked_at = rows[:ROWS_LOOKED_AT]
    schema, said = schema_for(opened, looked_at)
    if schema.kind == "text":
        raise WrongUse(f"{source} is text without questions, so that no answer can be right or wrong; leave --metric out for "
                       "its loss, or give rows with answers")
    # a row may have several right answers, also where the model writes one
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
    """Return the first `most` held-out examples of a run as questions: the exact prompt, and the answer of the data."""
    if store.kind in COMPARED:
        raise WrongUse("this run learned to compare answers; leave --metric out for its accuracy on held-out answers, or give "
                       "questions with answers by --data FILE")
    if store.kind == "text":
        raise WrongUse("this run learned texts without questions, so that no answer can be right or wrong; leave --metric out "
                       "for its loss, or give rows with answers by --data FILE")
    read = _span_again if store.kind == "span" else _pair_again if store.kind == "pair" else _turn_again
    items = [read(store, store.validation[i]) for i in range(min(most, len(store.validation)))]
    return Questions(items, f"what the run held out: {len(store.validation):,} examples", store.schema)


# ------------------------------------------------------------------------------------------------ from rows


def schema_for(opened: OpenedModel, rows: Sequence[Row], learns: str = ANSWERS) -> tuple[Schema, str]:
    """Return how to read rows, like the run's own data if there is a run, and a sentence about that.

    A decoder may be asked questions of span or seq2seq data. Training needs data.format for such data, because the model would
    learn another task; measuring does not.
    """
    data = (opened.found.recipe or Recipe()).data
    try:
        return find_schema(rows, name=data.format, columns=data.columns, task=opened.task,
                           learns=learns)
    except WrongUse as refused:
        if data.format is not None or opened.task != "causal" or learns != ANSWERS:
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
        prompt, ids = opened.conversation_ids(sample.messages[:last], sample.tools)
        asked = sample.messages[last - 1].content if last else ""
        right = _written_calls(opened, sample, last, prompt) if sample.messages[last].tool_calls else \
            sample.messages[last].content
        return Question(asked, references or (right,), tuple(ids))
    if isinstance(sample, Pair):
        return Question(sample.source, references or (sample.target,), tuple(opened.prompt_ids(sample.source)))
    assert isinstance(sample, Span), type(sample)
    return Question(sample.question, sample.answers, windows=tuple(windows_of(opened, sample)), context=sample.context)


def _written_calls(opened: OpenedModel, sample: Conversation, last: int, prompt: str) -> str:
    """Return a turn of calls as the model has to write it behind `prompt`, without its special tokens."""
    text = opened.template.render(sample.messages[:last + 1], tools=sample.tools)
    library = opened.chat_tokenizer.library
    ids = library.encode(text.removeprefix(prompt), add_special_tokens=False).ids
    return str(library.decode(ids, skip_special_tokens=True)).strip()


def windows_of(opened: OpenedModel, sample: Span) -> list[Window]:
    """Return the question with each part of its context, cut as in data/examples/encoding.py."""
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
    """Return the last trained turn: the text before it as the question, and its own text as the answer."""
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
    """Return the text without special tokens, because the end token is not part of the answer."""
    text: str = store.tokenizer.library.decode(np.asarray(ids).tolist(), skip_special_tokens=True)
    return text.strip()


# ------------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True)
class Answer:
    question: str
    references: tuple[str, ...]
    answer: str
    scores: Scores


@dataclass(frozen=True)
class Answers:
    metric: str
    because: str                             # why this metric
    figures: Scores                          # means
    answers: tuple[Answer, ...]
    seconds: float


def ask_all(opened: OpenedModel, questions: Questions, metric: str, *, tokens: int,
            say: Callable[[str], None] = lambda _: None) -> Answers:
    """Ask every question, greedily, with at most `tokens` tokens for an answer, and score the answers."""
    chosen, because = choose_metric(metric, questions, opened.task)
    began = said = time.perf_counter()
    found: dict[int, Answer] = {}
    for number, text in _texts(opened, questions.items, tokens):
        question = questions.items[number]
        found[number] = Answer(question.shown, question.references, text, score(chosen, text, question.references))
        if time.perf_counter() - said > PROGRESS_S:
            said = time.perf_counter()
            say(f"{len(found):,} of {len(questions.items):,} questions answered")
    answers = tuple(found[number] for number in range(len(found)))
    return Answers(chosen, because, mean([answer.scores for answer in answers]), answers, time.perf_counter() - began)


def choose_metric(name: str, questions: Questions, task: str) -> tuple[str, str]:
    """Return the metric `name`, or for "auto" the one that fits the references, and why. Raises WrongUse for an unknown one."""
    check_metric(name)
    if name != "auto":
        return name, "as asked"
    references = [reference for question in questions.items for reference in question.references]
    if task == "span":
        return "f1", "the model points at answers in a context"
    if references and sum(ANSWER_MARK in reference for reference in references) * 2 > len(references):
        return "gsm8k", f"the answers end in {ANSWER_MARK} and a number"
    if questions.format == "document_summary":
        return "rouge", "the data are documents with summaries"
    words = median(len(reference.split()) for reference in references) if references else 0
    if words <= SHORT_WORDS:
        return "f1", f"the answers are short: {words:g} words in the median"
    return "rouge", f"the answers are texts: {words:g} words in the median"


def _texts(opened: OpenedModel, questions: Sequence[Question], tokens: int) -> Iterator[tuple[int, str]]:
    """Yield the model's answers with the numbers of their questions, in no order, each up to the end of its turn."""
    if opened.task == "span":
        with_none = any(not question.references for question in questions)
        yield from ((number, point(opened, question, with_none=with_none)) for number, question in enumerate(questions))
        return
    stops = opened.turn_stops if opened.task == "causal" else opened.stops
    sampling = Sampling(tokens, temperature=0)
    jobs = [Job(number, question.ids, sampling, stops) for number, question in enumerate(questions)]
    for done in answer_jobs(opened.model, jobs, _at_once(opened.model, max(len(job.ids) for job in jobs) + tokens)):
        yield done.number, "".join(opened.answer_pieces(questions[done.number].ids, iter(done.ids))).strip()


def _at_once(model: Model, tokens: int) -> int:
    """Return how many answers are computed together where prompt and answer have so many tokens at most."""
    if not isinstance(model, Decoder):
        return 1
    c = model.config
    held = 2 * tokens * 2 * c.layers * c.kv_heads * c.head_width * torch.float32.itemsize      # room doubles as it grows
    return max(1, min(AT_ONCE, CACHE_BYTES // held))


def point(opened: OpenedModel, question: Question, *, with_none: bool) -> str:
    """Return the likeliest answer over all windows of the context; with `with_none` "" where no answer is likelier.

    As in SQuAD 2, the first token stands for no answer, with its lowest score in all windows.
    """
    assert isinstance(opened.model, BridgedModel), type(opened.model)
    best, none = ("", -torch.inf), torch.inf
    device = next(opened.model.parameters()).device
    for window in question.windows:
        batch = collate([window.example]).to(device)
        first, last, likelihood = best_span(opened.model, batch, (window.first, window.stop))
        if with_none:
            with torch.no_grad():
                scores = opened.model.hidden(batch).float().log_softmax(-1)
            none = min(none, float(scores[0, 0] + scores[1, 0]))
        if likelihood > best[1]:
            if question.context:
                text = question.context[window.places[first][0]:window.places[last][1]]
            else:
                ids = window.example.inputs[first:last + 1].tolist()
                text = opened.chat_tokenizer.library.decode(ids, skip_special_tokens=True)
            best = text.strip(), likelihood
    return "" if with_none and none > best[1] else best[0]
