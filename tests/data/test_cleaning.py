"""Cleaning: each kind of row is taken out with its reason, the others stay as they are, and the record says all of it."""

import json

import pytest

from example_folders import json_lines
from powertrain.data.cleaning import HASHES, Rules, bands_for, clean, cut_sign, runs_of
from powertrain.records import WrongUse

ENGLISH = ["the river was high after the rain and nobody crossed the old bridge that evening because the wood was wet",
           "a small shop at the corner of the street sells bread and milk every morning before the trains begin to run again",
           "they walked through the forest for many hours and found a house of stone where an old man was reading his letters"]
GERMAN = "Der Fluss war nach dem Regen sehr hoch, und niemand ging an dem Abend über die alte Brücke, weil das Holz nass war"
OFF = Rules(near=None, unfinished_from=None, exact=False)


def asked(answer, **more):
    return {"question": f"what is it, {len(answer)}?", "answer": answer, **more}


def cleaned(tmp_path, rows, rules, **options):
    out = tmp_path / "clean.jsonl"
    found = clean(str(json_lines(tmp_path / "rows.jsonl", rows)), out, rules, cache=tmp_path, **options)
    record = [json.loads(line) for line in (tmp_path / "clean.jsonl.removed.jsonl").read_text().splitlines()]
    return found, [json.loads(line) for line in out.read_text().splitlines()], record


def test_each_kind_of_bad_row_goes_to_the_record_and_the_others_stay_as_they_are(tmp_path):
    near = ENGLISH[1].replace("again", "later")
    rows = [asked(ENGLISH[0], id=1), asked("  "), "{nonsense", asked(ENGLISH[1]), asked(near), asked(GERMAN),
            asked("so: ```python\nx = 1\n"), asked(ENGLISH[2] * 3), {**asked(ENGLISH[0]), "id": 2}]
    found, left, record = cleaned(tmp_path, rows, Rules(languages=("en",), column=None, near=0.7))
    assert left == [rows[0], rows[3]]
    assert [(entry["origin"].rpartition("rows.jsonl:")[2], entry["kind"]) for entry in record[1:]] == [
        ("2", "empty"), ("3", "unreadable"), ("5", "near duplicate"), ("6", "language"), ("7", "cut"), ("8", "cut"),
        ("9", "duplicate")]
    assert record[0]["removed"] == dict(found.removed)
    assert record[0]["rules"]["near"] == 0.7
    assert (record[0]["rows"], record[0]["kept"]) == (9, 2) == (found.rows, found.kept)
    assert record[-1]["row"] == rows[8]
    assert record[-1]["of"].endswith("rows.jsonl:1")
    assert 0.7 <= record[3]["similarity"] < 1
    assert [json.loads(line) if line.startswith('{"') else line for line in
            (tmp_path / "rows.jsonl").read_text().splitlines()] == rows           # the source is what it was


def test_pairs_of_answers_are_judged_as_pairs(tmp_path):
    first, second = ({"prompt": text, "chosen": " yes.", "rejected": " no."} for text in ENGLISH[:2])
    tie, other_answer = {**second, "rejected": " yes."}, {**first, "rejected": " " + ENGLISH[2]}
    rows = [first, {**first, "id": 2}, tie, second, {**second, "chosen": " "}, {**second, "chosen": " word" * 60}, other_answer]
    found, left, record = cleaned(tmp_path, rows, Rules(near=None))
    assert left == [first, second, other_answer]
    assert [entry["kind"] for entry in record[1:]] == ["duplicate", "tie", "empty", "cut"]
    rated = [{"prompt": prompt, "completion": " yes.", "label": True} for prompt in (ENGLISH[0], " ")]
    (tmp_path / "rated").mkdir()
    found, left, _ = cleaned(tmp_path / "rated", rated, Rules(near=None))
    assert left == rated[:1]
    assert dict(found.removed) == {"empty": 1}


def test_every_check_can_be_switched_off(tmp_path):
    rows = [asked(ENGLISH[0]), asked(ENGLISH[0]), asked(GERMAN), asked(ENGLISH[2] * 3)]
    found, left, _ = cleaned(tmp_path, rows, OFF)
    assert left == rows
    assert not found.removed


@pytest.mark.parametrize(("answer", "is_cut"), [
    ("It is done.", False), ("word " * 60 + "and then", True), ("word " * 60 + "done.", False), ("word " * 60 + "a,", True),
    ("word " * 60 + "\n- apples", False), ("word " * 60 + "\n| a | b", False), ("word " * 60 + "is 42", False),
    ("```\ncode", True), ("```\ncode\n```", False), ("字" * 300, False), ("", False), ("short and", False)])
def test_an_answer_is_cut_where_a_sentence_or_a_block_of_code_does_not_end(answer, is_cut):
    assert (cut_sign(answer, 200) is not None) == is_cut


@pytest.mark.parametrize("near", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_the_bands_find_a_pair_at_the_threshold(near):
    bands = bands_for(near)
    assert 1 - (1 - near ** (HASHES // bands)) ** bands >= 0.95


def test_texts_are_sets_of_runs_of_words_whatever_their_case_and_marks():
    assert set(runs_of("One two, THREE four", 3)) == {"one two three", "two three four"}
    assert runs_of("Short", 3) == ["short"]
    assert set(runs_of("猫が座る", 3)) == {"猫 が 座", "が 座 る"}


def test_rows_of_no_format_are_judged_by_all_their_text_or_by_a_column(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "d"},
            {"prompt": "a", "chosen": "b", "rejected": "c"}]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    exact = Rules(near=None)
    assert cleaned(tmp_path / "one", rows, exact)[1] == rows[:2]
    assert cleaned(tmp_path / "two", rows, Rules(near=None, column="chosen"))[1] == rows[:1]


@pytest.mark.parametrize(("rules", "rows", "says"), [
    (Rules(column="body"), [{"text": "t"}], "has no column 'body'; there are text"),
    (Rules(languages=("english",)), [{"text": "t"}],
     "the language 'english' is not known; use a code of two letters, one of ace, af,"),
    (Rules(near=0.0), [{"text": "t"}], "--near 0 is no share of common runs"),
    (Rules(near=1.5), [{"text": "t"}], "--near 1.5 is no share of common runs"),
    (Rules(language_from=2.0), [{"text": "t"}], "--language-from 2 is no probability"),
    (Rules(), [{"text": " "}, {"text": ""}], r"no row of .* would be left: 2 of 2 are empty, the first .*rows.jsonl:1")])
def test_rules_that_cannot_be_used_and_empty_results_leave_no_file(tmp_path, rules, rows, says):
    source = json_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(WrongUse, match=says):
        clean(str(source), tmp_path / "out.jsonl", rules, cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(("module", "rules", "says"), [
    ("rensa", Rules(), r"near duplicates need rensa.*pip install 'powertrain\[clean\]', or leave them in with --no-near"),
    ("py3langid.langid", Rules(near=None, languages=("en",)),
     r"--language needs py3langid.*pip install 'powertrain\[clean\]'")])
def test_a_missing_part_is_named_with_its_command(tmp_path, monkeypatch, module, rules, says):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    source = json_lines(tmp_path / "rows.jsonl", [{"text": "t"}])
    with pytest.raises(WrongUse, match=says):
        clean(str(source), tmp_path / "out.jsonl", rules, cache=tmp_path)
