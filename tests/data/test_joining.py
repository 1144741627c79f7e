"""Shards of several machines, joined: the store of one machine to the byte, or a sentence that says which shard is wrong."""

import csv
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_folders import INST, chat_folder, examples_of, json_lines, seq2seq_folder, span_folder
from powertrain.data import documents, shards, store
from powertrain.data.examples import making
from powertrain.data.examples.store import shard_examples
from powertrain.data.joining import join_shards
from powertrain.data.shards import PIECES, Shard
from powertrain.data.store import open_store, shard_text
from powertrain.recipe import DataRecipe
from powertrain.records import WrongUse

CHATS = [{"messages": [{"role": "user", "content": f"what is {number} ?"},
                       {"role": "assistant", "content": f"it is {number} " + "cat " * (number % 50)}]} for number in range(90)]
TEXTS = [{"text": f"the cat {number} sat on the mat " * (number % 9 + 1)} for number in range(90)]
PAIRS = [{"document": f"the cat {number} sat on the mat", "summary": f"cat {number}"} for number in range(90)]
SPANS = [{"context": f"paris is the capital of france {number}", "question": "what is the capital ?",
          "answers": {"text": ["paris"], "answer_start": [0]}} for number in range(90)]
BAD = ['{"messages": 3}', "{nonsense", "", '{"messages": [{"role": "user", "content": "\\u0000"}]}', '{"messages": []}']
SETTINGS = {"max_length": 40, "validation_share": 0.1, "long_examples": "cut"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(making, "STRETCH_BYTES", 700)
    monkeypatch.setattr(making, "PIECE_ROWS", 5)
    monkeypatch.setattr(documents, "BATCH_CHARS", 300)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(cache):
    """All that is stored in a cache besides shards."""
    return {name: content for kind in ("examples", "tokens") for name, content in contents(cache / kind).items()}


def sharded(sources, tokenizer, cache, of, *, task="causal", only=None, **changed):
    """Prepares shards as machines with caches of their own do, and returns their folders."""
    data = DataRecipe(source=[str(source) for source in sources], **{**SETTINGS, **changed})
    return [shard_examples(data, Shard(number, of), tokenizer_folder=tokenizer, cache=cache / str(number), task=task)
            for number in only or range(1, of + 1)]


def by_one(sources, tokenizer, cache, **changed):
    examples_of(*sources, tokenizer_folder=tokenizer, cache=cache, **{**SETTINGS, **changed})
    return stored(cache)


def lines_with_faults(path, rows, faults):
    lines = [json.dumps(row) for row in rows]
    for number in range(faults):
        lines.insert(3 * number, BAD[number % len(BAD)])
    return json_lines(path, lines)


# ------------------------------------------------------------------------------------------------ the same bytes


@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4), faults=st.integers(0, 30), of=st.integers(1, 7))
@settings(max_examples=12, deadline=None)
def test_any_number_of_shards_over_uneven_files_is_the_store_of_one_machine(tmp_path_factory, chat, sizes, faults, of):
    tmp_path = tmp_path_factory.mktemp("uneven")
    folder = tmp_path / "rows"
    folder.mkdir()
    for number, size in enumerate([40, *sizes]):             # the first rows tell the format
        lines_with_faults(folder / f"{number}.jsonl", CHATS[:size], faults if number % 2 else 0)
    whole = by_one([folder], chat, tmp_path / "one")
    joined = join_shards(sharded([folder], chat, tmp_path / "many", of), tmp_path / "joined")
    assert stored(tmp_path / "joined") == whole
    assert [store.parent.name for store in joined] == ["examples"]


@given(sizes=st.lists(st.integers(0, 900), min_size=2, max_size=30), of=st.integers(1, 7),
       tokenizer=st.sampled_from(["char", "byte", "bpe"]), split=st.sampled_from(["seeded", "tail"]),
       share=st.sampled_from([0.0, 0.2]))
@settings(max_examples=12, deadline=None)
def test_so_it_is_for_text_with_a_tokenizer_made_from_all_of_it(tmp_path_factory, sizes, of, tokenizer, split, share):
    tmp_path = tmp_path_factory.mktemp("texts")
    rows = [{"text": f"{number} " + ("the cat sat on the mat. " * 40)[:size]} for number, size in enumerate(sizes)]
    data = DataRecipe(source=str(json_lines(tmp_path / "rows.jsonl", rows)), tokenizer=tokenizer, validation_split=split,
                      validation_share=share, vocabulary=300 if tokenizer == "bpe" else None)
    open_store(data, seed=3, cache=tmp_path / "one")
    made = [shard_text(data, Shard(number, of), seed=3, cache=tmp_path / str(number)) for number in range(1, of + 1)]
    join_shards(made, tmp_path / "joined")
    assert stored(tmp_path / "joined") == stored(tmp_path / "one")


@pytest.mark.parametrize(("rows", "folder", "changed"), [
    (TEXTS, chat_folder, {}), (PAIRS, seq2seq_folder, {"task": "seq2seq", "decoder_start": 0}),
    (SPANS, span_folder, {"task": "span"}), (CHATS, chat_folder, {"chat_template": "plain", "train_on": "all"}),
    (CHATS, chat_folder, {"max_length": 25, "long_examples": "drop"}), (CHATS, chat_folder, {"max_examples": 31})])
def test_so_it_is_for_every_kind_of_rows(tmp_path, rows, folder, changed):
    path, tokenizer = json_lines(tmp_path / "rows.jsonl", rows), folder(tmp_path / "tokenizer")
    whole = by_one([path], tokenizer, tmp_path / "one", **changed)
    changed.pop("decoder_start", None)
    join_shards(sharded([path], tokenizer, tmp_path, 3, **changed), tmp_path / "joined")
    assert stored(tmp_path / "joined") == whole


def test_so_it_is_for_files_that_cannot_be_cut_and_for_several_sources(tmp_path, chat):
    sheet, held_out, texts = tmp_path / "rows.csv", json_lines(tmp_path / "held_out.jsonl", CHATS[:7]), tmp_path / "listed.json"
    with sheet.open("w", newline="") as file:
        rows = ([f"what\nis {number} ?", f"it is {number}"] for number in range(33))
        csv.writer(file).writerows([["prompt", "completion"], *rows])
    texts.write_text(json.dumps(CHATS[:41]))
    asked = {"validation_source": str(held_out), "weights": [1.0, 2.5]}
    whole = by_one([sheet, texts], chat, tmp_path / "one", **asked)
    joined = join_shards(sharded([sheet, texts], chat, tmp_path, 4, **asked), tmp_path / "joined")
    assert stored(tmp_path / "joined") == whole
    assert len(joined) == 3


def test_rows_that_are_all_bad_are_told_by_training_and_not_by_the_shards(tmp_path):
    tokenizer = chat_folder(tmp_path / "tokenizer", INST)    # a template that has no system text
    path = json_lines(tmp_path / "rows.jsonl", [{"messages": [{"role": "system", "content": "cat"}, *row["messages"]]}
                                                for row in CHATS])
    with pytest.raises(WrongUse, match="all 90 rows"):
        by_one([path], tokenizer, tmp_path / "one")
    join_shards(sharded([path], tokenizer, tmp_path, 2), tmp_path / "joined")
    assert stored(tmp_path / "joined") == stored(tmp_path / "one")


def test_one_machine_with_several_processes_makes_the_same_shard(tmp_path, chat, monkeypatch):
    path = lines_with_faults(tmp_path / "rows.jsonl", CHATS, 20)
    alone = contents(sharded([path], chat, tmp_path / "alone", 3, only=[2])[0])
    monkeypatch.setattr(making, "usable_cpus", lambda: 2)
    monkeypatch.setattr(making, "EACH_BYTES", 1)
    assert contents(sharded([path], chat, tmp_path / "together", 3, only=[2])[0]) == alone


def test_shards_lie_in_one_folder_of_a_shared_cache_and_are_made_once(tmp_path, chat, monkeypatch):
    path, shared = json_lines(tmp_path / "rows.jsonl", CHATS), tmp_path / "shared"
    data = DataRecipe(source=[str(path)], **SETTINGS)
    made = [shard_examples(data, Shard(number, 2), tokenizer_folder=chat, cache=shared) for number in (1, 2)]
    assert [folder.name for folder in made] == ["1-of-2", "2-of-2"]
    monkeypatch.setattr(shards, "publish", None)
    assert shard_examples(data, Shard(2, 2), tokenizer_folder=chat, cache=shared) == made[1]
    (store,) = join_shards([made[0].parent], shared)
    before = os.stat(store)
    assert join_shards(made, shared) == [store]
    assert os.stat(store) == before          # it was there already, and stays


def test_memory_does_not_grow_with_the_data(tmp_path, chat, monkeypatch):
    monkeypatch.setattr(making, "STRETCH_BYTES", 20_000)
    peaks, sizes = [], []
    for rows in (300, 3000):
        path = json_lines(tmp_path / f"{rows}.jsonl", [{"text": f"the {number} sat on the mat " * 9} for number in range(rows)])
        made = sharded([path], chat, tmp_path / str(rows), 2, max_length=200)
        tracemalloc.start()
        (store,) = join_shards(made, tmp_path / "joined")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(sum(len(content) for content in contents(store).values()))
    assert sizes[1] > 8 * sizes[0]
    assert peaks[1] - peaks[0] < sizes[1] / 10


# ------------------------------------------------------------------------------------------------ bad joins


@pytest.fixture
def three(tmp_path, chat):
    """Three shards of the same rows, and what makes more of them."""
    path = json_lines(tmp_path / "rows.jsonl", CHATS)

    def make(of, only=None, **changed):
        return sharded([path], chat, tmp_path / "made", of, only=only, **changed)

    return make(3), make


def refused(folders, tmp_path, *words):
    with pytest.raises(WrongUse) as error:
        join_shards(folders, tmp_path / "joined")
    assert not (tmp_path / "joined").exists()
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_missing_shard_is_named_with_the_words_that_make_it(three, tmp_path):
    refused([three[0][0]], tmp_path, "2 shards of 3 missing: 2/3, 3/3; prepare with the same recipe and --shard 2/3")
    refused([tmp_path / "nowhere"], tmp_path, "there is no such folder")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused([empty], tmp_path, f"there is no shard in {empty}; name the folders")


def test_a_doubled_shard_is_named_with_both_places(three, tmp_path):
    copied = Path(shutil.copytree(three[0][1], tmp_path / "copied"))
    refused([*three[0], copied], tmp_path, "shard 2/3 is there twice, as ", str(copied), "leave one of them out")


def test_a_shard_of_another_recipe_or_number_is_named_with_the_difference(three, tmp_path):
    made, make = three
    (other,) = make(3, [3], max_length=30)
    refused([*made[:2], other], tmp_path, str(other), "data.max_length is 30 in one and 40 in the other")
    (other,) = make(4, [3])
    refused([*made[:2], other], tmp_path, str(other), "one is of 4 shards, the other of 3")


def test_a_shard_of_changed_content_or_another_version_is_named(three, tmp_path, chat, monkeypatch):
    made, make = three
    json_lines(tmp_path / "rows.jsonl", CHATS[:-1])
    (other,) = make(3, [3])
    refused([*made[:2], other], tmp_path, f"the content of {tmp_path / 'rows.jsonl'} is not the same", "rsync -t")
    json_lines(tmp_path / "rows.jsonl", CHATS)
    monkeypatch.setattr(shards, "version", lambda package: "9.9")
    (other,) = make(3, [3])
    refused([*made[:2], other], tmp_path, "one was made by powertrain 9.9, tokenizers 9.9, the other by powertrain ")


def test_text_of_other_content_or_by_another_version_is_named(tmp_path, monkeypatch):
    rows, made = tmp_path / "texts.jsonl", []
    data = DataRecipe(source=str(json_lines(rows, TEXTS)), tokenizer="byte")
    for number in (1, 2):
        made.append(shard_text(data, Shard(number, 2), seed=1, cache=tmp_path / str(number)))
        json_lines(rows, TEXTS[1:])
    refused(made, tmp_path, f"the content of {rows} is not the same", "rsync -t")
    monkeypatch.setattr(store, "FORMAT", 1)
    made[0] = shard_text(data, Shard(1, 2), seed=1, cache=tmp_path / "old")
    refused(made, tmp_path, f"{made[0]} was prepared by another version of Powertrain; prepare that shard again")


def test_a_recipe_that_differs_only_in_what_is_not_stored_is_joined(three, tmp_path, chat):
    made, make = three
    (other,) = make(3, [3], validation_share=0.5)
    assert len(join_shards([*made[:2], other], tmp_path / "joined")) == 1


@pytest.mark.parametrize("name", ["0/examples.bin", "0/tokens.bin", "0/trained.bin", f"0/{PIECES}", "meta.json"])
def test_a_damaged_file_is_named(three, tmp_path, name):
    path = three[0][2] / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(three[0], tmp_path, f"{three[0][2]} is no whole shard: {name} is missing or not what was written; copy the folder")
    path.unlink()
    refused([three[0][2].parent] if name == "meta.json" else three[0], tmp_path, f"{name} is missing")


def test_a_tokenizer_that_came_out_differently_is_refused(tmp_path):
    data = DataRecipe(source=str(json_lines(tmp_path / "rows.jsonl", TEXTS)), tokenizer="bpe", vocabulary=280)
    made = [shard_text(data, Shard(number, 2), seed=1, cache=tmp_path / str(number)) for number in (1, 2)]
    tokenizer = made[1] / "0" / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"c"', '"C"'))
    meta = json.loads((made[1] / "meta.json").read_bytes())
    meta["sha256"]["0/tokenizer/tokenizer.json"] = shards.sha256_of(tokenizer)
    meta["digest"] = shards.key_of({name: value for name, value in meta.items() if name not in ("digest", "files", "sum")})
    (made[1] / "meta.json").write_text(json.dumps(meta))
    refused(made, tmp_path, "the tokenizer that each made from the text is not the same")


@pytest.mark.parametrize(("text", "said"), [
    ("3", "NUMBER/SHARDS, such as --shard 3/16"), ("a/b", "NUMBER/SHARDS"), ("-1/4", "NUMBER/SHARDS"),
    ("0/4", "numbered from 1/4 to 4/4"), ("5/4", "numbered from 1/4 to 4/4"), ("1/0", "NUMBER/SHARDS"),
    ("1/9999", "at most 4,096")])
def test_a_share_that_does_not_exist_is_refused(text, said):
    with pytest.raises(WrongUse, match=said):
        Shard.read(text)
    assert Shard.read("3/16") == Shard(3, 16)
