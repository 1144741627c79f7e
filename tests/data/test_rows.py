import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from powertrain.data.rows import files
from powertrain.data.rows.reading import local_files, read_rows
from powertrain.data.rows.row import Rejected, Row, fault
from powertrain.records import WrongUse

ROWS = [{"question": "uno\n\"due\", tre", "answer": "é ✓"}, {"question": "b", "answer": ""},
        {"question": "c\u2028d", "answer": "e"}]

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
                      lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8)
objects = st.dictionaries(texts, values, max_size=4)


def read(source, cache=Path("/nowhere"), **options):
    return list(read_rows(str(source), cache=cache, **options))


def fields(source, **options):
    found = read(source, **options)
    assert all(isinstance(row, Row) for row in found), found
    return [row.fields for row in found]


def refusal(source, **options) -> str:
    with pytest.raises(WrongUse) as caught:
        read(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def sheet(rows, delimiter=",") -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def write_arrow(path: Path, rows, *, stream: bool) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def write_parquet(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


# -------------------------------------------------------------------------------- every format


def in_every_format(folder: Path):
    yield write(folder / "a.jsonl", lines(ROWS))
    yield write(folder / "b.ndjson", "\ufeff" + lines(ROWS).replace("\n", "\r\n"))
    yield write(folder / "a.jsonl.gz", gzip.compress(lines(ROWS).encode()))
    yield write(folder / "a.json", json.dumps(ROWS))
    yield write(folder / "b.json", "\ufeff" + json.dumps({"version": "1", "data": ROWS}, indent=2))
    yield write(folder / "lines.json", lines(ROWS))
    yield write(folder / "a.csv", sheet(ROWS))
    yield write(folder / "semicolon.csv", "\ufeff" + sheet(ROWS, ";"))
    yield write(folder / "a.csv.gz", gzip.compress(sheet(ROWS).encode()))
    yield write(folder / "a.TSV", sheet(ROWS, "\t"))
    yield write_parquet(folder / "a.parquet", ROWS)
    yield write_arrow(folder / "stream.arrow", ROWS, stream=True)
    yield write_arrow(folder / "file.arrow", ROWS, stream=False)


def test_every_format_gives_the_same_rows(tmp_path):
    for path in in_every_format(tmp_path):
        assert fields(path) == ROWS, path


def test_an_origin_is_where_one_finds_the_row(tmp_path):
    origins = {path.name: [row.origin.removeprefix(str(path)) for row in read(path)] for path in in_every_format(tmp_path)}
    assert origins["a.jsonl"] == [":1", ":2", ":3"]
    assert origins["a.csv"] == [":2", ":4", ":5"]         # the first row holds a line break
    assert origins["a.json"] == [" item 1", " item 2", " item 3"]
    assert origins["a.parquet"] == origins["stream.arrow"] == origins["file.arrow"] == [" row 1", " row 2", " row 3"]


def test_a_text_file_is_one_row_under_the_text_field(tmp_path):
    path = write(tmp_path / "a.md", "\ufeffone\r\ntwo\n")
    assert read(path, text_field="body") == [Row({"body": "one\r\ntwo\n"}, str(path))]


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_most_limits_the_rows_and_does_not_count_bad_ones(tmp_path, most):
    path = write(tmp_path / "a.jsonl", "bad\n" + lines(ROWS))
    assert sum(isinstance(row, Row) for row in read(path, most=most)) == min(most, 3)


def test_corpora_are_rows_of_text(tmp_path):
    (first,) = read("stdlib", tmp_path, most=1, text_field="body")
    assert first.origin.endswith(".py")
    assert first.fields["body"] == Path(first.origin).read_text("utf-8")


@settings(suppress_health_check=[HealthCheck.too_slow])       # where other work runs beside it
@given(st.lists(objects, min_size=1, max_size=5), st.booleans())
def test_jsonl_gives_back_what_was_written(tmp_path_factory, rows, ascii_only):
    path = tmp_path_factory.getbasetemp() / "property.jsonl"
    write(path, "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n\n" for row in rows))
    assert read(path) == [Row(row, f"{path}:{2 * i + 1}") for i, row in enumerate(rows)]


@settings(deadline=None)
@given(st.lists(objects, min_size=1, max_size=5), st.integers(1, 9), st.sampled_from([None, 1]))
def test_a_json_list_is_the_same_however_it_is_cut_into_chunks(tmp_path_factory, rows, chunk, indent):
    path = write(tmp_path_factory.getbasetemp() / "property.json", json.dumps(rows, indent=indent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK_CHARS", chunk)
        assert fields(path) == rows


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_csv_gives_back_what_was_written_and_the_line_where_it_begins(tmp_path_factory, cells):
    rows = [{"a": one, "b": other} for one, other in cells]
    path = write(tmp_path_factory.getbasetemp() / "property.csv", sheet(rows))
    found = read(path)
    assert [row.fields for row in found] == rows
    starts = [2, *(1 + sheet(rows[:i]).count("\n") for i in range(1, len(rows)))]
    assert [row.origin for row in found] == [f"{path}:{start}" for start in starts]


# -------------------------------------------------------------------------------- flat memory


def written(path: Path, head: str, between: str, tail: str) -> Path:
    row = json.dumps({"text": "word " * 200, "id": 1})
    with path.open("w") as file:
        file.write(head + between.join([row] * 12_000) + tail)
    assert path.stat().st_size > 12_000_000
    return path


@pytest.mark.parametrize(("name", "head", "between", "tail"), [
    ("a.jsonl", "", "\n", "\n"), ("a.json", "[", ", ", "]"), ("a.csv", "a,b\n", "\n", "\n")])
def test_memory_stays_flat_whatever_the_size_of_the_file(tmp_path, monkeypatch, name, head, between, tail):
    monkeypatch.setattr(files, "CHUNK_CHARS", 1 << 16)
    path = written(tmp_path / name, head, between, tail)
    tracemalloc.start()
    try:
        count = sum(1 for _ in zip(read_rows(str(path), cache=tmp_path), range(12_000), strict=False))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 12_000
    assert peak < 2 << 20                    # of 12 MB


# -------------------------------------------------------------------------------- bad rows


@pytest.mark.parametrize(("line", "reason"), [
    (b'{"text": ', "not JSON: Expecting value at column 10"),
    (b'["text"]', "a list, not an object"),
    (b"[" * 100_000, "this JSON cannot be read"),
    (b'{"text": "caf\xe9"}', "not UTF-8: byte 0xe9 at offset 13"),
    (b'{"text": "\xed\xa0\x80"}', "not UTF-8: byte 0xed"),
    (b'{"text": ["a", {"b": "x\\uD83d"}]}', "the lone surrogate \\ud83d at character 1"),
    (b'{"text": "a\\u0000"}', "NUL at character 1"),
    (b'{"text": "a\0"}', "not JSON: Invalid control character"),
    (b"\xff\xfe{\0", "not UTF-8: byte 0xff at offset 0"),
])
def test_a_bad_line_of_jsonl_is_rejected_and_the_others_are_read(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", b'{"text": "good"}\n\n' + line + b'\n{"text": "too"}')
    first, bad, last = read(path)
    assert isinstance(bad, Rejected)
    assert bad.origin == f"{path}:3"
    assert bad.reason.startswith(reason)
    assert (first.fields, last.fields, last.origin) == ({"text": "good"}, {"text": "too"}, f"{path}:4")


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    assert fields(write(tmp_path / "a.jsonl", '{"text": "\\ud83d\\ude00 \\\\u0000"}')) == [{"text": "😀 \\u0000"}]


def test_a_line_without_end_is_rejected_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE_BYTES", 1 << 20)
    path = write(tmp_path / "a.jsonl", '{"text": "' + "a" * (5 << 20) + '"}\n{"text": "b"}\n')
    bad, good = read(path)
    assert (bad.origin, good.origin) == (f"{path}:1", f"{path}:2")
    assert bad.reason.startswith("more than 1 MiB in one line")


@pytest.mark.parametrize(("line", "reason"), [
    (b"1,2,3", "3 fields where the header names 2"),
    (b"1", "1 fields where the header names 2"),
    (b'"a" b,c', "',' expected after '\"'; a quote inside a quoted field is written twice"),
    (b"caf\xe9,c", "not UTF-8"),
    (b"a\0,c", "NUL at character 1"),
])
def test_a_bad_line_of_csv_is_rejected_and_the_others_are_read(tmp_path, line, reason):
    path = write(tmp_path / "a.csv", b'x,y\n"1\n1",2\n\n' + line + b"\n3,4\n")
    first, bad, last = read(path)
    assert isinstance(bad, Rejected)
    assert bad.origin == f"{path}:5"
    assert bad.reason.startswith(reason)
    assert (first.fields, last.fields, last.origin) == ({"x": "1\n1", "y": "2"}, {"x": "3", "y": "4"}, f"{path}:6")


def test_a_quote_that_is_never_closed_is_rejected_where_it_opens(tmp_path):
    path = write(tmp_path / "a.csv", 'x,y\n1,2\n3,"4\n5,6\n')
    assert read(path)[-1] == Rejected(f"{path}:3", "unexpected end of data; a quote that opens here is never closed: close it, "
                                                   "or double it")


def test_fields_of_csv_may_be_long(tmp_path):
    assert len(fields(write(tmp_path / "a.csv", f"x,y\n{'a' * 200_000},b\n"))[0]["x"]) == 200_000


def test_items_of_json_that_are_no_objects_are_rejected(tmp_path):
    path = write(tmp_path / "a.json", '[{"text": "a"}, 12, {"text": "\\u0000"}]')
    assert read(path)[1:] == [Rejected(f"{path} item 2", "a number, not an object"),
                              Rejected(f"{path} item 3", "NUL at character 0 of a text; mend or remove the row")]


def test_a_value_of_a_table_that_is_no_text_is_rejected(tmp_path):
    offsets, text = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1], pa.py_buffer(b"a\xffc")
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, text])
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(str(path), pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([column], names=["text"]))
    good, bad, last = read(path)
    assert (good.fields, last.fields) == ({"text": "a"}, {"text": "c"})
    assert bad.origin == f"{path} row 2"
    assert "can't decode byte 0xff" in bad.reason


@given(values)
def test_what_can_be_written_as_utf8_has_no_fault_and_what_cannot_has_one(value):
    assert fault(value) is None
    assert fault({"a": [value, {"b\0": 1}]})
    assert fault([value, ("a", "\udc80")])


# -------------------------------------------------------------------------------- JSON's shapes


def test_squad_gives_one_row_per_question(tmp_path):
    answer = {"text": "here", "answer_start": 3}
    article = {"title": "T", "paragraphs": [
        {"context": "is here", "qas": [{"id": "1", "question": "where?", "answers": [answer]},
                                       {"id": "2", "question": "who?", "answers": [], "is_impossible": True}]},
        {"context": "none", "qas": []}]}
    path = write(tmp_path / "squad.json", json.dumps({"version": "v2.0", "data": [article, article]}))
    rows = read(path)
    assert [row.origin for row in rows] == [f"{path} item {i}" for i in range(1, 5)]
    assert rows[0].fields == {"title": "T", "context": "is here", "id": "1", "question": "where?", "answers": [answer]}
    assert rows[3].fields["is_impossible"] is True


def test_an_object_with_several_lists_has_parts(tmp_path):
    path = write(tmp_path / "a.json", json.dumps({"train": [{"a": 1}], "validation": [{"a": 2}]}))
    assert fields(path) == [{"a": 1}]
    assert fields(path, split="valid") == [{"a": 2}]
    assert "has no part 'test'; it has: train, validation" in refusal(path, split="test")


def test_an_object_with_messages_is_a_row_itself(tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}]}
    assert fields(write(tmp_path / "a.json", json.dumps(row, indent=1))) == [row]


@pytest.mark.parametrize(("content", "reason"), [
    ('[{"a": 1}, {"a": }]', "item 2: not JSON: Expecting value"),
    ('[{"a": 1} {"a": 2}]', "item 1: not JSON: '{' where a comma or ] should follow"),
    ('[{"a": 1}, ', "item 2: not JSON"),
    ('[{"a": 1}', "item 1: not JSON: it ends before its list does"),
    ('[{"a": 1}, 12', "item 2: not JSON: it ends before its list does"),
    ('[{"a": 1}] [2]', "goes on after its list with '[2]'"),
    ('{"a": 1}', "is one object with a, and none of them is a list"),
    ('{"a": 1,\n "b"}', ":2: not JSON: Expecting ':' delimiter at column 5"),
    ('"text"', "holds a string; rows are objects in a list"),
    ("[]", "is empty: no row to train on"),
    (b'[{"a": "\xe9"}]', "not UTF-8: byte 0xe9"),
])
def test_a_json_file_that_is_damaged_or_holds_no_rows_is_refused(tmp_path, content, reason):
    path = write(tmp_path / "a.json", content)
    message = refusal(path)
    assert str(path) in message
    assert reason in message


def test_a_json_object_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_OBJECT_CHARS", 1 << 20)
    path = write(tmp_path / "a.json", json.dumps({"data": [{"a": "b" * (2 << 20)}]}))
    assert "one JSON object of more than 1 Mi characters" in refusal(path)


# -------------------------------------------------------------------------------- folders and globs


def test_a_folder_of_parts_gives_train_unless_another_is_named(tmp_path):
    for name in ("train", "valid", "test"):
        write(tmp_path / f"{name}.jsonl", lines([{"text": name}]))
    write(tmp_path / "README.md", "about")
    assert fields(tmp_path) == [{"text": "train"}]
    for split, name in [("valid", "valid"), ("validation", "valid"), ("dev", "valid"), ("test", "test")]:
        assert fields(tmp_path, split=split) == [{"text": name}]


def test_shards_of_parquet_are_read_in_order(tmp_path):
    for i in range(3):
        write_parquet(tmp_path / "data" / f"train-0000{i}-of-00003.parquet", [{"a": i}])
        write_parquet(tmp_path / "data" / f"train_sft-0000{i}-of-00003.parquet", [{"a": 10 + i}])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", [{"a": 9}])
    assert fields(tmp_path, split="test") == [{"a": 9}]
    assert fields(tmp_path, split="train_sft") == [{"a": 10}, {"a": 11}, {"a": 12}]


def test_files_that_name_no_part_are_training_data(tmp_path):
    for name in ("b", "a", "test"):
        write(tmp_path / f"{name}.jsonl", lines([{"text": name}]))
    assert fields(tmp_path) == [{"text": "a"}, {"text": "b"}]


def test_a_folder_without_the_part_is_refused_with_those_it_has(tmp_path):
    for name in ("train", "valid"):
        write(tmp_path / f"{name}.jsonl", lines(ROWS))
    assert f"{tmp_path} has no part 'tets'; it has: train, validation" in refusal(tmp_path, split="tets")


def test_the_same_rows_in_two_formats_are_not_read_twice(tmp_path):
    write(tmp_path / "train.jsonl", lines(ROWS))
    write_parquet(tmp_path / "train.parquet", ROWS)
    assert "holds rows as .jsonl and .parquet, which may be the same rows twice" in refusal(tmp_path)
    assert fields(tmp_path / "*.parquet") == ROWS


def test_a_folder_of_sources_is_texts_also_with_its_settings(tmp_path):
    write(tmp_path / "package.json", "{}")
    write(tmp_path / "a.py", "pass\n")
    assert [row.fields for row in read(tmp_path)] == [{"text": "pass\n"}, {"text": "{}"}]


def test_a_mixture_of_rows_and_texts_is_refused(tmp_path):
    write(tmp_path / "a.jsonl", lines(ROWS))
    write(tmp_path / "b.txt", "text")
    message = refusal(tmp_path)
    assert "mixes 1 file of rows (.jsonl) and 1 text (such as b.txt)" in message
    assert fields(re.search(r"glob, such as '(.*)'", message).group(1)) == ROWS


def test_a_glob_takes_every_file_that_it_matches(tmp_path):
    for name in ("b", "a", "test"):
        write(tmp_path / f"{name}.jsonl", lines([{"text": name}]))
    assert fields(tmp_path / "*.jsonl") == [{"text": "a"}, {"text": "b"}, {"text": "test"}]
    assert [path.name for path in local_files(str(tmp_path / "*.jsonl"), None)] == ["a.jsonl", "b.jsonl", "test.jsonl"]


def saved(rows, folder: Path, **options):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(folder), **options)


def test_a_folder_that_datasets_saved_is_read_in_the_order_of_its_shards(tmp_path):
    rows = [{"a": i, "messages": [{"role": "user", "content": str(i)}]} for i in range(700)]
    saved(rows, tmp_path / "set", num_shards=3)
    assert fields(tmp_path / "set") == rows
    assert fields(tmp_path / "set", most=2) == rows[:2]


def test_a_saved_dataset_with_parts_gives_one(tmp_path):
    for name, value in (("train", 1), ("validation", 2)):
        saved([{"a": value}], tmp_path / name)
    write(tmp_path / "dataset_dict.json", '{"splits": ["train", "validation"]}')
    assert fields(tmp_path) == [{"a": 1}]
    assert fields(tmp_path, split="dev") == [{"a": 2}]
    assert "it has: train, validation" in refusal(tmp_path, split="test")


def test_a_saved_dataset_without_its_data_is_refused(tmp_path):
    saved([{"a": 1}], tmp_path)
    (tmp_path / "data-00000-of-00001.arrow").unlink()
    assert "saved dataset without its data: data-00000-of-00001.arrow" in refusal(tmp_path)


# -------------------------------------------------------------------------------- sources that cannot be used


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json", "a.arrow", "a.txt", "a.jsonl.gz"])
def test_an_empty_file_is_refused(tmp_path, name):
    path = write(tmp_path / name, gzip.compress(b"") if name.endswith(".gz") else b"")
    assert refusal(path).startswith(f"{path} is empty")


def test_a_header_alone_is_empty(tmp_path):
    assert "is empty" in refusal(write(tmp_path / "a.csv", "x,y\n"))


def test_a_header_that_names_a_column_twice_is_refused(tmp_path):
    assert "names the column 'x' twice" in refusal(write(tmp_path / "a.csv", "x,y,x\n1,2,3\n"))


def test_a_source_without_one_good_row_is_refused_with_the_first_reason(tmp_path):
    path = write(tmp_path / "a.jsonl", "[1]\n[2]\n")
    message = refusal(path)
    assert "no row that can be read: all 2 are bad, the first of them" in message
    assert f"{path}:1: a list, not an object" in message


def test_a_missing_file_is_refused_before_the_first_row_with_the_nearest_name(tmp_path):
    write(tmp_path / "train.jsonl", lines(ROWS))
    with pytest.raises(WrongUse, match=f"did you mean {tmp_path / 'train.jsonl'}"):
        read_rows(str(tmp_path / "tran.jsonl"), cache=tmp_path)


def test_a_misspelt_set_is_refused_with_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "did you mean the set docstrings?" in refusal("docstring")
    assert "did you mean the corpus stdlib?" in refusal("stdlb")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path, name):
    assert refusal(write(tmp_path / name, b"PAR1 this is none of them")).startswith(f"{tmp_path / name} cannot be read: ")


def test_a_cut_gzip_file_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(lines(ROWS * 1000).encode())[:-20])
    assert refusal(path).startswith(f"{path} cannot be read: ")


def test_a_binary_file_is_refused_with_what_can_be_read(tmp_path):
    assert "is not text: NUL byte at offset 2 of 5; what can be read is JSONL" in \
        refusal(write(tmp_path / "a.bin", b"ab\0cd"))


def test_a_text_that_is_too_long_for_one_example_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_TEXT_BYTES", 1 << 20)
    assert "more than 1 MiB, and a text file is one example" in refusal(write(tmp_path / "a.txt", "a" * ((1 << 20) + 1)))


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", lines(ROWS))

    def refuse(self, mode):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # file modes do not stop root, who may run these tests
    assert refusal(path).startswith(f"{path} cannot be read: Permission denied")


@pytest.mark.parametrize(("part", "name"), [("pyarrow", "a.parquet"), ("pyarrow", "a.arrow"), ("datasets", "org/set")])
def test_a_part_that_is_not_installed_is_named_with_its_command(tmp_path, monkeypatch, part, name):
    monkeypatch.chdir(tmp_path)
    if part == "pyarrow":
        write_parquet(Path(name), ROWS)
    for module in [module for module in sys.modules if module == part or module.startswith(f"{part}.")]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, part, None)
    monkeypatch.setitem(sys.modules, f"{part}.parquet", None)
    assert refusal(name).endswith(f"pip install {part}")


def test_reading_jsonl_loads_neither_torch_nor_the_optional_parts(tmp_path):
    path = write(tmp_path / "a.jsonl", lines(ROWS))
    code = (f"import sys; from powertrain.data.rows.reading import read_rows; from pathlib import Path\n"
            f"from powertrain.data.rows.schemas import find_schema\n"
            f"list(read_rows({str(path)!r}, cache=Path()))\n"
            f"sys.exit(({{'torch', 'datasets', 'pyarrow', 'transformers'}} & set(sys.modules) or None))")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -------------------------------------------------------------------------------- the hub, without a network


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The cache of `datasets`, offline, holding org/set as its own loader leaves it there."""
    datasets = pytest.importorskip("datasets")
    from datasets.arrow_writer import ArrowWriter

    folder = tmp_path / "hub" / "org___set" / "default" / "0.0.0" / ("a" * 40)
    folder.mkdir(parents=True)
    splits = {}
    for name, rows in (("train", ROWS), ("test", ROWS[:1])):
        with ArrowWriter(path=str(folder / f"set-{name}.arrow")) as writer:
            for row in rows:
                writer.write(row)
            count, size_bytes = writer.finalize()
        splits[name] = {"name": name, "num_bytes": size_bytes, "num_examples": count, "dataset_name": "set"}
    datasets.DatasetInfo(builder_name="json", dataset_name="set", config_name="default", version="0.0.0",
                         features=datasets.Dataset.from_list(ROWS).features,
                         splits=datasets.SplitDict.from_split_dict(splits)).write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_cached_dataset_of_the_hub_is_read_offline(hub_cache):
    assert fields("org/set") == ROWS
    assert [row.origin for row in read("org/set")] == [f"org/set[train] row {i}" for i in (1, 2, 3)]
    assert fields("org/set", split="test") == ROWS[:1]
    assert fields("org/set", split="train[1:]") == ROWS[1:]
    assert fields("org/set:default", most=1) == ROWS[:1]


def test_a_dataset_that_is_not_cached_is_refused_offline_in_one_sentence(hub_cache):
    message = refusal("org/other")
    assert "neither a path nor a dataset in the cache of `datasets`, and the hub cannot be reached" in message
    assert "OfflineModeIsEnabled" in message


def test_a_part_or_configuration_that_the_dataset_lacks_is_refused(hub_cache):
    assert "has no part 'validation'; it has: train, test" in refusal("org/set", split="validation")
    assert "org/set:german cannot be loaded" in refusal("org/set:german")


def test_a_path_wins_over_a_dataset_of_the_hub(hub_cache):
    write(hub_cache / "org" / "set", "a text here")
    assert fields("org/set") == [{"text": "a text here"}]


def test_a_missing_file_is_not_looked_for_on_the_hub(hub_cache):
    assert "there is no such file or folder" in refusal("org/set.jsonl")


def test_a_path_that_could_be_a_dataset_gets_the_nearest_name_too(hub_cache):
    write(hub_cache / "data" / "train", "text")
    assert f"did you mean {os.path.join('data', 'train')}?" in refusal("data/trian")
