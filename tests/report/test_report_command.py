"""`powertrain report`: from files to files, and one sentence for what is neither run nor study."""

from __future__ import annotations

import json
import subprocess
import sys

import made_studies
import pytest
from made_runs import files, on_disk, whole_run

from powertrain.cli import reporting
from powertrain.diagnosis.run_record import read_run
from powertrain.diagnosis.symptoms import symptoms_of
from powertrain.records import WrongUse
from powertrain.report import formats, run_page


def test_a_run_gets_its_report_in_three_files_and_nothing_else(tmp_path, capsys):
    folder = on_disk(tmp_path / "a", whole_run())
    before = {path.name for path in folder.iterdir()}
    reporting.report(folder, output=None, as_json=False)
    assert {path.name for path in folder.iterdir()} - before == {"report.html", "report.md", "report.json"}
    said = capsys.readouterr().out
    assert str(folder / "report.html") in said
    plain = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert plain["verdict"] in said
    assert plain["verdict"] in (folder / "report.html").read_text(encoding="utf-8")


def test_a_small_number_of_the_recipe_is_a_number(tmp_path):
    folder = on_disk(tmp_path / "a", whole_run())
    (folder / "recipe.yaml").write_text('max_grad_norm: 1e-05  # command line\n', encoding="utf-8")      # text to YAML 1.1
    reporting.report(folder, output=None, as_json=True)
    assert (folder / "report.html").is_file()


def test_a_study_gets_its_report_where_it_was_asked_for(tmp_path, capsys):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "evidence.json").write_text(json.dumps(made_studies.claims()), encoding="utf-8")
    reporting.report(folder, output=tmp_path / "new" / "place", as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["what"] == "claims"
    assert said["html"] == str(tmp_path / "new" / "place" / "report.html")
    assert [path.name for path in folder.iterdir()] == ["evidence.json"]


def test_a_report_that_is_made_again_takes_the_place_of_the_old_one(tmp_path):
    folder = on_disk(tmp_path / "a", whole_run()[:9])
    reporting.report(folder, output=None, as_json=True)
    assert "not finished" in (folder / "report.md").read_text(encoding="utf-8")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in whole_run()), encoding="utf-8")
    reporting.report(folder, output=None, as_json=True)
    assert "not finished" not in (folder / "report.md").read_text(encoding="utf-8")


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path):
    folder = on_disk(tmp_path / "a", whole_run())
    with open(folder / "events.jsonl", "a", encoding="utf-8") as file:
        file.write('{"event": "st')
    reporting.report(folder, output=None, as_json=True)


def test_half_a_character_in_a_sample_spoils_no_report(tmp_path):
    events = whole_run()
    events[22]["text"] = "broken \ud83d"
    reporting.report(on_disk(tmp_path / "a", events), output=None, as_json=True)


@pytest.mark.parametrize(("make", "words"), [
    (lambda path: None, "does not exist"), (lambda path: path.mkdir(), "holds neither a run"),
    (lambda path: (path.mkdir(), (path / "evidence.json").write_text('{"kind": ')), "not whole JSON"),
    (lambda path: (path.mkdir(), (path / "evidence.json").write_text("[]")), "no JSON object"),
    (lambda path: (path.mkdir(), (path / "recipe.yaml").write_text("name: a")), "before its first event")])
def test_what_is_neither_run_nor_study_is_refused_in_one_sentence(tmp_path, make, words):
    make(tmp_path / "x")
    with pytest.raises(WrongUse, match=words):
        reporting.report(tmp_path / "x", output=None, as_json=False)


def test_a_report_is_not_written_over_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WrongUse, match="is a file"):
        reporting.report(on_disk(tmp_path / "a", whole_run()), output=tmp_path / "file", as_json=False)


def test_reporting_loads_no_torch():
    code = "import sys, powertrain.cli.reporting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_says_what_a_diagnosis_finds_in_the_events(tmp_path):
    events = whole_run()[:-1]
    events[-12]["loss"] = float("nan")
    folder = on_disk(tmp_path / "a", events)
    page = reporting.read_page(folder)
    section = page.sections[0]
    assert section.title == "What the events say"
    found = symptoms_of(read_run(folder))
    assert found, "a loss that is not finite, and a run without an end"
    (table,) = section.blocks
    assert [row[0] for row in table.rows] == [finding.severity for finding in found]
    assert all(row[1].startswith(finding.title) for row, finding in zip(table.rows, found, strict=True))
    assert found[0].title in formats.markdown(page)
    assert found[0].title in formats.html(page)


def test_a_run_in_which_nothing_is_found_has_no_such_section(tmp_path):
    assert not any(section.title == "What the events say" for section in run_page.page(files(whole_run())).sections)


def test_a_run_that_cannot_be_diagnosed_has_a_report_that_says_why(tmp_path):
    folder = on_disk(tmp_path / "a", whole_run())
    with open(folder / "recipe.yaml", "a", encoding="utf-8") as file:
        file.write("a_key_of_another_version: 1\n")
    section = reporting.read_page(folder).sections[0]
    assert "a_key_of_another_version" in section.blocks[0].words
