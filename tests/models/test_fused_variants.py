"""Blocks written by hand in every shape that a decoder may have, and with adapters wherever there may be one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fused_blocks import METHODS, ByHand, distance, gradients, make_model
from torch import Tensor

from adapted_models import make_base, with_adapter
from powertrain.models.adapters.targets import find_slots
from powertrain.models.config import FAMILIES
from powertrain.models.decoder import Block
from powertrain.models.kernels.attention import Attention, bmm_attention, ragged_attention, sdpa_attention
from powertrain.techniques.frozen_backward import RecordedFrom

SHAPES: list[tuple[str, dict[str, Any]]] = [
    *[(family, {"tied_head": not row.tied_head}) for family, row in FAMILIES.items()],
    *[(family, {"kv_heads": 1}) for family, row in FAMILIES.items() if row.grouped_heads],
    *[(family, {"head_width": 8, "kv_heads": 2}) for family, row in FAMILIES.items() if row.free_head_width],
    ("gpt2", {"bias": False}), ("gpt2", {"activation": "gelu"})]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("family", "asked"), SHAPES)
def test_whatever_shape_a_decoder_has(family: str, asked: dict[str, Any], method: str) -> None:
    model = make_model(family, method, **asked)
    apart = distance(gradients(model, ByHand(model), attention=ragged_attention), gradients(model, None))
    assert max(apart.values()) < 1e-5, max(apart.items(), key=lambda item: item[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernel", [bmm_attention, ragged_attention, sdpa_attention])
@pytest.mark.parametrize(("family", "window"), [("mistral", 6), ("phi3", 1)])
def test_a_sliding_window_is_handed_to_the_kernel(family: str, window: int, kernel: Attention, method: str) -> None:
    model, whole = make_model(family, method, window=window), make_model(family, method)
    found, expected = gradients(model, ByHand(model), attention=kernel), gradients(model, None)
    assert max(distance(found, expected).values()) < 1e-5
    assert max(distance(gradients(whole, None), expected).values()) > 1e-3       # the documents are longer than it


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_on_any_linear_alone(family: str) -> None:
    names = {slot.name for slot in find_slots(make_base(family).config)}
    assert len(names) >= 3
    for name in names:
        model = with_adapter(make_base(family), target_modules=(name,)).train()
        found, expected = gradients(model, ByHand(model)), gradients(model, None)
        assert len(found) > model.config.layers
        assert max(distance(found, expected).values()) < 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_recorded_below_the_lowest_adapter(family: str) -> None:
    def make() -> Any:
        base = make_base(family, layers=3)
        upper = [slot.theirs for slot in find_slots(base.config) if slot.layer == 2]
        return with_adapter(base, target_modules=tuple(upper)).train()

    plain, model = make(), make()
    run, recorded = ByHand(model), []

    def watched(block: Block, index: int, *rest: Any) -> Tensor:
        recorded.append(torch.is_grad_enabled())
        return run(block, index, *rest)

    found, expected = gradients(model, RecordedFrom(watched, 2)), gradients(plain, None)
    assert max(distance(found, expected).values()) < 1e-5
    assert recorded == [False, False, True]
