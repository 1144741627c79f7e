"""The counted decoder against the built one."""

import pytest

from powertrain.facts.model import model_facts
from powertrain.models.config import FAMILIES, make_config
from powertrain.models.decoder import Decoder


def config_of(family, **changes):
    return make_config(family, vocabulary=51, layers=2, width=64, heads=4, context=40, **changes)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_decoder(family):
    config = config_of(family)
    model = model_facts(config)
    assert model.parameters == model.trainable == sum(weight.numel() for weight in Decoder(config).parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_each_shape_is_that_of_the_decoders_weight_of_this_name(family):
    config = config_of(family)
    built = {name: tuple(weight.shape) for name, weight in Decoder(config).named_parameters()
             if not name.startswith("blocks.1.")}
    assert model_facts(config).shapes == built


def test_grouped_heads_free_head_widths_and_absent_biases_are_counted_too():
    for family, changes in (("llama", {"kv_heads": 2}), ("qwen3", {"kv_heads": 1, "head_width": 20}),
                            ("gemma", {"head_width": 32}), ("gpt2", {"bias": False}),
                            ("llama", {"tied_head": True}), ("gpt2", {"tied_head": False})):
        config = config_of(family, **changes)
        assert model_facts(config).parameters == sum(weight.numel() for weight in Decoder(config).parameters())


def test_products_are_counted_in_the_linear_layers_and_the_head_alone():
    model = model_facts(config_of("gpt2"))
    assert model.matmul_parameters == 2 * (64 * 3 * 64 + 64 * 64 + 2 * 64 * 256)
    assert model.head_parameters == 51 * 64
