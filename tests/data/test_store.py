import errno
import gzip
import json
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from powertrain.data import publishing, store
from powertrain.data.documents import Document, in_batches, read_documents
from powertrain.data.publishing import is_whole, publish
from powertrain.data.store import open_store
from powertrain.recipe import DataRecipe
from powertrain.records import WrongUse

REAL_SHAKESPEARE = Path("/work/shared/data/tinyshakespeare.txt")
LINES = "".join(f"line {number} of the texte\u0301 🙂\n" for number in range(500))


@pytest.fixture
def opened(tmp_path):
    """Opens a source with the recipe's defaults, changed as asked, in this test's cache."""
    def opens(source, *, seed=42, cache=tmp_path / "cache", **changed):
        return open_store(DataRecipe(source=str(source), **changed), seed=seed, cache=cache)
    return opens


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(LINES.encode())
    return path


@pytest.fixture
def rows(tmp_path):
    """40 documents of which the longest has a character of its own."""
    path = tmp_path / "rows.jsonl"
    contents = [f"row {number}\n" + "word " * number for number in range(39)] + ["Ω" + "word " * 60]
    path.write_text("".join(json.dumps({"text": content}) + "\n" for content in contents))
    return path


@pytest.fixture
def no_building(monkeypatch):
    """Called, it makes every later build fail: what opens after that was there before."""
    def forbid():
        def refuse(*arguments):
            raise AssertionError("it was built again")
        monkeypatch.setattr(store, "_build", refuse)
    return forbid


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def held_out(store):
    return store.tokenizer.decode(np.asarray(store.validation))


def documents_of(store):
    """The ids of each document that is trained on, without the end of text."""
    tokens = np.asarray(store.train)
    ends = np.flatnonzero(tokens == store.tokenizer.end_of_text)
    return [ids[ids != store.tokenizer.end_of_text] for ids in np.split(tokens, ends)[:-1]]


# -------------------------------------------------------------------------------- what is in it


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_tokens_of_one_text_decode_to_all_of_it(opened, text, tokenizer):
    made = opened(text, tokenizer=tokenizer, validation_split="tail")
    train = made.tokenizer.decode(np.asarray(made.train))
    assert train + held_out(made) == LINES
    assert made.train.dtype == np.dtype("<u2")


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_each_document_is_followed_by_the_end_of_text(opened, rows, tokenizer, tmp_path):
    made = opened(rows, tokenizer=tokenizer)
    end = made.tokenizer.end_of_text
    sources = {document.text for document in read_documents(str(rows), cache=tmp_path)}
    assert made.train[-1] == end
    trained = {made.tokenizer.decode(ids) for ids in documents_of(made)}
    validated = set(held_out(made).split("<|endoftext|>")[:-1])
    assert trained | validated == sources
    assert not trained & validated


@pytest.mark.parametrize("split", ["seeded", "tail"])
def test_one_document_gets_no_end_of_text_wherever_it_is_cut(opened, text, split):
    made = opened(text, validation_split=split)
    assert made.tokenizer.end_of_text == 0
    assert 0 not in made.train
    assert 0 not in made.validation


def test_it_counts_what_it_holds(opened, rows, tmp_path):
    made = opened(rows)
    documents = read_documents(str(rows), cache=tmp_path)
    validation = held_out(made).replace("<|endoftext|>", "").encode()
    assert made.documents == 40
    assert made.characters == sum(len(document.text) for document in documents)
    assert made.text_bytes == sum(len(document.text.encode()) for document in documents) == made.characters + 1
    assert made.validation_bytes == len(validation) > 0
    assert made.validation_text_gzip_bytes == len(gzip.compress(validation, 9, mtime=0))
    lengths = np.array([len(ids) + 1 for ids in documents_of(made)])
    assert list(made.length_quantiles) == ["min", "p10", "p50", "p90", "max"]
    assert made.length_quantiles["min"] == lengths.min()
    assert made.length_quantiles["max"] == lengths.max()
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        assert abs(np.mean(lengths <= made.length_quantiles[name]) - share) <= 1 / len(lengths)


def test_char_knows_characters_that_only_validate(opened, tmp_path):
    path = tmp_path / "end.txt"
    path.write_text("abc" * 100 + "Ω")
    made = opened(path, tokenizer="char", validation_split="tail")
    assert held_out(made).endswith("Ω")


def test_bpe_learns_nothing_from_what_validates(opened, tmp_path):
    path = tmp_path / "end.txt"
    path.write_text("".join(f"{number} " for number in range(900)) + "zqzqzq" * 60)
    made = opened(path, validation_split="tail")
    assert "zqzq" in held_out(made)
    assert not any("zq" in token for token in made.tokenizer.library.get_vocab())


def test_no_validation_is_an_empty_side(opened, text):
    made = opened(text, validation_share=0.0)
    assert (len(made.validation), made.validation_bytes, held_out(made)) == (0, 0, "")
    assert made.tokenizer.decode(np.asarray(made.train)) == LINES


@pytest.mark.skipif(not REAL_SHAKESPEARE.exists(), reason="the real text is not on this machine")
def test_shakespeare_has_nanogpts_tokens(opened):
    made = opened(REAL_SHAKESPEARE, tokenizer="char", validation_split="tail")
    assert (made.tokenizer.vocabulary, len(made.train), len(made.validation)) == (65, 1_003_854, 111_540)


def test_the_standard_library_is_a_store(opened):
    made = opened("stdlib", max_chars=400_000, vocabulary=1000)
    assert made.characters == 400_000
    assert made.tokenizer.vocabulary == 1000
    assert len(made.train) > 50_000


def test_a_folder_tokenizer_is_kept_beside_the_tokens(opened, text, tmp_path):
    trained = opened(text)
    trained.tokenizer.save(tmp_path / "theirs")
    (tmp_path / "theirs" / "powertrain_tokenizer.json").unlink()
    made = opened(text, tokenizer=str(tmp_path / "theirs"))
    shutil.rmtree(tmp_path / "theirs")
    assert made.tokenizer.kind == "folder"
    np.testing.assert_array_equal(made.train, trained.train)


def test_large_vocabularies_are_stored_in_four_bytes(opened, text, tmp_path):
    opened(text).tokenizer.save(tmp_path / "wide")
    (tmp_path / "wide" / "powertrain_tokenizer.json").unlink()
    content = json.loads((tmp_path / "wide" / "tokenizer.json").read_text())
    content["model"]["vocab"]["<|far|>"] = 70_000
    content["added_tokens"].append({**content["added_tokens"][0], "id": 70_000, "content": "<|far|>"})
    (tmp_path / "wide" / "tokenizer.json").write_text(json.dumps(content))
    made = opened(text, tokenizer=str(tmp_path / "wide"))
    assert made.train.dtype == np.dtype("<u4")
    assert made.tokenizer.vocabulary == 70_001


def test_batches_keep_the_order_and_every_item(monkeypatch):
    monkeypatch.setattr("powertrain.data.documents.BATCH_CHARS", 5)
    assert list(in_batches(["ab", "cde", "f", "ghijkl", "m"], len)) == [["ab", "cde"], ["f", "ghijkl"], ["m"]]


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
@pytest.mark.parametrize("source", ["text", "rows"])
def test_small_pieces_and_batches_give_the_same_tokens(opened, request, source, tokenizer, monkeypatch, tmp_path):
    path = request.getfixturevalue(source)
    one = opened(path, tokenizer=tokenizer)
    monkeypatch.setattr("powertrain.data.documents.BATCH_CHARS", 7)
    monkeypatch.setattr("powertrain.data.documents.PIECE_BYTES", 11)
    monkeypatch.setattr("powertrain.data.tokenizers.PIECE_CHARS", 40)
    other = opened(path, tokenizer=tokenizer, cache=tmp_path / "other")
    np.testing.assert_array_equal(one.train, other.train)
    np.testing.assert_array_equal(one.validation, other.validation)
    assert replace(one, folder=0, train=0, validation=0, tokenizer=0).__dict__ == \
        replace(other, folder=0, train=0, validation=0, tokenizer=0).__dict__


def test_a_text_is_never_held_as_a_whole(opened, monkeypatch, tmp_path):
    monkeypatch.setattr("powertrain.data.documents.BATCH_CHARS", 1 << 16)
    monkeypatch.setattr("powertrain.data.documents.PIECE_BYTES", 1 << 16)
    path = tmp_path / "long.txt"
    path.write_text(LINES * 1000)
    opened(path, tokenizer="byte", cache=tmp_path / "first")       # what is loaded once
    tracemalloc.start()
    made = opened(path, tokenizer="byte")
    held_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held_bytes < 4 << 20 < 12 << 20 < made.text_bytes


# -------------------------------------------------------------------------------- built once


def test_the_second_open_reads_what_the_first_wrote(opened, text, tmp_path, no_building):
    first = opened(text)
    before = inodes(tmp_path / "cache")
    no_building()
    second = opened(text)
    assert inodes(tmp_path / "cache") == before
    np.testing.assert_array_equal(first.train, second.train)
    for side in (second.train, second.validation):
        assert isinstance(side.base, np.memmap)
        assert not side.flags.writeable
    assert replace(first, train=0, validation=0, tokenizer=0).__dict__ == \
        replace(second, train=0, validation=0, tokenizer=0).__dict__


@pytest.mark.parametrize("changed", [
    {"tokenizer": "char"}, {"tokenizer": "byte"}, {"vocabulary": 300}, {"seed": 43}, {"validation_share": 0.2},
    {"validation_split": "tail"}, {"max_chars": 5000},
])
def test_every_setting_that_decides_the_tokens_has_a_store_of_its_own(opened, text, changed):
    assert opened(text, **changed).folder != opened(text).folder


def test_changed_text_has_a_store_of_its_own(opened, text):
    before = opened(text)
    text.write_bytes(LINES.encode() + b"more\n")
    after = opened(text)
    assert before.digest != after.digest
    assert before.folder != after.folder


def test_a_changed_tokenizer_folder_has_a_store_of_its_own(opened, text, tmp_path):
    opened(text).tokenizer.save(tmp_path / "theirs")
    before = opened(text, tokenizer=str(tmp_path / "theirs"))
    (tmp_path / "theirs" / "tokenizer_config.json").write_text("{}")
    after = opened(text, tokenizer=str(tmp_path / "theirs"))
    assert before.folder != after.folder


def test_the_seed_of_a_tail_split_and_the_default_vocabulary_change_nothing(opened, text, no_building):
    opened(text, validation_split="tail")
    no_building()
    opened(text, validation_split="tail", seed=43, vocabulary=4096)


# -------------------------------------------------------------------------------- damage, crashes, races


@pytest.mark.parametrize("name", ["train.bin", "validation.bin",
                                  "tokenizer/tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_store_is_built_again(opened, text, name, damage):
    first = opened(text)
    whole = np.array(first.train)
    path = first.folder / name
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    if name == "meta.json" and damage == "cut":
        path.write_text(path.read_text()[:40])
    assert not is_whole(first.folder)
    again = opened(text)
    assert is_whole(again.folder)
    np.testing.assert_array_equal(again.train, whole)
    assert [entry.name for entry in again.folder.parent.iterdir()] == [again.folder.name]


def test_of_a_large_file_some_pieces_are_read_and_others_the_next_time(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "PIECE_BYTES", 100)
    folder = tmp_path / "store"
    publish(folder, lambda building: {"bytes": (building / "large.bin").write_bytes(bytes(range(250)) * 20)})
    assert is_whole(folder)
    content = bytearray((folder / "large.bin").read_bytes())
    content[777] ^= 1
    (folder / "large.bin").write_bytes(content)
    seen = [is_whole(folder) for _ in range(200)]
    assert 2 < seen.count(False) < 60        # 4 of 50 pieces each time
    (folder / "large.bin").write_bytes(content[:-1])
    assert not is_whole(folder)


def test_a_damaged_folder_is_replaced_also_where_few_of_its_pieces_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "PIECE_BYTES", 100)
    folder, content = tmp_path / "store", bytes(range(250)) * 20
    for attempt in range(5):
        publish(folder, lambda building: {"bytes": (building / "large.bin").write_bytes(content)})
        assert (folder / "large.bin").read_bytes() == content, attempt
        (folder / "large.bin").write_bytes(content[:777] + b"!" + content[778:])


def test_text_that_changes_while_it_is_stored_is_refused_and_nothing_is_kept(opened, text, monkeypatch, tmp_path):
    append = store.TokenWriter.append

    def other_text(*arguments):
        append(*arguments)
        text.write_bytes(LINES.upper().encode())         # of the same length

    with monkeypatch.context() as patched:
        patched.setattr(store.TokenWriter, "append", other_text)
        with pytest.raises(WrongUse, match=r"text\.txt changed while it was read; start again"):
            opened(text)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_what_a_crash_left_is_not_used(opened, text, monkeypatch):
    def crash(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(publishing, "_replace", crash)
    monkeypatch.setattr(publishing.shutil, "rmtree", lambda *arguments, **options: None)
    with pytest.raises(KeyboardInterrupt):
        opened(text)
    monkeypatch.undo()
    made = opened(text)
    leftovers = [entry for entry in made.folder.parent.iterdir() if entry != made.folder]
    assert len(leftovers) == 1
    assert leftovers[0].name.startswith(".building-")
    assert is_whole(made.folder)


def test_an_interrupted_build_leaves_nothing(opened, text, monkeypatch, tmp_path):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.TokenWriter, "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        opened(text)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_the_loser_of_a_race_uses_the_winners_folder(tmp_path):
    folder = tmp_path / "tokens" / "key"

    def winner(building):
        (building / "who").write_text("winner")
        return {}

    def loser(building):
        (building / "who").write_text("the loser")
        publish(folder, winner)
        return {}

    publish(folder, loser)
    assert (folder / "who").read_text() == "winner"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_winner_that_appears_at_the_last_moment_stays(tmp_path, monkeypatch):
    folder = tmp_path / "tokens" / "key"

    def late(*arguments, **options):         # as the loser has just removed the folder that was there
        monkeypatch.undo()
        publish(folder, lambda building: {"who": "winner"})

    monkeypatch.setattr(publishing.shutil, "rmtree", late)
    publish(folder, lambda building: {"who": "loser"})
    assert publishing.read_meta(folder)["who"] == "winner"
    assert list(folder.parent.iterdir()) == [folder]


# -------------------------------------------------------------------------------- refusals


def test_a_cache_that_cannot_be_written_is_named(opened, text, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(WrongUse, match=f"the token cache {tmp_path / 'file' / 'tokens'} cannot be written: "):
        opened(text, cache=tmp_path / "file")


def test_a_full_disk_is_named_and_leaves_nothing(opened, text, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.TokenWriter, "append", full)
    with pytest.raises(WrongUse, match="cannot be written: No space left on device; free space there"):
        opened(text)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_tokenizer_that_cannot_be_made_is_refused_before_the_source_is_read(opened, monkeypatch):
    monkeypatch.setattr(store.Texts, "__iter__", lambda texts: pytest.fail("the source was read"))
    with pytest.raises(WrongUse, match="did you mean char"):
        opened("stdlib", tokenizer="chars")


def test_documents_are_values():
    assert Document("a", "b") == Document("a", "b")
