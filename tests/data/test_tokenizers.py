import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from powertrain.data.tokenizers import PIECE_CHARS, exact_pieces, load_tokenizer, make_tokenizer, token_dtype
from powertrain.records import WrongUse

END = "<|endoftext|>"
SAMPLE = ("First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 3
          + "  two  spaces\t\ttabs \r\n\r\n  naïve café 日本語 🙂 e\u0301 ▁Ġ ''s don't 12345 x=1;\u00a0\u2028end \n")
AWKWARD = ["", " ", "\n", "\n\n\n", "a", "  a  ", " a\r\nb\t", "First\n\n\nSpeak ", "🙂🙂", "e\u0301é", "日本 語",
           SAMPLE, "Speak" + END + "speak", END, "don't 12345"]

texts = st.text(st.characters(exclude_categories=["Cs"]))
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(kind, vocabulary=None):
    return make_tokenizer(kind, [SAMPLE, *filter(None, AWKWARD)], vocabulary, several=True)


@pytest.fixture(scope="module")
def bpe():
    return make("bpe", 400)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Our three kinds, each with what transformers opens from its folder, also beside a model's config."""
    from transformers import AutoConfig, AutoTokenizer

    pairs = {}
    for kind in ("char", "byte", "bpe"):
        ours = make(kind, 400 if kind == "bpe" else None)
        folder = tmp_path_factory.mktemp(kind)
        ours.save(folder)
        AutoConfig.for_model("llama").save_pretrained(folder)
        pairs[kind] = ours, AutoTokenizer.from_pretrained(folder), folder
    return pairs


# -------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("text", AWKWARD)
def test_text_survives_encoding_and_decoding(kind, text):
    tokenizer = make(kind)
    ids = tokenizer.encode(text)
    assert ids.ndim == 1
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text


@quick
@given(text=texts)
def test_any_text_survives_bpe_and_byte(bpe, text):
    for tokenizer in (bpe, make_tokenizer("byte", [])):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@quick
@given(text=texts)
def test_any_text_survives_char_made_from_it(text):
    tokenizer = make_tokenizer("char", [text])
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_many_texts_encode_as_one_by_one(kind):
    tokenizer = make(kind)
    for text, ids in zip(AWKWARD, tokenizer.encode_many(AWKWARD), strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert tokenizer.encode_many([]) == []


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_the_end_of_text_decodes_to_its_name_between_texts(kind):
    tokenizer = make(kind)
    end = [tokenizer.end_of_text]
    ids = np.concatenate([end, tokenizer.encode("a"), end, end, tokenizer.encode("🙂"), end])
    assert tokenizer.decode(ids) == f"{END}a{END}{END}🙂{END}"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_text_that_spells_the_end_of_text_does_not_become_it(kind):
    tokenizer = make(kind)
    assert tokenizer.end_of_text not in tokenizer.encode("a" + END + "b")


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_a_token_outside_the_vocabulary_is_refused(kind):
    tokenizer = make(kind)
    with pytest.raises(WrongUse, match=f"token {tokenizer.vocabulary} is outside this tokenizer's vocabulary"):
        tokenizer.decode([0, tokenizer.vocabulary])


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_half_a_surrogate_pair_is_refused(kind):
    with pytest.raises(WrongUse, match=r"the lone surrogate \\ud800 at position 2"):
        make(kind).encode("ab\ud800")


# -------------------------------------------------------------------------------- char and byte


def test_char_ids_are_ranks_of_sorted_characters():
    tokenizer = make_tokenizer("char", ["hello\n"])
    assert tokenizer.vocabulary == 5
    assert tokenizer.encode("\nehlo").tolist() == [0, 1, 2, 3, 4]


def test_char_has_an_end_of_text_only_for_several_documents():
    assert make_tokenizer("char", ["ab"]).end_of_text is None
    several = make_tokenizer("char", ["a", "b"], several=True)
    assert (several.end_of_text, several.vocabulary) == (2, 3)


@pytest.mark.parametrize("unknown", ["A", "~", "🙂", "\ud800"])
def test_an_unknown_character_is_refused_by_name(unknown):
    tokenizer = make_tokenizer("char", ["BCxyz"])
    with pytest.raises(WrongUse) as caught:
        tokenizer.encode("xy" + unknown)
    assert f"the character {unknown!r} (U+{ord(unknown):04X}) at position 2 is not among the 5" in str(caught.value)
    assert "data.tokenizer=byte or bpe" in str(caught.value)


def test_bytes_that_are_no_text_decode_to_the_replacement_character():
    assert make_tokenizer("byte", []).decode([0xE6, 0x97, 256, 65]) == f"\ufffd{END}A"


# -------------------------------------------------------------------------------- bpe


def test_bpe_is_the_same_from_the_same_texts_and_differs_from_others():
    again = [make("bpe", 300), make("bpe", 300), make_tokenizer("bpe", [SAMPLE + " abab" * 99], 300)]
    assert again[0].library.to_str() == again[1].library.to_str() != again[2].library.to_str()
    assert again[0].vocabulary == 300


def test_bpe_never_learns_a_pair_that_occurs_once():
    assert make_tokenizer("bpe", ["abcdefgh"]).vocabulary == 257


@quick
@given(text=st.text(st.sampled_from(list("ab1 '\n\n\r\t.\u2028🙂s")), max_size=80))
def test_pieces_of_a_text_encode_as_the_whole(bpe, text):
    whole = bpe.library.encode(text, add_special_tokens=False).ids
    cuts = [i for i in range(1, len(text)) if text[i] == "\n" and not text[i - 1].isspace()]
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert [token for piece in pieces for token in bpe.library.encode(piece, add_special_tokens=False).ids] == whole


def test_a_long_text_is_cut_in_pieces_and_encodes_as_the_whole(bpe):
    text = SAMPLE * (3 * PIECE_CHARS // len(SAMPLE))
    assert len(exact_pieces(text)) > 1
    assert "".join(exact_pieces(text)) == text
    assert bpe.encode(text).tolist() == bpe.library.encode(text, add_special_tokens=False).ids


def test_a_long_text_without_lines_stays_whole():
    assert len(exact_pieces(" \n" * PIECE_CHARS)) == 1


@pytest.mark.parametrize(("kind", "vocabulary", "sentence"), [
    ("bpe", 256, "data.vocabulary=256: a bpe tokenizer needs 256 bytes and the end of text; use 257 or more"),
    ("char", 99, "data.vocabulary=99 is the size of a bpe tokenizer trained here, and data.tokenizer=char has its own"),
    ("bpee", None, "data.tokenizer=bpee is neither char, byte, bpe nor a folder; did you mean bpe?"),
    ("nowhere/at/all", None, "nor a folder; give one of these, or the folder that has its tokenizer.json"),
])
def test_a_tokenizer_that_cannot_be_made_is_refused(kind, vocabulary, sentence):
    with pytest.raises(WrongUse) as caught:
        make_tokenizer(kind, ["text"], vocabulary)
    assert sentence in str(caught.value)


def test_ids_are_stored_in_two_bytes_as_long_as_they_fit():
    assert token_dtype(65536) == np.dtype("<u2")
    assert token_dtype(65537) == np.dtype("<u4")


# -------------------------------------------------------------------------------- saved, and opened by others


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("text", AWKWARD)
def test_transformers_opens_it_with_equal_ids_and_equal_text(opened, kind, text):
    ours, theirs, _ = opened[kind]
    ids = ours.encode(text).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode([*ids, ours.end_of_text, *ids]) == ours.decode([*ids, ours.end_of_text, *ids])


@quick
@given(text=texts)
def test_transformers_gives_equal_ids_for_any_text(opened, text):
    for kind in ("byte", "bpe"):
        ours, theirs, _ = opened[kind]
        assert theirs(text)["input_ids"] == ours.encode(text).tolist()


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_transformers_knows_the_end_of_text_and_the_vocabulary(opened, kind):
    ours, theirs, _ = opened[kind]
    assert theirs.eos_token_id == ours.end_of_text
    assert len(theirs) == ours.vocabulary


@pytest.mark.parametrize("ids", [[0xE6, 0x97], [0xF0, 0x9F, 65], [0xFF, 0xC0, 256, 0x80], [0xED, 0xA0, 0x80]])
def test_bytes_that_are_no_text_decode_as_in_transformers(opened, ids):
    ours, theirs, _ = opened["byte"]
    assert theirs.decode(ids) == ours.decode(ids)


def test_char_without_end_of_text_gains_none_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    ours = make_tokenizer("char", [SAMPLE])
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token_id, len(theirs)) == (None, ours.vocabulary)


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_a_saved_tokenizer_reopens_as_its_kind(opened, kind):
    ours, _, folder = opened[kind]
    again = load_tokenizer(folder)
    assert (again.kind, again.vocabulary) == (kind, ours.vocabulary)
    assert again.end_of_text == ours.end_of_text
    np.testing.assert_array_equal(again.encode(SAMPLE + END), ours.encode(SAMPLE + END))


# -------------------------------------------------------------------------------- Hugging Face folders


@pytest.fixture
def folder(bpe, tmp_path):
    """A Hugging Face folder as others write it: truncating, with tokens around the text, beside weights."""
    from tokenizers import Tokenizer, processors

    library = Tokenizer.from_str(bpe.library.to_str())
    library.post_processor = processors.TemplateProcessing(single=f"{END} $A {END}", special_tokens=[(END, 0)])
    library.enable_truncation(8)
    library.enable_padding(length=99)
    folder = tmp_path / "theirs"
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": END, "__type": "AddedToken"}}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_folder_encodes_whole_texts_and_nothing_around_them(folder, bpe):
    theirs = make_tokenizer(str(folder), ["unused"])
    assert (theirs.kind, theirs.end_of_text, theirs.vocabulary) == ("folder", 0, bpe.vocabulary)
    np.testing.assert_array_equal(theirs.encode(SAMPLE), bpe.encode(SAMPLE))
    assert theirs.decode(theirs.encode(SAMPLE)) == SAMPLE


def test_a_folder_keeps_its_own_rule_for_special_tokens(folder):
    from transformers import AutoTokenizer

    text = f"Speak{END}speak"
    expected = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False, truncation=False)["input_ids"]
    assert make_tokenizer(str(folder), []).encode(text).tolist() == expected
    assert 0 in expected


def test_a_folder_is_saved_verbatim_without_its_weights(folder, tmp_path):
    theirs = make_tokenizer(str(folder), [])
    theirs.save(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy")
    assert (again.kind, again.digest, again.end_of_text) == ("folder", theirs.digest, 0)
    assert not (tmp_path / "copy" / "model.safetensors").exists()
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_folder_without_an_end_of_text_has_none(folder):
    (folder / "tokenizer_config.json").unlink()
    assert make_tokenizer(str(folder), []).end_of_text is None


def test_a_folder_with_gaps_in_its_ids_counts_up_to_the_highest(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 1000, "content": "<|far|>"})
    content["model"]["vocab"]["<|far|>"] = 1000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert make_tokenizer(str(folder), []).vocabulary == 1001


def test_a_folder_of_the_older_format_is_converted(bpe, tmp_path):
    folder = tmp_path / "older"
    folder.mkdir()
    bpe.library.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": END, "bos_token": END, "unk_token": END}))
    assert sorted(path.name for path in folder.iterdir()) == ["merges.txt", "tokenizer_config.json", "vocab.json"]
    theirs = make_tokenizer(str(folder), [])
    np.testing.assert_array_equal(theirs.encode(SAMPLE), bpe.encode(SAMPLE))
    assert theirs.end_of_text == 0


def test_folders_that_hold_no_usable_tokenizer_are_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(WrongUse, match=r"empty holds no tokenizer: none of tokenizer\.json"):
        make_tokenizer(str(tmp_path / "empty"), [])
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(WrongUse, match="cannot be opened as a tokenizer"):
        make_tokenizer(str(folder), [])
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{")
    with pytest.raises(WrongUse, match="transformers cannot convert what it has"):
        make_tokenizer(str(folder), [])


def test_a_damaged_or_unknown_marker_is_refused(opened, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(opened["char"][2], folder)
    (folder / "powertrain_tokenizer.json").write_text('{"kind": "syllable"}')
    with pytest.raises(WrongUse, match="asks for the tokenizer 'syllable', which this version does not know"):
        load_tokenizer(folder)
    (folder / "powertrain_tokenizer.json").write_text("{")
    with pytest.raises(WrongUse, match=r"powertrain_tokenizer.json is not whole JSON"):
        load_tokenizer(folder)
