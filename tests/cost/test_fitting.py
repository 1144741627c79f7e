"""What fits the memory."""

from __future__ import annotations

import dataclasses

import pytest

from powertrain.cost.fitting import largest_micro_batch, largest_pass, total_bytes, with_passes_of
from powertrain.cost.workload import Workload
from powertrain.facts.model import model_facts
from powertrain.models.config import make_config
from powertrain.records import ModelFacts

MODEL: ModelFacts = model_facts(make_config("llama", vocabulary=4000, layers=4, width=128, context=256)[0])
STEP = Workload(examples=64, block=128, micro_batch=64, attention_saves_scores=False)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_the_largest_micro_batch_fits_and_one_more_example_does_not(share: float) -> None:
    memory_bytes = round(share * total_bytes(MODEL, STEP))
    examples = largest_micro_batch(MODEL, STEP, memory_bytes)
    assert 1 <= examples < 64
    assert total_bytes(MODEL, with_passes_of(STEP, examples)) <= memory_bytes
    assert total_bytes(MODEL, with_passes_of(STEP, examples + 1)) > memory_bytes


def test_what_fits_whole_is_not_split_and_what_does_not_fit_at_all_has_no_pass() -> None:
    assert largest_micro_batch(MODEL, STEP, total_bytes(MODEL, STEP)) == 64
    assert largest_micro_batch(MODEL, STEP, 1 << 20) == 0
    assert largest_pass(MODEL, STEP, 1 << 20) == {"examples": 0}
    assert largest_pass(MODEL, STEP, 1 << 40) == {"examples": 64, "tokens": 64 * 128, "bytes": total_bytes(MODEL, STEP)}


def test_packed_passes_are_fitted_by_their_tokens() -> None:
    packed = dataclasses.replace(STEP, packed_tokens=8192, lengths={"min": 10, "p50": 100, "max": 300})
    memory_bytes = total_bytes(MODEL, packed) // 2
    examples = largest_micro_batch(MODEL, packed, memory_bytes)
    fitted = with_passes_of(packed, examples)
    assert fitted.packed_tokens == 128 * examples < 8192
    assert total_bytes(MODEL, fitted) <= memory_bytes
