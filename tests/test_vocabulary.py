"""The vocabulary table: every row leads somewhere, and every trainer's key is one row."""

from __future__ import annotations

from collections import Counter

from powertrain.audit.config_values import READERS
from powertrain.audit.configs import FORMATS
from powertrain.planner import BY_NAME
from powertrain.recipe.conversions import CONVERSIONS, GROUPS
from powertrain.recipe.schema import known_keys
from powertrain.recipe.vocabulary import NOT_IN_RECIPES, find, rows, values


def test_what_a_row_leads_to_exists() -> None:
    for row in rows():
        places = {"converted": {**CONVERSIONS, **values()}, "together": GROUPS, "renamed": known_keys(),
                  "same": [*known_keys(), "data", "model"]}
        if row.fate == "planned" or row.here.startswith("techniques."):
            assert not row.here or row.here.split(".")[1] in BY_NAME, row
        elif row.fate in places:
            tables = ("optimizer.", "objective.")        # whose settings their own table checks
            assert row.here in places[row.fate] or row.here.startswith(tables), row      # type: ignore[operator]
        assert row.audit in {*READERS, *values()} or not row.audit.endswith("()"), row
        assert row.why or row.here, row


def test_a_reason_is_a_sentence_and_not_the_name_of_one() -> None:
    assert not [row for row in rows() if row.why and " " not in row.why]
    assert not [row for row in rows() if row.fate in ("ignored", "refused") and len(row.why.split()) < 3]


def test_nobody_s_key_has_two_rows() -> None:
    twice = [pair for pair, number in Counter((row.key, name) for row in rows() for name in row.by).items() if number > 1]
    assert not twice


def test_every_reader_and_conversion_is_used() -> None:
    of_audits = {name for name in values() if name.endswith("()")}
    assert {*READERS, *of_audits} == {row.audit for row in rows() if row.audit.endswith("()")}
    assert not {*READERS} & of_audits
    assert {*CONVERSIONS, *values()} - of_audits == {row.here for row in rows() if row.fate == "converted"} | {
        row.key for row in rows() if row.here in ("method", "grouping", "objective") and row.fate == "together"}
    assert set(GROUPS) == {row.here for row in rows() if row.fate == "together"}
    assert all("*" in table for table in values().values()), "every value has a row"


def test_the_keys_that_give_a_format_away_are_its_trainer_s() -> None:
    for config in FORMATS:
        assert not [key for key in config.own if not config.has_top(key)], config.name


def test_a_key_means_in_a_recipe_what_most_trainers_mean_by_it() -> None:
    assert find("batch_size").here == "batch"                                   # type: ignore[union-attr]
    assert find("eval_interval").here == "eval_epochs"                          # type: ignore[union-attr]
    assert find("eval_interval", "nanogpt").here == "eval_steps"                # type: ignore[union-attr]
    assert find("zero_optimization") is None, "what launches a training is no key of a recipe"
    assert find("wandb_anything").why.startswith("a run writes its progress")   # type: ignore[union-attr]
    assert not [row.key for row in rows() if row.by <= NOT_IN_RECIPES and find(row.key) is row]
