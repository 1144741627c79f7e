"""Facts go to a file and come back as they were."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from powertrain.facts.model import facts_from_json
from powertrain.records import Facts, Reached, UnknownFact, to_plain


def test_facts_come_back_equal(facts: Facts) -> None:
    hardware = replace(facts.hardware, compute_capability=(9, 0), speeds={"native": Reached(0.1, 0.2, 0.3, 4)})
    whole = replace(facts, hardware=hardware)
    assert facts_from_json(json.loads(json.dumps(to_plain(whole)))) == whole


def test_facts_with_fields_of_another_version_are_unknown(facts: Facts) -> None:
    plain = to_plain(facts)
    plain["model"]["colour"] = "green"
    with pytest.raises(UnknownFact, match="another version"):
        facts_from_json(plain)
