"""What is trained on, from a real token store."""

import pytest

from powertrain.data.store import open_store
from powertrain.facts.data import data_facts, training_examples
from powertrain.records import WrongUse


@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 7, 123])
@pytest.mark.parametrize(("block", "stride"), [(1, 1), (5, 5), (5, 2), (7, 123)])
def test_a_block_counts_if_its_last_target_lies_within_the_tokens(tokens, block, stride):
    starts = [i for i in range(tokens + 1) if i * stride + block + 1 <= tokens]
    assert training_examples(tokens, block, stride) == len(starts)


@pytest.mark.parametrize(("block", "stride"), [(0, 1), (1, 0)])
def test_a_block_or_stride_of_nothing_is_refused(block, stride):
    with pytest.raises(WrongUse, match="at least 1"):
        training_examples(10, block, stride)


def test_the_facts_are_those_of_the_store(tmp_path):
    text = "wörd and more\n" * 40
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    store = open_store(str(tmp_path / "text.txt"), tokenizer="char", vocabulary=None, text_field="text", max_chars=None,
                       validation_share=0.1, validation_split="tail", seed=0, cache=tmp_path / "cache")
    facts = data_facts(store, block=8, stride=4, train_batch_size=3)
    assert (facts.characters, facts.text_bytes) == (len(text), len(text.encode()))
    assert facts.train_tokens + facts.validation_tokens == len(text)
    assert (facts.tokenizer, facts.vocabulary) == ("char", len(set(text)))
    assert (facts.documents, facts.digest) == (1, store.digest)
    assert (facts.block, facts.stride, facts.train_batch_size, facts.redundancy) == (8, 4, 3, 2.0)
    assert facts.examples == training_examples(facts.train_tokens, 8, 4) > 0
    assert facts.length_quantiles["max"] == facts.train_tokens
    assert 0 < facts.validation_bytes < facts.text_bytes
