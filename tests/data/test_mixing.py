"""Mixing by tokens, as a file and as shares of a recipe."""

import json
import re

import numpy as np
import pytest

from example_folders import chat_folder, examples_of, json_lines
from powertrain.data.mixing import mix
from powertrain.data.order import draw_tokens
from powertrain.recipe import resolve_words
from powertrain.records import WrongUse


@pytest.fixture
def sources(tmp_path):
    """Texts of two kinds: 60 long ones and 200 short ones."""
    return [str(json_lines(tmp_path / "long.jsonl", [{"text": f"long {'the cat ' * (5 + n % 7)}{n}"} for n in range(60)])),
            str(json_lines(tmp_path / "short.jsonl", [{"text": f"short {'mat ' * (n % 3)}{n}"} for n in range(200)]))]


def mixed(tmp_path, sources, weights, name="out.jsonl", **options):
    parts = mix(tmp_path / name, sources, weights, tokenizer_folder=chat_folder(tmp_path / "model"), cache=tmp_path, **options)
    return parts, [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()]


def test_the_shares_are_of_the_tokens_and_no_row_is_there_twice(tmp_path, sources):
    parts, texts = mixed(tmp_path, sources, [0.7, 0.3])
    total = sum(part.tokens for part in parts)
    assert parts[0].tokens / total == pytest.approx(0.7, abs=0.01)
    assert len(set(texts)) == len(texts) == sum(part.rows for part in parts)
    assert max(part.passes for part in parts) == pytest.approx(1, abs=0.01)       # as many as the scarcest source allows
    record = json.loads((tmp_path / "out.jsonl.mix.json").read_text())
    assert [entry["tokens"] for entry in record["sources"]] == [part.tokens for part in parts]
    half = texts[:len(texts) // 2]                                 # every stretch has about the same mixture
    assert sum(text.startswith("long") for text in half) == pytest.approx(parts[0].rows / 2, abs=2)


def test_the_seed_decides_the_rows_and_tokens_limit_them(tmp_path, sources):
    same = [mixed(tmp_path, sources, [0.5, 0.5], f"{name}.jsonl", tokens=400, seed=seed)[1]
            for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert same[0] == same[1] != same[2]
    parts, _ = mixed(tmp_path, sources, [0.5, 0.5], "d.jsonl", tokens=400)
    assert sum(part.tokens for part in parts) == pytest.approx(400, abs=20)


def test_a_small_source_repeats_only_if_that_is_asked(tmp_path, sources):
    with pytest.raises(WrongUse, match=r"long.jsonl has .* tokens, and a weight of 0.9 of 50,000 takes 45,000; use --tokens"):
        mixed(tmp_path, sources, [0.9, 0.1], tokens=50_000)
    parts, texts = mixed(tmp_path, sources, [0.9, 0.1], tokens=5_000, repeat=True)
    assert parts[0].passes > 2
    assert sum(part.tokens for part in parts) == pytest.approx(5_000, rel=0.01)
    counts = np.unique([text for text in texts if text.startswith("long")], return_counts=True)[1]
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize(("weights", "says"), [
    ([0.5, 0.3], r"weights sum to 0.8, and shares of the tokens sum to 1; in this proportion they are 0.625, 0.375"),
    ([1.5, -0.5], "weights has 1.5, and a share of the tokens is above 0"), ([1.0], "weights has 1 numbers for 2 sources")])
def test_weights_that_are_no_shares_are_refused(tmp_path, sources, weights, says):
    with pytest.raises(WrongUse, match=says):
        mixed(tmp_path, sources, weights)
    assert not (tmp_path / "out.jsonl").exists()


def test_sources_of_two_shapes_are_not_one_file(tmp_path, sources):
    chats = str(json_lines(tmp_path / "chat.jsonl", [{"question": "u", "answer": "a"}]))
    with pytest.raises(WrongUse, match=r"holds a text per row and .* a conversation"):
        mixed(tmp_path, [sources[0], chats], [0.5, 0.5])
    alpaca = str(json_lines(tmp_path / "alpaca.jsonl", [{"instruction": "u", "output": "a"}]))
    with pytest.raises(WrongUse, match="bring both to one shape first: powertrain data convert"):
        mixed(tmp_path, [chats, alpaca], [0.5, 0.5])


def test_draws_come_as_near_to_the_tokens_as_whole_examples_allow():
    lengths = np.array([5, 1, 7, 3, 9, 2], dtype=np.int64)
    for wanted in (0, 4, 13, 27, 60):
        times = draw_tokens(lengths, wanted, 3, 1)
        assert abs(int((times * lengths).sum()) - wanted) <= 5
        assert times.max() - times.min() <= 1


def test_shares_of_a_recipe_replay_general_text_beside_the_new_text(tmp_path, sources):
    folder = chat_folder(tmp_path / "model")
    store = examples_of(*sources, shares=[0.8, 0.2], tokenizer_folder=folder, cache=tmp_path / "cache", max_length=64)
    epoch = store.epoch.training
    first = store.lengths[epoch[epoch < 60]].sum()
    assert first / store.lengths[epoch].sum() == pytest.approx(0.8, abs=0.01)
    new = np.flatnonzero(~store.in_validation[:60])
    assert sorted(epoch[epoch < 60].tolist()) == new.tolist()      # the new text once
    assert re.search(r"long.jsonl (79|80).*, 1.00 times its own .*short.jsonl (19|20)", store.said[-1])
    again = examples_of(*sources, shares=[0.8, 0.2], tokenizer_folder=folder, cache=tmp_path / "cache", max_length=64)
    assert (again.epoch.training == epoch).all()
    scarce = examples_of(*sources[::-1], shares=[0.2, 0.8], tokenizer_folder=folder, cache=tmp_path / "cache", max_length=64)
    of_long = np.bincount(scarce.epoch.training, minlength=260)[200:]
    assert of_long[~scarce.in_validation[200:]].min() >= 1         # a source that is too small comes several times
    assert of_long.max() > 1


@pytest.mark.parametrize(("options", "says"), [
    ({"shares": [0.5, 0.2]}, r"data.shares sum to 0.7"), ({"shares": [1.0]}, "data.shares has 1 numbers for 2 sources"),
    ({"shares": [0.5, 0.5], "weights": [1.0, 1.0]}, "data.weights and data.shares both say")])
def test_shares_that_cannot_be_used_are_refused(tmp_path, sources, options, says):
    with pytest.raises(WrongUse, match=says):
        examples_of(*sources, tokenizer_folder=chat_folder(tmp_path / "model"), cache=tmp_path / "cache", max_length=64,
                    **options)


def test_shares_are_a_key_of_a_recipe():
    assert resolve_words(["data.source=[a, b]", "data.shares=[0.9, 0.1]"]).recipe.data.shares == [0.9, 0.1]
