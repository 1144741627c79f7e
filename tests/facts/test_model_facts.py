"""The counted decoder against the built one."""

import pytest

from powertrain.facts.model import model_facts
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import FAMILIES, make_config
from powertrain.models.decoder import Decoder
from powertrain.records import WrongUse


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", [{}, {"use_dora": True}, {"kind": "lslora"}])
def test_adapters_are_counted_as_they_are_built(family, change):
    config, adapters = config_of(family), AdapterConfig(r=4, **change)
    facts = model_facts(config, method="lora", path="folder", adapters=adapters, frozen_dtype="bf16")
    model = Decoder(config)
    add_adapters(model, adapters)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert facts.trainable == facts.adapter_parameters == trained
    assert facts.parameters == sum(weight.numel() for weight in model.parameters())
    assert facts.matmul_parameters == model_facts(config).matmul_parameters
    assert (facts.method, facts.path, facts.frozen_dtype, facts.adapted_layers) == ("lora", "folder", "bf16", (0, 1))
    built = {name.replace(".base.", "."): tuple(weight.shape) for name, weight in model.named_parameters()
             if not name.startswith("blocks.1.")}
    assert facts.shapes == built


def test_targets_name_the_blocks_and_modules_that_are_counted():
    config = config_of("llama", kv_heads=2)
    some = model_facts(config, method="lora", adapters=AdapterConfig(r=3, target_modules=("k_proj", "down_proj")))
    assert some.adapter_parameters == 2 * (3 * (64 + 32) + 3 * (config.mlp_width + 64))
    upper = model_facts(config, method="lora", adapters=AdapterConfig(r=3, target_modules=r"model\.layers\.1\.mlp\..*"))
    assert upper.adapted_layers == (1,)
    assert {name.split(".")[1] for name in upper.shapes if "adapters" in name} == {"1"}
    with pytest.raises(WrongUse, match="nosuch"):
        model_facts(config, method="lora", adapters=AdapterConfig(target_modules=("nosuch",)))


def test_full_training_of_a_pretrained_model_trains_all_of_it():
    facts = model_facts(config_of("llama"), method="full", path="folder")
    assert facts.trainable == facts.parameters
    assert (facts.adapter_parameters, facts.adapted_layers) == (0, ())
