"""What is derived, with its reason, and what is refused, with the cure."""

from __future__ import annotations

from typing import Any

import pytest

from powertrain.models.config import FAMILIES, make_config
from powertrain.records import WrongUse


def test_depth_and_width_are_enough() -> None:
    config, reasons = make_config("gpt2", vocabulary=65, layers=6, width=384)
    assert (config.heads, config.kv_heads, config.head_width, config.mlp_width) == (6, 6, 64, 1536)
    assert reasons["heads"] == "width / 64"
    assert reasons["mlp_width"] == "4 x width"
    assert "layers" not in reasons


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [64, 100, 128, 200, 384, 768])
def test_every_width_gets_heads_that_fit_it(family: str, width: int) -> None:
    config, reasons = make_config(family, vocabulary=65, width=width)
    assert config.heads * config.head_width == width
    assert config.head_width % 2 == 0
    assert {"layers", "heads", "mlp_width"} <= reasons.keys()


def test_a_gated_mlp_costs_what_a_plain_one_does() -> None:
    gated, _ = make_config("llama", vocabulary=65, layers=6, width=384)
    assert gated.mlp_width == 1024
    assert 3 * gated.mlp_width == 2 * 4 * 384


def test_what_was_asked_for_is_kept_and_gets_no_reason() -> None:
    config, reasons = make_config("llama", vocabulary=65, layers=3, width=96, heads=6, kv_heads=2, mlp_width=100,
                                  context=7, activation="gelu", tied_head=True, end_of_text=64)
    assert (config.heads, config.kv_heads, config.mlp_width, config.context) == (6, 2, 100, 7)
    assert config.activation == "gelu"
    assert config.tied_head
    assert reasons == {"head_width": "width / heads"}


def test_gpt2_without_biases_has_none_anywhere() -> None:
    config, _ = make_config("gpt2", vocabulary=65, bias=False)
    assert not any((config.norm_bias, config.qkv_bias, config.output_bias, config.mlp_bias))


@pytest.mark.parametrize(("family", "asked", "message"), [
    ("lama", {}, "did you mean 'llama'"),
    ("gpt2", {"width": 100, "heads": 7}, "7 heads do not divide a width of 100.*use 5 or 10 heads"),
    ("llama", {"width": 96, "heads": 6, "kv_heads": 4}, "6 heads do not share 4 kv_heads.*use 3 or 6"),
    ("llama", {"width": 15, "heads": 3}, "rotates pairs"),
    ("gpt_neox", {"width": 48, "heads": 4}, "0.25 of a head of 12"),
    ("gpt2", {"layers": 0}, "layers is 0"),
    ("gpt2", {"width": -64}, "width is -64"),
    ("gpt2", {"context": 0}, "context is 0"),
    ("gpt2", {"dropout": 1.0}, "dropout is 1.0"),
    ("gpt2", {"dropout": -0.1}, "dropout is -0.1"),
    ("gpt2", {"activation": "relu"}, "no activation 'relu'"),
    ("gpt2", {"width": 96, "heads": 6, "kv_heads": 3}, "gpt2 cannot have 3 kv_heads"),
    ("gpt2", {"width": 96, "heads": 6, "head_width": 32}, "gpt2 cannot have 6 heads of 32"),
    ("llama", {"window": 8}, "use mistral"),
    ("llama", {"bias": False}, "leave bias out"),
    ("gpt2", {"end_of_text": 65}, "token 65"),
])
def test_what_cannot_be_is_refused_with_the_cure(family: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        make_config(family, vocabulary=65, **asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_width_that_is_proposed_for_heads_that_do_not_divide_it_is_one_that_can_be(family: str) -> None:
    with pytest.raises(WrongUse, match="3 heads do not divide a width of 32") as refused:
        make_config(family, vocabulary=65, width=32, heads=3)
    width = int(str(refused.value).rpartition(" ")[2])
    assert make_config(family, vocabulary=65, width=width, heads=3)[0].width == width
