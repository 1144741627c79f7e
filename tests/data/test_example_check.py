import subprocess
import sys

import numpy as np
import pytest

from example_folders import chat_folder, examples_of, json_lines, seq2seq_folder, span_folder
from powertrain.data.example import collate_padded
from powertrain.data.examples.check import check_examples, histogram, padding_share, pieces_of
from powertrain.data.order import step_examples
from powertrain.records import WrongUse
from powertrain.report.rows import check_rows, marked, totals

ROWS = [{"question": f"what is {number} ?", "answer": f"it is {number} " + "cat " * (number % 7)} for number in range(40)]


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def opened(tmp_path, chat):
    def opens(rows, **changed):
        path = json_lines(tmp_path / "rows.jsonl", rows)
        options = {"max_length": 100, "validation_share": 0.0, "seed": 3, "tokenizer_folder": chat, "cache": tmp_path / "cache"}
        return examples_of(path, **{**options, **changed})
    return opens


def check(store, batch=8):
    return check_examples(store, train_batch_size=batch, seed=3)


def test_rows_that_repeat_are_named_with_the_row_that_they_repeat(opened, tmp_path):
    found = check(opened([*ROWS[:5], ROWS[1], "{bad", ROWS[1], ROWS[0]]))
    assert found.duplicates == 3
    named = [(problem.origin.rsplit(":")[-1], problem.reason.rsplit(":")[-1]) for problem in found.problems
             if problem.kind == "duplicate"]
    assert sorted(named) == [("6", "2"), ("8", "2"), ("9", "1")]


def test_a_weight_that_leaves_an_epoch_without_examples_is_refused(opened):
    with pytest.raises(WrongUse, match=r"data\.weights"):
        check(opened(ROWS[:3], weights=[0.1]))


def test_the_pieces_of_one_long_text_are_no_duplicates(opened):
    found = check(opened([{"text": "the cat sat on the mat " * 30}, {"text": "hello world"}], max_length=16))
    assert found.counts["examples"] > 10
    assert found.duplicates == 0


def test_prompts_on_both_sides_are_found_with_both_places(opened, tmp_path):
    rows = [{"question": "new ?", "answer": "x"}, {"question": "what is 3 ?", "answer": "other"}]
    held = json_lines(tmp_path / "held.jsonl", rows)
    store = opened(ROWS, validation_source=str(held))
    found = check(store)
    assert any(f"1 prompts of {held} are trained on too" in sentence for sentence in store.said)
    assert found.shared_prompts == 1
    shared = [problem for problem in found.problems if problem.kind == "shared"]
    assert shared[0].origin == f"{held}:2"
    assert shared[0].reason.endswith("rows.jsonl:4")
    assert check(opened(ROWS, validation_share=0.3)).shared_prompts == 0


def test_the_padding_of_drawn_batches_is_what_the_first_epoch_computes(opened):
    store = opened(ROWS)
    slots = padding = 0
    for step in range(5):
        batch = collate_padded([store.training[int(i)] for i in step_examples(3, step, 8, len(store.training))])
        slots, padding = slots + len(batch.tokens), padding + batch.padding_tokens
    shares = check(store).padding_shares
    assert shares["as drawn, padded"] == pytest.approx(padding / slots, abs=1e-12)
    assert 0 < shares["grouped by length, padded"] < shares["as drawn, padded"]
    assert shares["packed end to end"] == 0


def test_padding_counts_the_short_last_batch_and_each_side_of_a_pair():
    lengths = np.array([1, 3, 5, 2, 4])
    assert padding_share([lengths], 2) == pytest.approx(1 - 15 / (6 + 10 + 4))
    assert padding_share([lengths, lengths[::-1]], 2) == pytest.approx(1 - 30 / (20 + 8 + 10 + 1))
    assert padding_share([lengths], 1) == 0


def test_encoder_and_decoder_are_padded_apart(opened, tmp_path):
    rows = [{"document": "cat " * (1 + number), "summary": "hat " * (9 - number)} for number in range(9)]
    store = opened(rows, tokenizer_folder=seq2seq_folder(tmp_path / "t5"), task="seq2seq", decoder_start=0)
    examples = list(store.training)
    padded = max(len(example.source) for example in examples) + max(len(example.inputs) for example in examples)
    real = sum(example.tokens for example in examples)
    assert check(store, batch=9).padding_shares["as drawn, padded"] == pytest.approx(1 - real / (9 * padded))


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [3, 900, 17, 64, 65, 2000], list(range(7, 200))])
def test_the_histogram_counts_every_example_once(lengths):
    bars = histogram(np.array(lengths))
    assert sum(bar.examples for bar in bars) == len(lengths)
    assert len(bars) <= 12
    for bar in bars:
        assert bar.examples == sum(bar.first <= length <= bar.last for length in lengths)


def test_an_epoch_is_counted_with_its_weights(opened):
    once, twice = check(opened(ROWS)), check(opened(ROWS, weights=[2.0]))
    assert twice.epoch_tokens == 2 * once.epoch_tokens
    assert twice.training_examples == 80
    assert 0 < once.trained_share == twice.trained_share < 1


def test_the_report_names_bad_rows_with_line_and_reason_and_says_what_truncation_lost(opened):
    found = check(opened([*ROWS[:10], "{bad", {"question": "what is it", "answer": "cat " * 400}], long_examples="cut"))
    lines = [text for _, text in check_rows(found)]
    assert any(line.startswith("    ") and "rows.jsonl:11: " in line for line in lines)
    assert any(f"1 rows too long, cut ({found.counts['tokens_lost']:,} tokens lost)" in line for line in lines)
    assert totals(found) == {"bad": 1, "cut": 1}
    assert any("#" in line for line in lines)
    assert any(f"({found.trained_share:.1%}) are trained" in line for line in lines)


def test_an_example_is_shown_with_what_is_trained_and_its_special_tokens(opened):
    ((reader, text),) = marked(pieces_of(opened(ROWS), 1))
    assert reader == "model"
    assert text == "<|im_start|>user\nwhat is 1 ?<|im_end|>\n<|im_start|>assistant\n[[it is 1 cat <|im_end|>]]"


def test_pairs_and_spans_are_shown_too(opened, tmp_path):
    pairs = opened([{"document": "hello world", "summary": "hello"}] * 2, tokenizer_folder=seq2seq_folder(tmp_path / "t5"),
                   task="seq2seq", decoder_start=0)
    assert marked(pieces_of(pairs, 0)) == [("encoder", "hello world</s>"), ("decoder", "[[hello</s>]]")]
    row = {"question": "what ?", "context": "paris is the capital", "answers": {"text": ["the capital"], "answer_start": [9]}}
    spans = opened([row], tokenizer_folder=span_folder(tmp_path / "bert"), task="span")
    assert marked(pieces_of(spans, 0)) == [("model", "[CLS] what? [SEP] paris is[[ the capital]] [SEP]")]


def test_the_report_loads_no_torch():
    code = "import sys, powertrain.report.rows; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
