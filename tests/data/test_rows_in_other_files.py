"""Rows in other files and shapes: nothing is lost, or the row and the column are named."""

import json

import pytest
from test_tools import MESSAGES, SHARED, TOOL

from example_folders import json_lines
from powertrain.data.rows.converting import SHAPES, convert
from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.row import Row
from powertrain.data.rows.schemas import find_schema
from powertrain.records import WrongUse

ALPACA = [{"instruction": f"add {number}", "input": "" if number else "with care", "output": f"it is {number},\n\"{number}\"",
           "id": f"n{number}"} for number in range(5)]
SYSTEM = [{"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "u"},
                        {"role": "assistant", "content": "a"}]}]
TOOLS = [{"messages": MESSAGES, "tools": [TOOL]},
         {"messages": [{"role": "user", "content": "and Rome?"}, {"role": "assistant", "content": "no"}], "tools": [TOOL]}]
CALLS = [{"conversations": SHARED, "tools": json.dumps([TOOL])}]


def rows_in(path, tmp_path):
    return [row.fields for row in read_rows(str(path), cache=tmp_path) if isinstance(row, Row)]


def meanings(fields):
    rows = [Row(row, "x") for row in fields]
    schema, _ = find_schema(rows, name=None, columns={}, task="causal")
    return [schema.read(row.fields) for row in rows]


def without_null(value):
    """null, an absent column and, in CSV, an empty field are one."""
    return [{name: inner for name, inner in row.items() if inner not in (None, "")} for row in value]


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".tsv", ".parquet", ".arrow"])
def test_a_file_goes_through_every_format_and_back(tmp_path, ending):
    source = json_lines(tmp_path / "rows.jsonl", ALPACA)
    there, back = tmp_path / f"there{ending}", tmp_path / "back.jsonl"
    assert convert(str(source), there, cache=tmp_path).rows == 5
    convert(str(there), back, cache=tmp_path)
    assert without_null(rows_in(back, tmp_path)) == without_null(ALPACA)


@pytest.mark.parametrize(("rows", "shape"), [
    (ALPACA, "messages"), (ALPACA, "sharegpt"), (ALPACA, "prompt_completion"), (ALPACA, "alpaca"), (SYSTEM, "sharegpt"),
    (SYSTEM, "alpaca"), (SYSTEM, "prompt_completion"), (TOOLS, "messages"), (CALLS, "messages"), (CALLS, "sharegpt"),
    ([{"text": "once"}], "text")])
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_shape_keeps_what_is_learned_and_the_other_columns(tmp_path, rows, shape, ending):
    source, out = json_lines(tmp_path / "rows.jsonl", rows), tmp_path / f"out{ending}"
    convert(str(source), out, cache=tmp_path, shape=shape)
    found = rows_in(out, tmp_path)
    assert SHAPES[shape][1][0] in found[0]

    def plain(meaning):
        return [(turn.role, turn.content, turn.tool_calls, turn.name) for turn in meaning.messages], meaning.tools

    of = (lambda meaning: meaning) if shape == "text" else plain
    assert list(map(of, meanings(found))) == list(map(of, meanings(rows)))
    assert [row.get("id") for row in found] == [row.get("id") for row in rows]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_pairs_and_ratings_get_columns_of_turns(tmp_path, ending):
    user, good, bad = ({"role": role, "content": text} for role, text in
                       (("user", "u"), ("assistant", "a"), ("assistant", "b")))
    pair = {"question": "u", "chosen": "a", "rejected": "b", "id": 1}
    rated = {"conversations": [{"from": "human", "value": "u"}], "response": {"from": "gpt", "value": "a"},
             "kto_tag": True}
    for shape, row, wanted in (
            ("preference", pair, {"id": 1, "prompt": [user], "chosen": [good], "rejected": [bad]}),
            ("rating", rated, {"prompt": [user], "completion": [good], "label": True})):
        out = tmp_path / f"{shape}{ending}"
        convert(str(json_lines(tmp_path / "rows.jsonl", [row] * 3)), out, cache=tmp_path, shape=shape)
        assert rows_in(out, tmp_path) == [wanted] * 3


@pytest.mark.parametrize(("rows", "ending", "options", "says"), [
    ([{"prompt": "u", "chosen": "a", "rejected": "b"}], ".jsonl", {"shape": "rating"}, "two ratings; write it as preference"),
    ([{"prompt": "u", "completion": "a"}], ".jsonl", {"shape": "preference"}, "needs rows with prompt, chosen and rejected"),
    (TOOLS, ".jsonl", {"shape": "alpaca"}, r"rows.jsonl:1: alpaca has no place for tools; use messages or sharegpt"),
    (TOOLS, ".jsonl", {"shape": "sharegpt"}, r"rows.jsonl:1: sharegpt has no place for a tool_call_id"),
    (TOOLS, ".parquet", {}, r"rows.jsonl:[12].*column 'messages'|PARQUET cannot hold the column 'messages'"),
    ([{"text": "t", "more": {}}], ".parquet", {}, "Parquet cannot hold these rows: Cannot write struct type 'more'"),
    ([{"messages": [*SYSTEM[0]["messages"], *SYSTEM[0]["messages"][1:]]}], ".jsonl", {"shape": "prompt_completion"},
     r"holds one question and one answer, and the row has 4 turns"),
    ([{"text": "t"}], ".jsonl", {"shape": "messages"}, "the row is a text, which has no turns"),
    (SYSTEM, ".jsonl", {"shape": "text"}, "the row has turns, which a text does not keep apart"),
    ([{"text": "t", "score": 1}], ".csv", {}, r"rows.jsonl:1: the column 'score' holds a number, and CSV holds only text"),
    ([{"text": "t", "note": ""}, {"text": "u", "note": None}], ".csv", {}, r"rows.jsonl:2: .*both null and empty texts"),
    ([{"text": "t", "score": 1}, {"text": "t", "score": "one"}], ".parquet", {},
     "values of several kinds in the column 'score'"),
    ([{"text": "t"}, "{nonsense"], ".jsonl", {}, r"rows.jsonl:2: not JSON.*data clean"),
    ([{"instruction": "u", "output": "a", "messages": 1}], ".jsonl", {"shape": "messages"},
     "the column 'messages' has no part.*--drop messages"),
    ([{"text": "t"}], ".jsonl", {"drop": ["id"]}, "has no column 'id' to leave out; there are text"),
    ([{"text": "t"}], ".jsonl", {"shape": "chatml"}, "there is no shape 'chatml'; use one of messages"),
    ([{"text": "t"}], ".xlsx", {}, "does not say its format; end its name in one of .jsonl"),
    ([{"title": "t"}], ".jsonl", {"shape": "messages"}, "match no known format")])
def test_what_would_be_lost_is_refused_by_name_and_leaves_no_file(tmp_path, rows, ending, options, says):
    source, out = json_lines(tmp_path / "rows.jsonl", rows), tmp_path / f"out{ending}"
    with pytest.raises(WrongUse, match=says):
        convert(str(source), out, cache=tmp_path, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_files_that_are_there_and_sources_are_never_written_over(tmp_path):
    source = json_lines(tmp_path / "rows.jsonl", ALPACA)
    with pytest.raises(WrongUse, match="is a source itself, and sources are never changed"):
        convert(str(source), source, cache=tmp_path)
    with pytest.raises(WrongUse, match="is a source itself"):
        convert(str(tmp_path), source, cache=tmp_path)
    other = json_lines(tmp_path / "other.jsonl", [{}])
    with pytest.raises(WrongUse, match="exists already; name a new file, or remove it first"):
        convert(str(source), other, cache=tmp_path)
    with pytest.raises(WrongUse, match=r"there is no folder .*nowhere to write out.jsonl into"):
        convert(str(source), tmp_path / "nowhere" / "out.jsonl", cache=tmp_path)


def test_a_column_can_be_left_out_and_another_name_be_read(tmp_path):
    source, out = json_lines(tmp_path / "rows.jsonl", [{"frage": "u", "antwort": "a", "id": 3}]), tmp_path / "out.jsonl"
    convert(str(source), out, cache=tmp_path, shape="alpaca", name="question_answer",
            columns={"question": "frage", "answer": "antwort"}, drop=["id"])
    assert rows_in(out, tmp_path) == [{"instruction": "u", "input": "", "output": "a"}]
