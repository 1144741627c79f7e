"""Each rule on settings fires where it should and not next to it; its patch and its recipe words are good."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit_subjects import cpu, examples, gpu, here, model, script
from setting_cases import SETTING_CASES, Case

from powertrain.audit.audit import audit_subject
from powertrain.audit.config_values import vocabulary
from powertrain.audit.rules import RULES
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Framework, Setting, Subject
from powertrain.recipe.resolve import resolve
from powertrain.records.findings import Edit, Finding, Place, Rule

COMBINATIONS = 40
PLACES = {"nowhere": Circumstances(), "a GPU": here(gpu(), examples(), model()),
          "an old GPU": here(gpu("NVIDIA T4", (7, 5), 16)),
          "a CPU": here(cpu(2), examples(), model()),
          "a machine with published figures": replace(here(replace(gpu(), cores=0, basis="published"), examples(), model()),
                                                      software=None),
          "an unknown machine": replace(here(cpu(2), examples(), model()), hardware=None, software=None)}
BY_NAME = {rule.name: rule for rule in RULES}


def findings(rule: Rule[Any], case: Case, folder: Path) -> list[Finding]:
    return list(rule.find(case.subject(folder), case.where))


@pytest.mark.parametrize("name", SETTING_CASES)
def test_a_rule_fires_once_and_says_all_that_a_finding_says(name: str, tmp_path: Path) -> None:
    found = findings(BY_NAME[name], SETTING_CASES[name][0], tmp_path)
    assert len(found) == 1
    finding = found[0]
    assert (finding.rule, finding.rests_on) == (name, BY_NAME[name].rests_on)
    assert all((finding.title, finding.evidence, finding.why, finding.cure.says, finding.expected.says))
    assert not finding.why.endswith((".", " "))
    assert "None" not in finding.why
    assert finding.expected.speed is None or finding.expected.basis.startswith(("formula:", "study:"))


@pytest.mark.parametrize("name", SETTING_CASES)
def test_a_rule_is_silent_at_the_near_miss(name: str, tmp_path: Path) -> None:
    assert findings(BY_NAME[name], SETTING_CASES[name][1], tmp_path) == []


@pytest.mark.parametrize("name", SETTING_CASES)
def test_a_cure_is_a_patch_that_leaves_the_script_valid_and_the_rule_silent(name: str, tmp_path: Path) -> None:
    case = SETTING_CASES[name][0]
    subject = case.subject(tmp_path)
    edits = next(BY_NAME[name].find(subject, case.where)).cure.edits
    if not edits:
        return
    assert {edit.file for edit in edits} == {str(subject.path)}
    after = read_again(subject, patched(subject.path.read_text(encoding="utf-8"), edits))
    assert after.settings != subject.settings
    assert list(BY_NAME[name].find(after, case.where)) == []


@pytest.mark.parametrize("name", SETTING_CASES)
def test_a_cures_words_are_words_of_a_recipe(name: str, tmp_path: Path) -> None:
    words = findings(BY_NAME[name], SETTING_CASES[name][0], tmp_path)[0].cure.words
    needs_model = any(word.startswith(("method=", "lora.", "quantisation.", "data.max_length")) for word in words)
    resolve(None, [*words, *(["model.path=somewhere"] if needs_model else [])])


@pytest.mark.parametrize("name", SETTING_CASES)
def test_an_audit_of_it_names_each_cause_once(name: str, tmp_path: Path) -> None:
    for case in SETTING_CASES[name]:
        assert_each_cause_once(audit_subject(case.subject(tmp_path), case.where).findings)


@pytest.mark.parametrize("framework", ["trl", "transformers", "pytorch"])
@pytest.mark.parametrize("place", PLACES)
def test_faults_that_come_together_are_still_named_once_each(framework: Framework, place: str, tmp_path: Path) -> None:
    pool = [case.settings for case, _ in SETTING_CASES.values() if case.framework in (framework, "trl")]
    draw = random.Random(f"{framework} {place}")
    for _ in range(COMBINATIONS):
        together = {key: value for settings in draw.sample(pool, 8) for key, value in settings.items()}
        found = audit_subject(script(tmp_path / "train.py", framework, **together), PLACES[place]).findings
        assert_each_cause_once(found)
        assert len({finding.rule for finding in found}) == len(found)


def test_a_rule_says_what_it_finds_and_gives_way_to_rules_that_there_are() -> None:
    assert all(rule.about.endswith(".") and rule.rests_on for rule in RULES)
    assert all(rule.gives_way_to <= set(BY_NAME) for rule in RULES)
    assert len(BY_NAME) == len(RULES)


def assert_each_cause_once(found: tuple[Finding, ...]) -> None:
    """No two findings above low rest on the same lines."""
    taken: dict[tuple[str, int], str] = {}
    for finding in found:
        if finding.severity in ("critical", "moderate"):
            for evidence in finding.evidence[:1]:
                if evidence.place is not None and evidence.place.line:
                    line = (evidence.place.file, evidence.place.line)
                    assert line not in taken, f"{finding.rule} and {taken[line]} both rest on {evidence.what}"
                    taken[line] = finding.rule


def read_again(subject: Subject, text: str) -> Subject:
    """The subject of a patched script, which has to compile."""
    compile(text, str(subject.path), "exec")
    tree = ast.parse(text)
    call = tree.body[0].value  # type: ignore[attr-defined]
    keys = {key.partition(".")[2]: key for key in subject.settings}
    settings = {}
    for keyword in call.keywords:
        key, value = vocabulary(keys.get(keyword.arg, f"training.{keyword.arg}"), ast.literal_eval(keyword.value))
        settings[key] = Setting(value, Place(str(subject.path), keyword.lineno), ast.unparse(keyword))
    return replace(subject, settings=settings, script=Script(subject.path, text, tree, {}))


def patched(text: str, edits: tuple[Edit, ...]) -> str:
    lines = text.splitlines(keepends=True)
    for edit in sorted(edits, key=lambda edit: -edit.first):
        lines[edit.first - 1:edit.last] = [edit.text]
    return "".join(lines)
