"""Rules and findings: the base that checks, symptoms and audit rules share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from powertrain.records.findings import Cure, Evidence, Finding, finding, rule, rules_of, worst_first


@rule("fact: the number itself")
def negative(number: int) -> Iterator[Finding]:
    """A number is below zero."""
    if number < 0:
        yield finding("critical", "negative", "why", f"number={number}", cure="use its size", words=(f"number={-number}",))


@rule("formula: n mod 2", gives_way_to=("negative",))
def odd(number: int) -> Iterator[Finding]:
    """A number is not divisible by two."""
    if number % 2:
        yield finding("low", "odd", "why", Evidence("seen"), None, cure=Cure("add one"), numbers={"rest": 1})


ODD_FIRST = (odd, negative)


def test_a_finding_carries_its_rules_name_and_what_that_rests_on() -> None:
    found, = negative.find(-4)
    assert (found.rule, found.rests_on) == ("negative", "fact: the number itself")
    assert found.keys == found.cure.keys == ("number",)
    assert found.evidence == (Evidence("number=-4"),)


def test_rules_of_a_module_are_those_it_defines_in_the_order_of_its_lines() -> None:
    assert rules_of(sys.modules[__name__]) == (negative, odd)
    assert [one.about for one in (negative, odd)] == ["A number is below zero.", "A number is not divisible by two."]


def test_the_worst_comes_first_and_what_another_finding_explains_is_left_out() -> None:
    def names(number: int, *rules: object) -> list[str]:
        return [one.rule for one in worst_first([one for each in ODD_FIRST for one in each.find(number)], rules)]  # type: ignore[arg-type]

    assert names(-3) == ["negative", "odd"]
    assert names(-3, *ODD_FIRST) == ["negative"]
    assert names(3, *ODD_FIRST) == ["odd"]


def test_a_finding_said_twice_counts_once() -> None:
    assert len(worst_first([*negative.find(-1), *negative.find(-1)])) == 1
