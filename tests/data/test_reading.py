import hashlib
import json
import os
from pathlib import Path

import pytest

from powertrain.data import documents
from powertrain.data.documents import Texts, read_documents
from powertrain.records import WrongUse


def read(source, tmp_path, **options):
    return read_documents(str(source), cache=tmp_path / "cache", **options)


def refusal(source, tmp_path, **options) -> str:
    with pytest.raises(WrongUse) as caught:
        read(source, tmp_path, **options)
    return str(caught.value)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(documents) -> list[str]:
    return [document.text for document in documents]


# -------------------------------------------------------------------------------- what is read


def test_a_file_is_one_document_with_its_line_ends_untranslated(tmp_path):
    path = write(tmp_path / "a.txt", "one\r\ntwo\rthree\n")
    (document,) = read(path, tmp_path)
    assert document.text == "one\r\ntwo\rthree\n"
    assert document.origin == str(path)


def test_a_byte_order_mark_is_dropped(tmp_path):
    assert texts(read(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello"), tmp_path)) == ["hello"]


def test_a_folder_gives_its_text_files_recursively_and_sorted(tmp_path):
    folder = tmp_path / "texts"
    for name in ("b.txt", "a/z.md", "a/b/c.py", "c.txt"):
        write(folder / name, name)
    assert texts(read(folder, tmp_path)) == ["a/b/c.py", "a/z.md", "b.txt", "c.txt"]


def test_a_folder_passes_over_what_is_binary_hidden_or_empty(tmp_path):
    folder = tmp_path / "texts"
    write(folder / "a.txt", "text")
    write(folder / "picture.png", b"\x89PNG\r\n\0\0")
    write(folder / ".git" / "config", "hidden")
    write(folder / ".hidden", "hidden")
    write(folder / "__init__.py", "")
    assert texts(read(folder, tmp_path)) == ["text"]


def test_repeated_documents_in_a_folder_are_kept(tmp_path):
    for name in ("a.txt", "b.txt"):
        write(tmp_path / "texts" / name, "same")
    assert texts(read(tmp_path / "texts", tmp_path)) == ["same", "same"]


def test_a_glob_gives_its_files_sorted(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        write(tmp_path / "texts" / name, name)
    assert texts(read(tmp_path / "texts" / "*.txt", tmp_path)) == ["a.txt", "b.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    assert texts(read(write(tmp_path / "a[1].txt", "bracket"), tmp_path)) == ["bracket"]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".JSONL"])
def test_jsonl_gives_one_document_per_line_and_skips_empty_lines(tmp_path, suffix):
    path = write(tmp_path / f"a{suffix}", '{"text": "one"}\r\n\n  \n{"text": "two"}')
    documents = read(path, tmp_path)
    assert texts(documents) == ["one", "two"]
    assert documents[1].origin == f"{path}:4"


def test_jsonl_lines_end_only_at_newlines(tmp_path):
    # U+2028 ends a line for str.splitlines(), and may stand raw in a JSON string
    row = json.dumps({"text": "a\u2028b"}, ensure_ascii=False)
    assert texts(read(write(tmp_path / "a.jsonl", row + "\n"), tmp_path)) == ["a\u2028b"]


def test_jsonl_reads_another_field_when_asked(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"question": "q", "answer": "a"}\n')
    assert texts(read(path, tmp_path, text_field="answer")) == ["a"]


@pytest.mark.parametrize(("limit", "expected"), [(1, ["o"]), (3, ["one"]), (5, ["one", "tw"]), (99, ["one", "two"])])
def test_max_chars_cuts_the_last_document(tmp_path, limit, expected):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    assert texts(read(path, tmp_path, max_chars=limit)) == expected


def test_the_digest_changes_when_a_border_between_documents_moves(tmp_path):
    one = Texts(str(write(tmp_path / "a.jsonl", '{"text": "ab"}\n{"text": "c"}\n')), tmp_path).measured()
    other = Texts(str(write(tmp_path / "b.jsonl", '{"text": "a"}\n{"text": "bc"}\n')), tmp_path).measured()
    assert one.digest != other.digest
    content = b"".join(len(text).to_bytes(8, "little") + text for text in (b"ab", b"c"))
    assert one.digest == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_pieces_in_which_a_file_is_read_change_nothing(tmp_path, monkeypatch, size):
    monkeypatch.setattr(documents, "PIECE_BYTES", size)
    text = "naïve 日本語 🙂\r\nline\n"
    assert read(write(tmp_path / "a.txt", text), tmp_path)[0].text == text
    rows = "".join(json.dumps({"text": f"{text}{number}"}, ensure_ascii=False) + "\n" for number in range(3))
    assert [row.text for row in read(write(tmp_path / "b.jsonl", rows), tmp_path)] == [f"{text}{number}" for number in range(3)]
    for content, sentence in ((b"ab\xc3\xa9c\xe9d", "byte 0xe9 at offset 5 of 7"),
                              (b"ab\xc3\xa9\0", "NUL byte at offset 4 of 5"),
                              (b"ab\xe2\x82", "byte 0xe2 at offset 2 of 4")):
        (tmp_path / "c.txt").write_bytes(content)
        assert sentence in refusal(tmp_path / "c.txt", tmp_path)


# -------------------------------------------------------------------------------- what is refused


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path):
    write(tmp_path / "shakespeare.txt", "text")
    assert f"did you mean {tmp_path / 'shakespeare.txt'}?" in refusal(tmp_path / "shakespear.txt", tmp_path)


def test_a_misspelt_corpus_is_refused_with_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal("stdlb", tmp_path)
    assert "no such file or folder" in message
    assert "did you mean the corpus stdlib?" in message


def test_a_missing_path_without_near_names_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"give a path from {tmp_path}, or a corpus: stdlib, shakespeare" in refusal("zzz/qqq", tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_empty_file_is_refused(tmp_path, name):
    path = write(tmp_path / name, "")
    assert refusal(path, tmp_path).startswith(f"{path} is empty")


def test_blank_data_is_refused_with_its_length(tmp_path):
    assert "its 4 characters are all white space" in refusal(write(tmp_path / "a.txt", " \n\t\n"), tmp_path)


def test_a_binary_file_is_refused_with_the_offset_of_the_nul_byte(tmp_path):
    path = write(tmp_path / "a.bin", b"abc\0def")
    assert refusal(path, tmp_path).startswith(f"{path} is not text: NUL byte at offset 3 of 7")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "folder/a.txt"])
def test_a_file_that_is_not_utf8_is_refused_with_the_offset(tmp_path, name):
    path = write(tmp_path / name, "naïve".encode("latin-1"))
    source = path.parent if "/" in name else path
    assert refusal(source, tmp_path).startswith(f"{path} is not UTF-8: byte 0xef at offset 2 of 5")


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "text")

    def refuse(self, mode):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # file modes do not stop root, who may run these tests
    assert refusal(path, tmp_path).startswith(f"{path} cannot be read: Permission denied")


def test_a_subfolder_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    closed = tmp_path / "texts" / "closed"
    write(closed / "a.txt", "text")
    write(tmp_path / "texts" / "b.txt", "text")
    scan = os.scandir

    def refuse(folder):
        if str(folder) == str(closed):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)  # file modes do not stop root
    assert refusal(closed.parent, tmp_path).startswith(f"{closed} cannot be read: Permission denied")


def test_a_folder_without_text_files_is_refused(tmp_path):
    write(tmp_path / "texts" / "a.bin", b"\0")
    assert "has no text files" in refusal(tmp_path / "texts", tmp_path)


def test_a_glob_without_matches_is_refused(tmp_path):
    assert refusal(tmp_path / "*.txt", tmp_path).startswith(f"no file matches {tmp_path / '*.txt'}")


def test_what_is_neither_file_nor_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is neither a file nor a folder" in refusal(tmp_path / "pipe", tmp_path)


@pytest.mark.parametrize(("line", "sentence"), [
    ('{"text": ', "not JSON: Expecting value at column 10"),
    ('["text"]', "a list, not an object"),
    ('"text"', "a string, not an object"),
    ("[" * 100_000, "this JSON cannot be read"),
    ('{"test": "a", "id": 1}', "no field 'text'; it has: test, id; did you mean data.text_field=test?"),
    ('{"question": "a"}', "no field 'text'; it has: question; set data.text_field to one of them"),
    ('{}', "no field 'text'; it has: none"),
    ('{"text": null}', "field 'text' is null, not text"),
    ('{"text": 3.5}', "field 'text' is a number, not text"),
    ('{"text": ["a"]}', "field 'text' is a list, not text"),
    ('{"text": "ab\\ud800"}', "field 'text' holds the lone surrogate \\ud800 at character 2"),
])
def test_a_bad_jsonl_line_is_refused_with_file_and_line(tmp_path, line, sentence):
    path = write(tmp_path / "a.jsonl", '{"text": "good"}\n\n' + line + "\n")
    assert refusal(path, tmp_path).startswith(f"{path}:3: {sentence}")
