"""An audit as SARIF holds what code hosts ask of a log: rules, levels, relative paths, lines from 1, fixes that replace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from powertrain.audit.audit import audit
from powertrain.records.findings import Audit, Cure, Edit, Evidence, Expected, Finding, Place
from powertrain.report.audit import sarif

DOCUMENTS = Path(__file__).parents[1] / "audit" / "documents"
FILES = sorted(path.name for path in DOCUMENTS.iterdir() if path.is_file())

# what the 2.1.0 schema of OASIS says of each kind of object that is written here: its keys, * those without which it is none.
# Of keys joined by | one has to be there. An object has no keys besides these, but for a bag of `properties`.
KINDS: Mapping[str, str] = {
    "log": "$schema version* runs*",
    "run": "tool* columnKind invocations results",
    "tool": "driver*",
    "driver": "name* version rules",
    "rule": "id* shortDescription fullDescription help defaultConfiguration",
    "defaultConfiguration": "level",
    "invocation": "executionSuccessful* toolExecutionNotifications",
    "notification": "message* level",
    "result": "ruleId ruleIndex level kind message* locations relatedLocations fixes properties",
    "text": "text*",
    "location": "id physicalLocation message",
    "physicalLocation": "artifactLocation* region",
    "artifactLocation": "uri",
    "region": "startLine* startColumn endLine endColumn snippet",
    "fix": "description artifactChanges*",
    "change": "artifactLocation* replacements*",
    "replacement": "deletedRegion* insertedContent",
}
# the kind of what stands under a key, where that is not the key itself; of a list, of its items
UNDER = {"runs": "run", "rules": "rule", "invocations": "invocation", "toolExecutionNotifications": "notification",
         "results": "result", "locations": "location", "relatedLocations": "location", "fixes": "fix",
         "artifactChanges": "change", "replacements": "replacement", "deletedRegion": "region", "message": "text",
         "shortDescription": "text", "fullDescription": "text", "help": "text", "snippet": "text", "description": "text",
         "insertedContent": "text"}
ONE_OF = {"level": {"none", "note", "warning", "error"}, "columnKind": {"utf16CodeUnits", "unicodeCodePoints"},
          "kind": {"notApplicable", "pass", "fail", "review", "open", "informational"}, "version": {"2.1.0"}}
NOT_EMPTY, ALL_DIFFERENT = ("artifactChanges", "replacements"), ("rules", "relatedLocations", "fixes", "artifactChanges")
FROM_ONE = ("startLine", "startColumn", "endLine", "endColumn")


def faults(node: dict[str, Any], kind: str = "log") -> Iterator[str]:
    """In what an object and all under it are not what the schema requires."""
    keys = KINDS[kind].split()
    yield from (f"a {kind} without {key[:-1]}" for key in keys if key.endswith("*") and key[:-1] not in node)
    yield from (f"a {kind} has no {key}" for key in node if key not in {key.rstrip("*") for key in keys})
    for key, value in node.items():
        items = value if isinstance(value, list) else [value]
        if key in ONE_OF and kind != "driver" and value not in ONE_OF[key]:
            yield f"{key}: {value!r}"
        if (key in FROM_ONE and value < 1) or (key == "ruleIndex" and value < 0):
            yield f"{key}: {value}"
        if key == "uri" and (" " in value or "\\" in value):
            yield f"{value!r} is no reference to a file"
        if key in ("text", "uri", "id", "ruleId", "name") and not isinstance(value, (str, int)):
            yield f"{key}: {value!r}"
        if key in NOT_EMPTY and not items:
            yield f"no {key}"
        if key in ALL_DIFFERENT and len({json.dumps(item) for item in items}) < len(items):
            yield f"{key} are not all different"
        for item in items if key != "properties" else ():
            if isinstance(item, dict):
                yield from faults(item, UNDER.get(key, key))


@pytest.mark.parametrize("name", FILES)
def test_a_log_is_what_the_schema_requires(name: str) -> None:
    assert list(faults(log_of(name))) == []


def test_logs_of_nothing_and_of_a_changing_file_without_lines_are_what_the_schema_requires(tmp_path: Path) -> None:
    file = str(tmp_path / "a b.py")
    insertion = finding(Edit(file, 1, 0, "x = 1\n"), place=Place(file, 0))
    one = sarif([Audit(file, "script", {}, (insertion,), ("not read",))], "1", {file: ""}, tmp_path)
    assert [*faults(sarif([], "1", {}, tmp_path)), *faults(one)] == []


@cache
def log_of(name: str) -> dict[str, Any]:
    path = DOCUMENTS / name
    log = sarif([audit(path)], "1.0", {str(path): path.read_text(encoding="utf-8")}, DOCUMENTS)
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
    log = sarif([Audit(str(tmp_path / "a.py"), "script", {}, (finding(),))], "1", {}, tmp_path)
    assert log["runs"][0]["results"][0]["locations"] == [
        {"physicalLocation": {"artifactLocation": {"uri": "a.py"}, "region": {"startLine": 1}}}]


def test_a_last_line_without_an_end_is_replaced_up_to_its_last_column(tmp_path: Path) -> None:
    file = str(tmp_path / "sub dir" / "a.py")
    log = sarif([Audit(file, "script", {}, (finding(Edit(file, 2, 2, "y = 3\n"), place=Place(file, 2)),))], "1",
                {file: "x = 1\ny = 2"}, tmp_path)
    change = log["runs"][0]["results"][0]["fixes"][0]["artifactChanges"][0]
    assert change["artifactLocation"]["uri"] == "sub%20dir/a.py"
    assert change["replacements"][0]["deletedRegion"] == {"startLine": 2, "startColumn": 1, "endLine": 2, "endColumn": 6}


def test_a_file_outside_the_root_keeps_its_whole_path(tmp_path: Path) -> None:
    log = sarif([Audit("/elsewhere/a.py", "script", {}, (finding(place=Place("/elsewhere/a.py", 3)),))], "1", {}, tmp_path)
    place = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "file:///elsewhere/a.py"
