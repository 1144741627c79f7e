"""The beginning of a run: short, whatever the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from powertrain.records import Effect, Facts, Plan, Proposal, Refusal
from powertrain.report.plan import LONGEST, MOST_ROWS, overview_rows
from powertrain.techniques import CATALOGUE

RECIPE = {"lr_scheduler_type": "cosine", "learning_rate": 3e-4}
CLAIM = Effect((1.0, 1.0), 0, basis="formula: none")


def rows(facts: Facts, on: int, remarks: int) -> list[tuple[str, str]]:
    steps = tuple(Proposal(technique(), "a long reason " * 30, CLAIM) for technique in CATALOGUE[:on])
    refused = tuple(Refusal(technique.name, "a long reason") for technique in CATALOGUE[on:])
    return overview_rows(RECIPE, facts, Plan(steps, refused, None), 10, asked="default", remarks=["a remark " * 40] * remarks)


@pytest.mark.parametrize("on", [0, 1, 8, len(CATALOGUE)])
@pytest.mark.parametrize("remarks", [0, 1, 2, 9])
def test_every_beginning_is_short_and_names_every_technique_that_is_on(facts: Facts, on: int, remarks: int) -> None:
    found = rows(facts, on, remarks)
    assert len(found) <= MOST_ROWS
    assert [title for title, _ in found if title] == [
        "Recipe", *["Notes"] * bool(remarks), "Machine", "Data", "Model", "Run", *["On"] * bool(on), "Off", "Expected"]
    text = "\n".join(words for _, words in found)
    assert all(technique.name in text for technique in CATALOGUE[:on])
    assert f"{len(CATALOGUE) - on} techniques; `powertrain plan` shows why" in text


def test_a_technique_says_what_it_does_before_why_it_is_on(facts: Facts) -> None:
    _, text = next(row for row in rows(facts, 1, 0) if row[0] == "On")
    assert text.startswith(f"{CATALOGUE[0].name}  {CATALOGUE[0].does}: a long reason")
    assert len(text) <= len(CATALOGUE[0].name) + 2 + LONGEST + 4


def test_a_pretrained_model_is_named_with_what_is_trained(facts: Facts) -> None:
    model = replace(facts.model, path="org/model", method="lora", trainable=facts.model.parameters // 10)
    found = dict(overview_rows(RECIPE, replace(facts, model=model), Plan((), (), None), 10, asked=""))
    assert "from org/model; lora: " in found["Model"]
    assert "are not known before the run" in found["Expected"]
