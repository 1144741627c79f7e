"""What is trained on, from a real token store and a real example store."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from example_folders import examples_of
from powertrain.data.example import count_blocks
from powertrain.data.store import open_store
from powertrain.facts.data import data_facts, example_facts
from powertrain.recipe import DataRecipe
from powertrain.records import IGNORE, WrongUse
from powertrain.shapes import length_quantiles, quantiles_of_counts


@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 7, 123])
@pytest.mark.parametrize(("block", "stride"), [(1, 1), (5, 5), (5, 2), (7, 123)])
def test_a_block_counts_if_its_last_target_lies_within_the_tokens(tokens, block, stride):
    starts = [i for i in range(tokens + 1) if i * stride + block + 1 <= tokens]
    assert count_blocks(tokens, block, stride) == len(starts)


@pytest.mark.parametrize(("block", "stride"), [(0, 1), (1, 0)])
def test_a_block_or_stride_of_nothing_is_refused(block, stride):
    with pytest.raises(WrongUse, match="at least 1"):
        count_blocks(10, block, stride)


def test_the_facts_are_those_of_the_store(tmp_path):
    text = "wörd and more\n" * 40
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    store = open_store(DataRecipe(source=str(tmp_path / "text.txt"), tokenizer="char", validation_split="tail"), seed=0,
                       cache=tmp_path / "cache")
    facts = data_facts(store, block=8, stride=4, train_batch_size=3)
    assert (facts.characters, facts.text_bytes) == (len(text), len(text.encode()))
    assert facts.train_tokens + facts.validation_tokens == len(text)
    assert (facts.tokenizer, facts.vocabulary) == ("char", len(set(text)))
    assert (facts.documents, facts.digest) == (1, store.digest)
    assert (facts.block, facts.stride, facts.train_batch_size, facts.redundancy) == (8, 4, 3, 2.0)
    assert facts.examples == count_blocks(facts.train_tokens, 8, 4) > 0
    assert facts.length_quantiles["max"] == facts.train_tokens
    assert 0 < facts.validation_bytes < facts.text_bytes


@pytest.fixture
def tokenizer_folder(tmp_path):
    """One token a word, with a beginning, an end and a pad token."""
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<pad>", "<unk>", *(f"w{i}" for i in range(20))])}
    library = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<s>", "</s>", "<pad>", "<unk>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"}))
    return folder


@pytest.mark.parametrize("count", [1, 2, 3, 12, 101])
def test_quantiles_of_counted_lengths_are_those_of_the_lengths(count):
    lengths = np.random.default_rng(count).integers(0, 30, count)
    assert quantiles_of_counts(np.bincount(lengths)) == length_quantiles(lengths)


def stored_examples(tmp_path, tokenizer_folder, rows, **changes):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return examples_of(tmp_path / "rows.jsonl", max_length=64, tokenizer_folder=tokenizer_folder, cache=tmp_path / "cache",
                       **changes)


def test_the_facts_of_examples_are_those_of_their_lengths(tmp_path, tokenizer_folder):
    rows = [{"prompt": " ".join(f"w{j % 20}" for j in range(1 + i % 9)), "completion": " w1 w2"} for i in range(50)]
    store = stored_examples(tmp_path, tokenizer_folder, rows, validation_share=0.2)
    facts = example_facts(store, train_batch_size=4)
    lengths = [len(example.inputs) for example in store.training]
    trained = sum(int((example.targets != IGNORE).sum()) for example in store.training)
    assert facts.block == facts.stride == math.ceil(sum(lengths) / len(lengths))
    assert (facts.train_tokens, facts.examples, facts.max_length) == (sum(lengths), len(lengths), max(lengths))
    assert facts.trained_share == pytest.approx(trained / sum(lengths))
    assert 0 < facts.trained_share < 1
    assert dict(facts.length_quantiles) == length_quantiles(lengths)
    assert facts.validation_tokens == sum(len(example.inputs) for example in store.validation) > 0
    assert (facts.kind, facts.documents, facts.train_batch_size, facts.vocabulary) == ("conversation", 50, 4, 24)
    assert (facts.digest, facts.redundancy) == (store.epoch.digest, 1.0)


def test_a_store_without_count_blocks_is_refused(tmp_path, tokenizer_folder):
    store = stored_examples(tmp_path, tokenizer_folder, [{"prompt": f"w{i}", "completion": " w2"} for i in range(4)])
    empty = replace(store, epoch=replace(store.epoch, training=store.epoch.training[:0], validation=np.arange(len(store))))
    with pytest.raises(WrongUse, match="held out"):
        example_facts(empty, train_batch_size=4)
