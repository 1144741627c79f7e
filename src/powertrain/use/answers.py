"""A model asked: what it answers to questions, and how good that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from powertrain.data.example import collate
from powertrain.models.bridge.model import BridgedModel, best_span
from powertrain.models.decoder import Decoder
from powertrain.records import WrongUse
from powertrain.use.generation import DecoderFeed, Feed, Sampling, generate_ids, open_feed, stream
from powertrain.use.metrics import ANSWER_MARK, METRICS, Metric, Scores
from powertrain.use.opening import OpenedModel
from powertrain.use.questions import Question, Questions

SHORT_WORDS = 6              # answers of so many words at most, in the median, are names and facts: F1 tells, ROUGE does not
SUMMARIES = ("document_summary",)
PROGRESS_S = 10.0            # between two words on how far it is


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
    """Asks every question, greedily, with at most `tokens` tokens for an answer, and scores the answers.

    Raises WrongUse for an unknown metric.
    """
    chosen, because = choose_metric(metric, questions, opened.task)
    began = said = time.perf_counter()
    answers = []
    for number, (question, text) in enumerate(zip(questions.items, _texts(opened, questions.items, tokens), strict=True), 1):
        answers.append(Answer(question.shown, question.references, text, chosen.score(text, question.references)))
        if time.perf_counter() - said > PROGRESS_S:
            said = time.perf_counter()
            say(f"{number:,} of {len(questions.items):,} questions answered")
    figures = chosen.mean([answer.answer for answer in answers], [answer.references for answer in answers])
    return Answers(chosen.name, because, figures, tuple(answers), time.perf_counter() - began)


def choose_metric(name: str, questions: Questions, task: str) -> tuple[Metric, str]:
    """The metric `name`, or with "auto" the one that the references call for, and why."""
    if name != "auto":
        if name not in METRICS:
            raise WrongUse(f"there is no metric {name!r}; use auto, {', '.join(METRICS)}")
        return METRICS[name], "as asked"
    references = [reference for question in questions.items for reference in question.references]
    if task == "span":
        return METRICS["f1"], "the model points at answers in a context"
    if references and sum(ANSWER_MARK in reference for reference in references) * 2 > len(references):
        return METRICS["gsm8k"], f"the answers end in {ANSWER_MARK} and a number"
    if questions.format in SUMMARIES:
        return METRICS["rouge"], "the data are documents with summaries"
    words = median(len(reference.split()) for reference in references) if references else 0
    if words <= SHORT_WORDS:
        return METRICS["f1"], f"the answers are short: {words:g} words in the median"
    return METRICS["rouge"], f"the answers are texts: {words:g} words in the median"


def _texts(opened: OpenedModel, questions: Sequence[Question], tokens: int) -> Iterator[str]:
    if opened.task == "span":
        with_none = any(not question.references for question in questions)
        return (point(opened, question, with_none=with_none) for question in questions)
    sampling = Sampling(tokens, temperature=0)
    shared = DecoderFeed(opened.model) if isinstance(opened.model, Decoder) else None      # prompts begin alike: read once
    return (write(opened, question, sampling, shared) for question in questions)


def write(opened: OpenedModel, question: Question, sampling: Sampling, shared: Feed | None) -> str:
    """The model's answer, up to where its turn ends."""
    feed, ids = (shared, list(question.ids)) if shared is not None else open_feed(opened.model, question.ids)
    writes = opened.task == "seq2seq"
    stops = opened.stops if writes else opened.turn_stops
    tokenizer = opened.tokenizer if writes else opened.chat_tokenizer
    before = [] if writes else ids[-1:]
    return "".join(stream(tokenizer, before, generate_ids(feed, ids, sampling), stops)).strip()


def point(opened: OpenedModel, question: Question, *, with_none: bool) -> str:
    """The likeliest answer over all windows of the context; "" where none at all is likelier (`with_none`).

    As in SQuAD 2: no answer is pointing at the first token, and its score is the lowest of all windows'.
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
