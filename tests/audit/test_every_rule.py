"""Every rule of the audit, whoever wrote it, has a case in which it fires and a near miss; there are at least forty."""

from __future__ import annotations

from code_cases import CASES
from setting_cases import SETTING_CASES

from powertrain.audit.rules import RULES

AT_LEAST = 40


def test_every_rule_has_a_firing_case_and_a_near_miss() -> None:
    assert sorted(rule.name for rule in RULES) == sorted([*CASES, *SETTING_CASES])


def test_there_are_at_least_forty_rules() -> None:
    assert len(RULES) >= AT_LEAST
