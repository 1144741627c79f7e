"""Rows that compare answers: how they are read, which are bad and where, and the examples that are stored of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from example_folders import chat_folder, examples_of
from powertrain.data.example import Compared
from powertrain.data.examples.check import check_examples, pieces_of
from powertrain.data.examples.store import ExampleStore
from powertrain.data.rows.row import Conversation, Message, Preference, Rating, Row
from powertrain.data.rows.schemas import find_schema
from powertrain.records import IGNORE, WrongUse

USER, GOOD, BAD = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
ASKED = Preference(Conversation((Message("user", "u"), Message("assistant", "a"))),
                   Conversation((Message("user", "u"), Message("assistant", "b"))), 1)
SYSTEM = Message("system", "s")
WITH_SYSTEM = Preference(*(Conversation((SYSTEM, *side.messages)) for side in (ASKED.chosen, ASKED.rejected)), 2)

ROWS: list[tuple[dict[str, Any], Preference]] = [
    ({"prompt": "u", "chosen": "a", "rejected": "b", "score": 1}, ASKED),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, ASKED),
    ({"prompt": [USER], "chosen": "a", "rejected": "b"}, ASKED),
    ({"prompt": "u", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ASKED),             # as ultrafeedback repeats it
    ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, ASKED),                            # the prompt is implicit
    ({"question": "u", "chosen": "a", "rejected": "b", "system": "s"}, WITH_SYSTEM),       # as Intel's orca pairs have it
    ({"conversations": [{"from": "human", "value": "u"}], "chosen": {"from": "gpt", "value": "a"},
      "rejected": {"from": "gpt", "value": "b"}}, ASKED),                                  # LLaMA-Factory's
    ({"chosen": "u a", "rejected": "u b"},                                                 # as hh-rlhf; the space is TRL's
     Preference(Conversation((Message("user", "u"), Message("assistant", " a"))),
                Conversation((Message("user", "u"), Message("assistant", " b"))), 1)),
]


def read(fields: dict[str, Any], learns: str = "preference", **options: Any) -> Any:
    found, _ = find_schema([Row(fields, "x.jsonl:1")], name=None, columns={}, task="causal", learns=learns, **options)
    return found.read(fields)


@pytest.mark.parametrize(("fields", "meaning"), ROWS)
def test_a_pair_is_recognised_by_its_columns(fields: dict[str, Any], meaning: Preference) -> None:
    assert read(fields) == meaning


def test_the_prompt_of_several_turns_ends_where_the_answers_part() -> None:
    turns = [USER, GOOD, {"role": "user", "content": "v"}]
    found = read({"chosen": [*turns, GOOD], "rejected": [*turns, BAD]})
    assert found.shared == 3


@pytest.mark.parametrize(("label", "desirable"), [(True, True), (False, False), (1, True), ("false", False)])
def test_a_rated_answer_is_recognised(label: Any, desirable: bool) -> None:
    assert read({"prompt": "u", "completion": "a", "label": label}, "rating") == Rating(ASKED.chosen, 1, desirable)
    messages = [USER, GOOD]
    assert read({"messages": [USER], "completion": [GOOD], "kto_tag": label}, "rating").shared == 1
    assert read({"completion": messages, "label": label}, "rating") == Rating(ASKED.chosen, 1, desirable)


@pytest.mark.parametrize(("fields", "learns", "said"), [
    ({"messages": [USER, GOOD]}, "preference", "needs rows with prompt, chosen and rejected"),
    ({"prompt": "u", "completion": "a"}, "rating", "needs rows with prompt, completion and label"),
    ({"prompt": "u", "completion": "a", "label": True}, "preference", "needs rows with prompt, chosen and rejected"),
    ({"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "v"}, BAD]}, "preference", "different turns"),
    ({"chosen": "abc", "rejected": "xyz"}, "preference", "there is no prompt"),
    ({"prompt": "u", "chosen": [USER], "rejected": [USER]}, "preference", "no assistant turn"),
    ({"prompt": "u", "completion": "a", "label": 3}, "rating", "'label' is 3; use true")])
def test_rows_that_say_nothing_about_answers_are_refused(fields: dict[str, Any], learns: str, said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        read(fields, learns)


def test_other_objectives_say_what_pairs_are_for() -> None:
    with pytest.raises(WrongUse, match="objective=dpo"):
        read(ROWS[0][0], "answers")
    with pytest.raises(WrongUse, match=r"data\.format=preference holds pairs of answers; use objective=dpo"):
        find_schema([Row(ROWS[0][0], "x:1")], name="preference", columns={}, task="causal")
    with pytest.raises(WrongUse, match="preferences train a decoder"):
        find_schema([Row(ROWS[0][0], "x:1")], name=None, columns={}, task="seq2seq", learns="preference")


# ------------------------------------------------------------------------------------------------ stored


@pytest.fixture
def store_of(tmp_path: Path) -> Any:
    def make(rows: list[dict[str, Any]], learns: str = "preference", **options: Any) -> ExampleStore:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        folder = tmp_path / "chat"
        if not folder.exists():
            chat_folder(folder)
        return examples_of(path, tokenizer_folder=folder, cache=tmp_path / "cache", learns=learns,
                           **{"max_length": 64, "validation_share": 0.0} | options)

    return make


PAIR = {"prompt": [{"role": "user", "content": "what is the sum ?"}],
        "chosen": [{"role": "assistant", "content": "it is three"}], "rejected": [{"role": "assistant", "content": "the cat"}]}


def test_a_pair_is_stored_as_two_documents_with_their_answers_trained(store_of: Any) -> None:
    store = store_of([PAIR])
    example, tokenizer = store.example(0), store.tokenizer
    assert isinstance(example, Compared)
    chosen, rejected = example.documents
    for document, answer in ((chosen, "it is three<|im_end|>"), (rejected, "the cat<|im_end|>")):
        assert tokenizer.decode(document.targets[document.targets != IGNORE]) == answer
        asked = "<|im_start|>user\nwhat is the sum ?<|im_end|>\n<|im_start|>assistant"
        assert tokenizer.decode(document.inputs).startswith(asked)
    assert np.array_equal(example.inputs, np.concatenate([chosen.inputs, rejected.inputs]))
    assert store.lengths.tolist() == [example.tokens] == [len(chosen.inputs) + len(rejected.inputs)]
    assert store.trained.tolist() == [int((example.targets != IGNORE).sum())]
    # all that the two documents begin with but the last token of the prompt, which predicts the answers
    assert example.shared == int((chosen.targets != IGNORE).argmax())
    assert np.array_equal(chosen.inputs[:example.shared + 1], rejected.inputs[:example.shared + 1])


def test_a_pair_that_a_reward_model_reads_is_whole_and_scored_at_its_last_token(store_of: Any) -> None:
    store = store_of([{**PAIR, "margin": 1.5}, PAIR], learns="comparison")
    example, tokenizer = store.example(0), store.tokenizer
    assert isinstance(example, Compared)
    assert (example.margin, store.example(1).margin) == (1.5, 0.0)
    for document, answer in zip(example.documents, ("it is three", "the cat"), strict=True):
        assert tokenizer.decode(document.inputs).endswith(f"<|im_start|>assistant\n{answer}<|im_end|>\n")     # all of it
        assert np.flatnonzero(document.targets != IGNORE).tolist() == [len(document.inputs) - 1]
    assert store.lengths.tolist() == [example.tokens] * 2 == [sum(len(side.inputs) for side in example.documents)] * 2
    first, second = (side.inputs for side in example.documents)
    assert np.array_equal(first[:example.shared], second[:example.shared])
    assert first[example.shared] != second[example.shared]
    longest = max(len(first), len(second))
    cut = store_of([PAIR], learns="comparison", max_length=longest - 1, long_examples="cut")
    assert max(len(side.inputs) for side in cut.example(0).documents) == longest - 1
    dropped = store_of([PAIR, {**PAIR, "chosen": [{"role": "assistant", "content": "it"}]}], learns="comparison",
                       max_length=longest - 1, long_examples="drop")
    assert len(dropped.training) == 1


def test_texts_need_no_template_and_get_an_end(store_of: Any) -> None:
    store = store_of([{"prompt": "the cat", "chosen": " sat", "rejected": " on"}])
    chosen, rejected = store.example(0).documents
    assert store.tokenizer.decode(chosen.targets[chosen.targets != IGNORE]) == " sat<|im_end|>"
    assert store.tokenizer.decode(rejected.inputs) == "the cat on"


TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_tools_stand_in_the_prompt_of_both_answers(tools: Any, store_of: Any) -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
    pair = {**PAIR, "chosen": [call], "tools": tools}
    store = store_of([pair, {**pair, "tools": [{"name": "sub"}]}], max_length=400, chat_template="plain")
    example = store.example(0)
    chosen, rejected = example.documents
    for document in (chosen, rejected):
        assert '"name": "add"' in store.tokenizer.decode(document.inputs[:example.shared])
    assert "<tool_call>" in store.tokenizer.decode(chosen.targets[chosen.targets != IGNORE])
    (bad,) = [problem for problem in store.problems if problem.kind == "bad"]
    assert "calls 'add', which is none of the row's tools" in bad.reason
    row = {"prompt": PAIR["prompt"], "completion": [call], "label": True, "tools": tools}
    rated = store_of([row], "rating", max_length=400, chat_template="plain")
    assert '"name": "add"' in rated.tokenizer.decode(rated.example(0).inputs)


REWRITING = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
             "{{ (m.content if loop.last else m.content.split('!')[-1]) + '<|im_end|>\n' }}{% endfor %}"
             "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def test_an_answer_of_several_turns_that_the_template_rewrites_is_named(store_of: Any, tmp_path: Path) -> None:
    (tmp_path / "rewriting.jinja").write_text(REWRITING)
    turns = [{"role": "assistant", "content": "the ! cat"}, {"role": "user", "content": "what"}]
    pair = {**PAIR, "chosen": [*turns, *PAIR["chosen"]], "rejected": [*turns, *PAIR["rejected"]]}
    store = store_of([PAIR, {**pair, "rejected": PAIR["rejected"]}], chat_template=str(tmp_path / "rewriting.jinja"))
    (bad,) = [problem for problem in store.problems if problem.kind == "bad"]
    assert "rewrites turns before the last one, and the answer has 2 turns" in bad.reason


def test_bad_pairs_and_ties_are_named_by_line(store_of: Any) -> None:
    store = store_of([PAIR, {**PAIR, "rejected": PAIR["chosen"]}, {**PAIR, "rejected": [{"role": "assistant", "content": " "}]},
                      PAIR, {**PAIR, "chosen": None}])
    check = check_examples(store, train_batch_size=2, seed=0)
    named = {(problem.kind, problem.origin.rpartition("/")[2]): problem.reason for problem in check.problems}
    assert "equal" in named["tie", "pairs.jsonl:2"]
    assert "empty answer" in named["bad", "pairs.jsonl:3"]
    assert "'chosen' is null" in named["bad", "pairs.jsonl:5"]
    assert named["duplicate", "pairs.jsonl:4"].endswith("pairs.jsonl:1")
    assert check.training_examples == 2
    assert any("1 of 5 pairs have equal answers" in sentence for sentence in store.said)


def test_pairs_that_are_cut_to_the_same_are_ties(store_of: Any) -> None:
    long = {**PAIR, "chosen": [{"role": "assistant", "content": "it is three cat"}],
            "rejected": [{"role": "assistant", "content": "it is three mat"}]}
    length = len(store_of([long]).example(0).documents[0].inputs) - 2
    store = store_of([PAIR, long], max_length=length, long_examples="cut")
    (tie,) = [problem for problem in store.problems if problem.kind == "tie"]
    assert tie.origin.endswith("pairs.jsonl:2")
    assert f"data.max_length={length}" in tie.reason


def test_a_pair_makes_two_rated_answers_and_each_has_another_prompts_answer(store_of: Any) -> None:
    other = {**PAIR, "prompt": [{"role": "user", "content": "hello world"}],
             "chosen": [{"role": "assistant", "content": "hello"}]}
    store = store_of([PAIR, other], "rating")
    examples = [store.example(index) for index in range(4)]
    assert [example.desirable for example in examples] == [True, False, True, False]
    texts = [[store.tokenizer.decode(document.inputs) for document in example.documents] for example in examples]
    assert "what is the sum" in texts[0][1]
    assert texts[0][1].endswith("the cat")                       # the last example's answer to the first prompt
    assert "hello world" in texts[2][1]
    assert texts[2][1].endswith("the cat")
    targets = examples[2].documents[1].targets
    assert store.tokenizer.decode(targets[targets != IGNORE]) == "the cat<|im_end|>"
    assert store.trained.tolist() == [int((example.targets != IGNORE).sum()) for example in examples]


def test_pairs_with_one_prompt_are_on_one_side(store_of: Any) -> None:
    rows = [{"prompt": f"prompt {number // 2}", "chosen": f" a{number}", "rejected": " b"} for number in range(20)]
    store = store_of(rows, validation_share=0.2)
    held = {int(index) // 2 for index in store.validation.indices}
    assert len(store.validation) == 4
    assert not held & {int(index) // 2 for index in store.epoch.training}


def test_a_pair_is_shown_side_by_side(store_of: Any) -> None:
    pieces = pieces_of(store_of([PAIR]), 0)
    trained = {piece.reader: piece.text for piece in pieces if piece.trained}
    assert trained == {"chosen": "it is three<|im_end|>", "rejected": "the cat<|im_end|>"}


def test_prompts_are_never_trained(store_of: Any) -> None:
    with pytest.raises(WrongUse, match="answers are compared without"):
        store_of([PAIR], train_on="all")
