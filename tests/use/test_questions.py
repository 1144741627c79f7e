"""Questions from rows and from what a run held out, the metric they call for, and the answers of each kind of model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from example_folders import examples_of, json_lines, seq2seq_folder, span_folder
from powertrain.data.example import collate
from powertrain.models.bridge.model import BridgedModel
from powertrain.models.decoder import Decoder
from powertrain.records import WrongUse
from powertrain.use import questions as asking
from powertrain.use.generation import DecoderFeed, Sampling, generate_ids
from powertrain.use.opening import OpenedModel, open_model
from powertrain.use.questions import (
    AT_ONCE,
    Question,
    Questions,
    _at_once,
    ask_all,
    choose_metric,
    held_out_questions,
    point,
    questions_in,
)

SUMS = [{"question": f"what is the sum of {i} and one ?", "answer": f"it is\n#### {i + 1}"} for i in range(8)]


@pytest.fixture
def opened(base_folder: Path) -> OpenedModel:
    return open_model(str(base_folder))


@pytest.fixture
def spans(tmp_path: Path) -> OpenedModel:
    """A head for spans with random weights."""
    from transformers import BertConfig, BertForQuestionAnswering

    span_folder(tmp_path / "bert")
    torch.manual_seed(0)
    BertForQuestionAnswering(BertConfig(vocab_size=400, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                        intermediate_size=32, max_position_embeddings=16,
                                        initializer_range=0.5)).save_pretrained(tmp_path / "bert")
    return open_model(str(tmp_path / "bert"))


def test_rows_become_prompts_and_references(opened: OpenedModel, tmp_path: Path, cache: Path) -> None:
    rows = json_lines(tmp_path / "rows.jsonl", [*SUMS[:3], {"question": "hello"}, *SUMS[3:]])
    found = questions_in(opened, str(rows), most=5, cache=cache)
    assert found.format == "question_answer"
    assert found.skipped == 1
    assert [question.references for question in found.items] == [(row["answer"],) for row in SUMS[:5]]
    assert found.items[0].shown == "what is the sum of 0 and one ?"
    assert opened.chat_tokenizer.decode(found.items[0].ids) == (
        "<|im_start|>user\nwhat is the sum of 0 and one ?<|im_end|>\n<|im_start|>assistant\n")


def test_a_run_asks_the_prompts_that_it_was_trained_on(opened: OpenedModel, tmp_path: Path, cache: Path) -> None:
    source = str(json_lines(tmp_path / "rows.jsonl", list(SUMS)))
    store = examples_of(source, max_length=96, validation_share=0.4, cache=cache,
                        tokenizer_folder=opened.found.tokenizer_folder)
    held_out = held_out_questions(opened, store, most=50).items
    of_rows = {question.ids: question.references for question in questions_in(opened, source, most=50, cache=cache).items}
    assert 1 < len(held_out) < len(SUMS)
    assert all(of_rows[question.ids] == question.references for question in held_out)


def test_all_answers_to_a_question_count(opened: OpenedModel, tmp_path: Path, cache: Path) -> None:
    rows = [{"context": "the cat sat on the mat", "question": "who sat ?",
             "answers": {"text": ["the cat", "cat"], "answer_start": [0, 4]}}]
    found = questions_in(opened, str(json_lines(tmp_path / "rows.jsonl", list(rows))), most=5, cache=cache)
    assert found.items[0].references == ("the cat", "cat")
    assert "who sat ?" in opened.chat_tokenizer.decode(found.items[0].ids)


def test_text_has_no_questions(opened: OpenedModel, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(WrongUse, match="text without questions"):
        questions_in(opened, str(json_lines(tmp_path / "rows.jsonl", [{"text": "hello"}])), most=5, cache=cache)


@pytest.mark.parametrize(("references", "kind", "task", "metric"), [
    (["it is\n#### 4", "#### 5"], "question_answer", "causal", "gsm8k"),
    (["Paris", "the Eiffel Tower"], "question_answer", "causal", "f1"),
    (["a whole sentence that says a good deal more than a name"], "question_answer", "causal", "rouge"),
    (["short"], "document_summary", "seq2seq", "rouge"),
    (["a whole sentence that says a good deal more than a name"], "context_question_answers", "span", "f1"),
])
def test_the_references_call_for_a_metric(references: list[str], kind: str, task: str, metric: str) -> None:
    questions = Questions([Question("q", (reference,)) for reference in references], "", kind)
    assert choose_metric("auto", questions, task)[0] == metric
    assert choose_metric("exact", questions, task)[0] == "exact"


def test_a_decoder_is_asked_greedily_up_to_the_end_of_its_turn(opened: OpenedModel, tmp_path: Path, cache: Path) -> None:
    questions = questions_in(opened, str(json_lines(tmp_path / "rows.jsonl", list(SUMS))), most=4, cache=cache)
    found = ask_all(opened, questions, "auto", tokens=7)
    assert (found.metric, len(found.answers)) == ("gsm8k", 4)
    assert isinstance(opened.model, Decoder)
    for question, answer in zip(questions.items, found.answers, strict=True):
        ids = list(generate_ids(DecoderFeed(opened.model), question.ids, Sampling(7, temperature=0)))      # each by itself
        ids = ids[:next((i for i, token in enumerate(ids) if token in opened.turn_stops), len(ids))]
        whole = opened.chat_tokenizer.decode([*question.ids, *ids])
        assert answer.answer == whole[len(opened.chat_tokenizer.decode(question.ids)):].strip()
    assert found.figures == {"accuracy": sum(answer.scores["accuracy"] for answer in found.answers) / 4}


def test_as_many_are_asked_at_once_as_their_keys_have_room(opened: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _at_once(opened.model, 100) == AT_ONCE
    monkeypatch.setattr(asking, "CACHE_BYTES", 1)
    assert _at_once(opened.model, 100) == 1


def test_an_encoder_decoder_is_asked_its_source(tmp_path: Path, cache: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    seq2seq_folder(tmp_path / "t5")
    torch.manual_seed(0)
    network = T5ForConditionalGeneration(T5Config(vocab_size=330, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                                                  decoder_start_token_id=0, eos_token_id=1))
    network.save_pretrained(tmp_path / "t5")
    opened = open_model(str(tmp_path / "t5"))
    rows = [{"document": "the cat sat on the mat", "summary": "the cat sat"}]
    questions = questions_in(opened, str(json_lines(tmp_path / "rows.jsonl", list(rows))), most=1, cache=cache)
    found = ask_all(opened, questions, "auto", tokens=5)
    assert found.metric == "rouge"
    source = torch.tensor([questions.items[0].ids])
    expected = network.eval().generate(source, max_new_tokens=5, do_sample=False)[0, 1:].tolist()
    expected = expected[:expected.index(1)] if 1 in expected else expected
    assert found.answers[0].answer == opened.tokenizer.decode(expected).strip()


class TestSpans:
    ROW: ClassVar[dict[str, Any]] = {
        "context": "the cat sat on the mat and paris is the capital of france , it is three", "question": "the capital ?",
        "answers": {"text": ["paris"], "answer_start": [27]}}

    def ask(self, opened: OpenedModel, cache: Path, tmp_path: Path) -> Question:
        (question,) = questions_in(opened, str(json_lines(tmp_path / "rows.jsonl", [self.ROW])), most=1, cache=cache).items
        return question

    def test_a_long_context_is_read_in_windows(self, spans: OpenedModel, cache: Path, tmp_path: Path) -> None:
        question = self.ask(spans, cache, tmp_path)
        assert question.references == ("paris",)
        assert len(question.windows) > 1
        seen = set()
        for window in question.windows:
            assert len(window.example.inputs) <= 16
            seen.update(window.places[window.first:window.stop])
        assert {question.context[start:stop] for start, stop in seen} == set(self.ROW["context"].split())

    def test_the_likeliest_span_of_all_windows_is_the_answer(self, spans: OpenedModel, cache: Path, tmp_path: Path) -> None:
        question, model = self.ask(spans, cache, tmp_path), spans.model
        assert isinstance(model, BridgedModel)
        candidates = []
        for window in question.windows:
            with torch.no_grad():
                starts, ends = model.hidden(collate([window.example])).log_softmax(-1)
            for first in range(window.first, window.stop):
                for last in range(first, min(first + 30, window.stop)):
                    text = question.context[window.places[first][0]:window.places[last][1]]
                    candidates.append((float(starts[first] + ends[last]), text))
        for windows in (question.windows, question.windows[::-1]):
            assert point(spans, replace(question, windows=windows), with_none=False) == max(candidates)[1]

    def test_no_answer_wins_only_where_questions_may_have_none(self, spans: OpenedModel, cache: Path, tmp_path: Path) -> None:
        question, model = self.ask(spans, cache, tmp_path), spans.model
        assert isinstance(model, BridgedModel)
        (window, *_) = question.windows
        question = replace(question, windows=(window,))
        with torch.no_grad():                # the first token, [CLS], gets the highest scores
            read, types = (torch.from_numpy(row)[None] for row in (window.example.inputs, window.example.segments))
            direction = model.network.bert(read, token_type_ids=types).last_hidden_state[0, 0]
            model.network.qa_outputs.weight.copy_(direction.repeat(2, 1))
        assert point(spans, question, with_none=True) == ""
        assert point(spans, question, with_none=False) != ""

    def test_of_a_runs_own_examples_the_answer_is_decoded(self, spans: OpenedModel, cache: Path, tmp_path: Path) -> None:
        rows = [self.ROW | {"context": f"{number} {self.ROW['context']}",
                            "answers": {"text": ["paris"], "answer_start": [27 + len(str(number)) + 1]}} for number in range(6)]
        store = examples_of(json_lines(tmp_path / "rows.jsonl", list(rows)), max_length=16, validation_share=0.5,
                            task="span", tokenizer_folder=spans.found.tokenizer_folder, cache=cache)
        found = held_out_questions(spans, store, most=50).items
        assert {question.references for question in found} == {("paris",), ()}         # a window without it has no answer
        answer = point(spans, found[0], with_none=False)
        assert answer
        assert np.isin(answer.split(), [word for row in rows for word in str(row["context"]).split()]).all()


def test_an_unknown_metric_names_the_known_ones() -> None:
    with pytest.raises(WrongUse, match="use auto, exact, f1, rouge, gsm8k"):
        choose_metric("bleu", Questions([], "", ""), "causal")
