"""Every rule of the audit, whoever wrote it, has a case in which it fires, a near miss, and words for what it finds."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from code_cases import CASES
from handing_cases import HANDING_CASES
from library_cases import LIBRARY_CASES
from meaning_cases import MEANING_CASES
from network_cases import NETWORK_CASES
from program_cases import PROGRAM_CASES
from refusal_cases import REFUSAL_CASES
from running_cases import RUNNING_CASES
from setting_cases import SETTING_CASES
from trl_cases import TRL_CASES

from powertrain.audit.rules import RULES
from powertrain.audit.rules.base import wording

AT_LEAST = 40
# of several files: test_projects.py, test_launched_by_commands.py, test_paths.py, test_running_rules.py, test_trl_rules.py,
# test_tool_configs.py, test_of_a_project.py, test_seen_T.py
OF_A_PROJECT = ("names_not_in_module", "command_refused", "config_refused", "file_missing",
                "packages_unlisted", "column_not_there", "answers_alone", "rank_under_other_name",
                "labels_by_old_name", "key_missing", "number_is_text",
                "template_of_other_model", "data_given_twice", "placeholder_left", "components_moved", "evaluation_never",
                "modules_out_of_reach", "template_unknown", "file_elsewhere", "folder_never_made", "path_of_author",
                "no_folder_fits", "default_config_missing", "script_missing", "team_of_author",
                "command_line_ignored", "adapter_not_there", "checkpoints_into_source",
                "format_gone", "model_not_published", "settings_refused", "data_refused", "data_not_defined", "targets_missing")
KEYS = {"title", "why", "cure", "recipe", "expected", "breaking", "accuracy", "difficulty", "parts", "cases", "rests_on",
        "gives_way_to"}


def test_every_rule_has_a_firing_case_and_a_near_miss() -> None:
    assert sorted(rule.name for rule in RULES) == sorted([
        *CASES, *SETTING_CASES, *PROGRAM_CASES, *RUNNING_CASES, *NETWORK_CASES, *MEANING_CASES, *TRL_CASES, *REFUSAL_CASES,
        *LIBRARY_CASES, *HANDING_CASES, *OF_A_PROJECT])


def test_there_are_at_least_forty_rules() -> None:
    assert len(RULES) >= AT_LEAST


def test_every_rule_has_its_words_and_no_words_are_left_over() -> None:
    assert sorted(wording()) == sorted(rule.name for rule in RULES)
    assert all(set(said) | set(case) <= KEYS for said in wording().values() for case in said.get("cases", {}).values())


@pytest.mark.parametrize("name", wording())
def test_a_rule_gives_all_the_facts_that_its_words_need(name: str) -> None:
    code = ast.parse(inspect.getsource(inspect.unwrap(next(rule.ask for rule in RULES if rule.name == name))))
    given = {item.arg for node in ast.walk(code) if isinstance(node, ast.Call) for item in node.keywords}
    assert facts_in(wording()[name]) <= given | set(wording()[name].get("parts", {}))


def facts_in(said: Any) -> set[str]:
    """Return the names in braces of all texts in a rule's words."""
    if isinstance(said, dict):
        return {name for inner in said.values() for name in facts_in(inner)}
    return {name.partition(".")[0] for _, name, _, _ in Formatter().parse(str(said)) if name}


@pytest.mark.parametrize("name", ["data_parallel", "device_map_auto", "micro_batches_synchronised", "saved_by_every_process",
                                  "scheduler_each_process"])
def test_rules_on_several_processes_name_the_command_that_does_it_right(name: str) -> None:
    assert "`powertrain train --processes N`" in wording()[name]["cure"]
    assert "(docs/many-devices.md)" in wording()[name]["cure"]
    assert (Path(__file__).parents[2] / "docs" / "many-devices.md").is_file()
