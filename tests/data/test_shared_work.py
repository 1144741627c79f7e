"""One source tokenised by several processes: the same to the byte, and nothing left behind."""

import gzip
import json
import subprocess
import sys

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_folders import chat_folder, examples_of, json_lines, seq2seq_folder, span_folder
from powertrain.data.examples import making
from powertrain.data.examples.making import work_from
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.data.rows import files
from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.row import Row
from powertrain.records import WrongUse

CHATS = [{"messages": [{"role": "user", "content": f"what is {number} ?"},
                       {"role": "assistant", "content": f"it is {number} " + "cat " * (number % 50)}]} for number in range(400)]
TEXTS = [{"text": f"the cat {number} sat on the mat " * (number % 9 + 1)} for number in range(400)]
PAIRS = [{"document": f"the cat {number} sat on the mat", "summary": f"cat {number}"} for number in range(400)]
SPANS = [{"context": f"paris is the capital of france {number % 300}", "question": "what is the capital ?",
          "answers": {"text": ["paris"], "answer_start": [0]}} for number in range(400)]
BAD = ['{"messages": 3}', "{nonsense", "", '{"messages": [{"role": "user", "content": "\\u0000"}]}']


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def crowd(monkeypatch):
    """Two further processes for any file, however small, and little for each at a time."""
    monkeypatch.setattr(making, "usable_cpus", lambda: 3)
    monkeypatch.setattr(making, "EACH_BYTES", 1)
    monkeypatch.setattr(making, "STRETCH_BYTES", 2000)


def opened(path, chat, cache, **changed):
    return examples_of(path, **{"max_length": 40, "validation_share": 0.0, "tokenizer_folder": chat, "cache": cache,
                                "long_examples": "cut", **changed})


def contents(store):
    return {path.name: path.read_bytes() for path in store.folder.iterdir()}


def others():
    """The processes that this one started for tokenising."""
    return [process for process in psutil.Process().children() if any("examples.making" in word for word in process.cmdline())]


def chats_with_faults(folder):
    rows = [json.dumps(row) for row in CHATS]
    for number, bad in enumerate(BAD * 15):
        rows.insert(6 * number, bad)         # more than are kept of one kind, in every stretch
    return json_lines(folder / "rows.jsonl", rows)


# ------------------------------------------------------------------------------------------------ stretches


@given(lines=st.lists(st.sampled_from([b'{"text": "a"}', b"", b"  ", b'{"text": "\xc3\xa4\xe2\x80\xa8"}\r', b"{",
                                       b'{"text": "long"}' * 9]), max_size=12),
       end=st.sampled_from([b"", b"\n"]), size_bytes=st.integers(1, 200), mark=st.booleans())
@settings(max_examples=60, deadline=None)
def test_stretches_have_the_rows_and_origins_of_the_whole_file(tmp_path_factory, lines, end, size_bytes, mark):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes((files.BYTE_ORDER_MARK if mark else b"") + b"\n".join(lines) + end)
    cut = [row for stretch in making.stretches([path, path], size_bytes) for row in stretch.rows()]
    assert cut == [*files.json_lines(path), *files.json_lines(path)]


def test_a_line_that_is_too_long_is_rejected_in_its_stretch_too(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE_BYTES", 50)
    monkeypatch.setattr(making, "PIECE_BYTES", 7)
    path = json_lines(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "b" * 200}, {"text": "c"}])
    found = [row for stretch in making.stretches([path], 10) for row in stretch.rows()]
    assert [isinstance(row, Row) for row in found] == [True, False, True]
    assert found == list(files.json_lines(path))


def test_only_files_of_lines_are_cut(tmp_path):
    path = json_lines(tmp_path / "rows.jsonl", TEXTS[:3])
    packed, table = tmp_path / "rows.jsonl.gz", tmp_path / "rows.csv"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    table.write_text('text\n"two\nlines"\n')
    assert making.files_of_lines(str(path), None) == [path]
    for source in (str(packed), str(table), "docstrings", "shakespeare"):
        assert making.files_of_lines(source, None) == []


# ------------------------------------------------------------------------------------------------ several processes


def test_few_bytes_or_one_core_are_for_one_process(tmp_path, monkeypatch):
    path = json_lines(tmp_path / "rows.jsonl", TEXTS[:3])
    monkeypatch.setattr(making, "usable_cpus", lambda: 4)
    assert making.further_processes([path]) == 0
    monkeypatch.setattr(making, "EACH_BYTES", path.stat().st_size // 2)
    assert making.further_processes([path]) == 2
    assert making.further_processes([path] * 9) == 3
    monkeypatch.setattr(making, "usable_cpus", lambda: 1)
    assert making.further_processes([path]) == 0
    monkeypatch.setattr(making, "usable_cpus", lambda: 64)
    assert making.further_processes([path] * 9) == making.MOST_FURTHER


def test_what_is_stored_is_the_same_to_the_byte(tmp_path, chat, crowd, monkeypatch):
    path = chats_with_faults(tmp_path)
    together = opened(path, chat, tmp_path / "together")
    monkeypatch.setattr(making, "usable_cpus", lambda: 1)
    alone = opened(path, chat, tmp_path / "alone")
    assert contents(together) == contents(alone)
    assert together.counts["bad"] == 45                      # a blank line is no row
    assert together.counts["cut"] > 20
    assert [problem.origin for problem in together.problems][:3] == [f"{path}:{line}" for line in (1, 7, 19)]
    assert not others()


@pytest.mark.parametrize(("rows", "folder", "changed"), [
    (TEXTS, chat_folder, {}), (PAIRS, seq2seq_folder, {"task": "seq2seq", "decoder_start": 0}),
    (SPANS, span_folder, {"task": "span"}), (CHATS, chat_folder, {"chat_template": "plain", "train_on": "all"}),
    (PAIRS, chat_folder, {"format": "document_summary"})])
def test_so_it_is_for_every_kind_of_rows(tmp_path, crowd, monkeypatch, rows, folder, changed):
    path, tokenizer = json_lines(tmp_path / "rows.jsonl", rows), folder(tmp_path / "tokenizer")
    heard = []
    together = opened(path, tokenizer, tmp_path / "together", tell=heard.append, **changed)
    monkeypatch.setattr(making, "usable_cpus", lambda: 1)
    assert contents(together) == contents(opened(path, tokenizer, tmp_path / "alone", **changed))
    assert [phase.sentence for phase in heard] == [f"tokenising {path}"]                   # none of the processes failed


@pytest.mark.parametrize(("code", "reason"), [
    ("import sys; sys.exit('there is no such thing')", "there is no such thing"),
    ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
    (making.CODE.replace("main()", "[sys.stdin.readline() for _ in range(2)]; raise OSError('disk')"), "OSError: disk")])
def test_the_rows_of_a_process_that_fails_are_done_by_the_others(tmp_path, chat, crowd, monkeypatch, code, reason):
    monkeypatch.setattr(making, "CODE", code)
    path, heard = chats_with_faults(tmp_path), []
    together = opened(path, chat, tmp_path / "together", tell=heard.append)
    monkeypatch.setattr(making, "usable_cpus", lambda: 1)
    assert contents(together) == contents(opened(path, chat, tmp_path / "alone"))
    sentence = f"one of the processes that tokenise has failed ({reason}); the others do its rows"
    assert [phase.sentence for phase in heard[1:]] == [sentence] * 2
    assert not others()


def test_an_interruption_leaves_no_process_and_no_file(tmp_path, chat, crowd, monkeypatch):
    seen, all_stretches = [], making.stretches

    def interrupted(found, size_bytes):
        for number, stretch in enumerate(all_stretches(found, size_bytes)):
            if number == 6:
                seen.extend(others())
                raise KeyboardInterrupt
            yield stretch

    monkeypatch.setattr(making, "stretches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened(json_lines(tmp_path / "rows.jsonl", CHATS), chat, tmp_path / "cache")
    assert len(seen) == 2
    assert not others()
    assert not list((tmp_path / "cache" / "examples").iterdir())


def test_a_file_that_cannot_be_read_any_more_is_one_sentence(tmp_path, chat, crowd, monkeypatch):
    path, all_stretches = json_lines(tmp_path / "rows.jsonl", CHATS), making.stretches

    def vanishing(found, size_bytes):
        every = list(all_stretches(found, size_bytes))
        path.unlink()
        return every

    monkeypatch.setattr(making, "stretches", vanishing)
    with pytest.raises(WrongUse, match="cannot be read"):
        opened(path, chat, tmp_path / "cache")
    assert not others()


def test_a_process_ends_with_its_input(chat):
    tokenizer = open_example_tokenizer(chat)
    told = {"schema": ["text", "text", {"text": "text"}], "tokenizer": [str(chat), tokenizer.end, tokenizer.digest],
            "template": None, "train_on": "all", "max_length": 10, "drop": False}
    words = [sys.executable, "-c", making.CODE, json.dumps(sys.path)]
    ended = subprocess.run(words, input=json.dumps(told) + "\n", capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_tokenizer_that_changed_meanwhile_is_refused(tmp_path, chat):
    told = {"schema": ["text", "text", {"text": "text"}], "tokenizer": [str(chat), "<|im_end|>", "another"], "template": None,
            "train_on": "all", "max_length": 10, "drop": False}
    with pytest.raises(WrongUse, match="changed while rows were tokenised"):
        work_from(told)


def test_a_part_of_the_rows_is_for_one_process(tmp_path, chat, crowd, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("further processes")
    monkeypatch.setattr(making, "write_together", refuse)
    path = json_lines(tmp_path / "rows.jsonl", CHATS)
    assert len(opened(path, chat, tmp_path / "cache", max_examples=30).training) == 30
    assert len(list(read_rows(str(path), cache=tmp_path))) == 400
