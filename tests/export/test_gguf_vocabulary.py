"""Tokenizers in GGUF: llama.cpp's two kinds, and what neither of them can do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from powertrain.data.tokenizers import FolderTokenizer, make_tokenizer
from powertrain.export.gguf_vocabulary import _LLAMA3, BYTE, CONTROL, SAMPLES, USER_DEFINED, read_vocabulary, sentencepiece_ids
from powertrain.records import WrongUse

TEXT = [*SAMPLES, "the sum of the numbers is the answer to the question", "lower lowest newer newest wider widest"] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]


def saved(library: Tokenizer, folder: Path, **config: object) -> FolderTokenizer:
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return FolderTokenizer.load(folder)


def sentencepiece(*, prefix: bool = True, complete: bool = True, byte_fallback: bool = True) -> Tokenizer:
    """As transformers converts Llama 2's: every way to make a token of two is a merge, ranked by the token made."""
    plain = Tokenizer(models.BPE(unk_token="<unk>"))
    plain.normalizer = normalizers.Replace(" ", "\u2581")
    plain.train_from_iterator(TEXT * 3, trainers.BpeTrainer(vocab_size=420, show_progress=False))
    trained = json.loads(plain.to_str())["model"]
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [word for word in trained["vocab"] if word not in SPECIAL]
    rows = {word: row for row, word in enumerate(words)}
    made = [left + right for left, right in trained["merges"]]
    merges = [(word[:cut], word[cut:]) for word in made for cut in range(1, len(word))
              if word[:cut] in rows and word[cut:] in rows]
    if not complete:                         # llama.cpp would still merge "t" and "he"
        merges = [tuple(pair) for pair in trained["merges"]]
    library = Tokenizer(models.BPE(rows, merges, unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True))
    replace = normalizers.Replace(" ", "\u2581")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix else replace
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(SPECIAL)
    return library


def byte_level(*partings: pre_tokenizers.PreTokenizer, ignore_merges: bool = False) -> Tokenizer:
    library = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    library.pre_tokenizer = pre_tokenizers.Sequence(list(partings))
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(TEXT * 3, trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return library


INNER = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
OUTER = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(("partings", "pre"), [
    ([OUTER], "gpt-2"), ([pre_tokenizers.Digits(individual_digits=True), OUTER], "smollm"),
    ([pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), INNER], "llama-bpe"),
    ([pre_tokenizers.Split(Regex(_LLAMA3.replace("{1,3}", "")), "isolated"), INNER], "qwen2"),
])
def test_ways_to_part_text_have_llama_cpps_names(partings: list[pre_tokenizers.PreTokenizer], pre: str, tmp_path: Path) -> None:
    tokenizer = saved(byte_level(*partings, ignore_merges=pre == "llama-bpe"), tmp_path, eos_token="<|end|>")
    found = read_vocabulary(tokenizer, 410)
    assert (found.model, found.pre, found.special, found.add_bos) == ("gpt2", pre, {"eos": 0, "bos": 0}, False)
    assert found.kinds[0] == CONTROL
    assert len(found.tokens) == len(found.kinds) == 410
    assert found.merges[0].count(" ") == 1


def test_a_pattern_without_a_name_is_refused(tmp_path: Path) -> None:
    tokenizer = saved(byte_level(pre_tokenizers.Split(Regex(r"\s+|\w"), "isolated"), INNER), tmp_path)
    with pytest.raises(WrongUse, match="has none for this one"):
        read_vocabulary(tokenizer, 410)
    tokenizer = saved(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)), tmp_path)
    with pytest.raises(WrongUse, match="has none for this one"):
        read_vocabulary(tokenizer, 410)


def test_ids_that_would_differ_are_refused(tmp_path: Path) -> None:
    """The pattern is Llama 3's, but llama.cpp then takes a word that is a token as it is, and this tokenizer merges."""
    library = byte_level(pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), INNER)
    state = json.loads(library.to_str())
    state["model"]["vocab"]["Ġquick"] = 400
    if "Ġquick" in json.loads(library.to_str())["model"]["vocab"]:
        pytest.fail("the word was a token already, so the test would show nothing")
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(WrongUse, match="would read"):
        read_vocabulary(FolderTokenizer.load(tmp_path), 410)


def test_normalised_text_is_said_to_differ(tmp_path: Path) -> None:
    library = byte_level(OUTER)
    library.normalizer = normalizers.NFC()
    assert "does not normalise" in read_vocabulary(saved(library, tmp_path), 410).notes[0]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_has_scores_and_bytes(prefix: bool, tmp_path: Path) -> None:
    library = sentencepiece(prefix=prefix)
    library.add_tokens(["<tool>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = saved(library, tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, unk_token="<unk>")
    rows = tokenizer.vocabulary + 3
    found = read_vocabulary(tokenizer, rows, stops=[2, rows - 4], chat_template="t")
    assert (found.model, found.pre, found.add_bos, found.add_space_prefix) == ("llama", "default", True, prefix)
    assert found.special == {"bos": 1, "eos": 2, "unknown": 0, "eot": rows - 4}
    assert found.kinds[3:259] == [BYTE] * 256
    assert found.kinds[found.tokens.index("<tool>")] == USER_DEFINED
    assert found.metadata()["tokenizer.ggml.scores"] == list(found.scores)
    text = "the newest answer, 漢字"
    assert sentencepiece_ids(found, text) == tokenizer.encode(text).tolist()


def test_merges_that_scores_cannot_tell_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"makes .* and this tokenizer does not"):
        read_vocabulary(saved(sentencepiece(complete=False), tmp_path), 800)
    with pytest.raises(WrongUse, match="falls back to bytes"):
        read_vocabulary(saved(sentencepiece(byte_fallback=False), tmp_path), 800)


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_tables_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=f"{kind} tokenizer.*--to merged"):
        read_vocabulary(make_tokenizer(kind, ["abc"]), 300)
    make_tokenizer(kind, ["abc"]).save(tmp_path)
    with pytest.raises(WrongUse, match="the kind WordLevel" if kind == "char" else "has none"):
        read_vocabulary(FolderTokenizer.load(tmp_path), 300)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="the kind Unigram"):
        read_vocabulary(saved(Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], unk_id=0)), tmp_path), 300)


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="a token 399 and the embedding 300 rows"):
        read_vocabulary(saved(byte_level(OUTER), tmp_path), 300)
