"""An audit as SARIF holds what code hosts ask of a log: rules, levels, relative paths, lines from 1, fixes that replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from powertrain.diagnosis.audit.audit import audit
from powertrain.records.findings import Audit, Cure, Edit, Evidence, Expected, Finding, Place
from powertrain.report.audit_sarif import write

DOCUMENTS = Path(__file__).parents[1] / "diagnosis" / "audit" / "documents"
FILES = sorted(path.name for path in DOCUMENTS.iterdir() if path.is_file())


def log_of(name: str) -> dict[str, Any]:
    path = DOCUMENTS / name
    log = write([audit(path)], "1.0", {str(path): path.read_text(encoding="utf-8")}, DOCUMENTS)
    return json.loads(json.dumps(log))           # what cannot be JSON is found here


@pytest.mark.parametrize("name", FILES)
def test_a_log_has_its_version_and_one_tool_with_unique_rules(name: str) -> None:
    log = log_of(name)
    assert (log["version"], log["$schema"]) == ("2.1.0", "https://json.schemastore.org/sarif-2.1.0.json")
    driver = log["runs"][0]["tool"]["driver"]
    assert {"name", "version", "rules"} <= set(driver)
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))
    assert all(rule["shortDescription"]["text"] and rule["help"]["text"] for rule in driver["rules"])


@pytest.mark.parametrize("name", FILES)
def test_every_result_has_a_known_rule_a_level_and_a_message(name: str) -> None:
    run = log_of(name)["runs"][0]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note"), "what is good is no alert"
        assert result["message"]["text"]


@pytest.mark.parametrize("name", FILES)
def test_every_place_is_a_relative_path_and_a_line_of_the_file(name: str) -> None:
    lines = len((DOCUMENTS / name).read_text(encoding="utf-8").splitlines())
    for result in log_of(name)["runs"][0]["results"]:
        assert len(result["locations"]) == 1, "several would mean that each of them has to be mended"
        for location in (*result["locations"], *result.get("relatedLocations", ())):
            place = location["physicalLocation"]
            assert place["artifactLocation"]["uri"] == name
            assert 1 <= place["region"]["startLine"] <= lines


@pytest.mark.parametrize("name", FILES)
def test_every_fix_replaces_regions_of_the_file(name: str) -> None:
    lines = len((DOCUMENTS / name).read_text(encoding="utf-8").splitlines())
    for result in log_of(name)["runs"][0]["results"]:
        for fix in result.get("fixes", ()):
            assert fix["description"]["text"]
            for change in fix["artifactChanges"]:
                assert change["artifactLocation"]["uri"] == name
                for replacement in change["replacements"]:
                    region = replacement["deletedRegion"]
                    assert 1 <= region["startLine"] <= region["endLine"] <= lines + 1
                    assert (region["startColumn"], isinstance(replacement["insertedContent"]["text"], str)) == (1, True)


def finding(*edits: Edit, place: Place | None = None) -> Finding:
    return Finding("a_rule", "low", "title", "why", "fact", (Evidence("x", place),), Expected("", "none"), Cure("Do", edits))


def test_a_finding_on_the_whole_file_stands_at_its_first_line(tmp_path: Path) -> None:
    log = write([Audit(str(tmp_path / "a.py"), "script", {}, (finding(),))], "1", {}, tmp_path)
    assert log["runs"][0]["results"][0]["locations"] == [
        {"physicalLocation": {"artifactLocation": {"uri": "a.py"}, "region": {"startLine": 1}}}]


def test_a_last_line_without_an_end_is_replaced_up_to_its_last_column(tmp_path: Path) -> None:
    file = str(tmp_path / "sub dir" / "a.py")
    log = write([Audit(file, "script", {}, (finding(Edit(file, 2, 2, "y = 3\n"), place=Place(file, 2)),))], "1",
                {file: "x = 1\ny = 2"}, tmp_path)
    change = log["runs"][0]["results"][0]["fixes"][0]["artifactChanges"][0]
    assert change["artifactLocation"]["uri"] == "sub%20dir/a.py"
    assert change["replacements"][0]["deletedRegion"] == {"startLine": 2, "startColumn": 1, "endLine": 2, "endColumn": 6}


def test_a_file_outside_the_root_keeps_its_whole_path(tmp_path: Path) -> None:
    log = write([Audit("/elsewhere/a.py", "script", {}, (finding(place=Place("/elsewhere/a.py", 3)),))], "1", {}, tmp_path)
    place = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "file:///elsewhere/a.py"
