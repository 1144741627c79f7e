"""Rotary positions against transformers' own: the same bits at published sizes, the same logits in long documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.models.config import ModelConfig, RotaryScaling, make_config
from powertrain.models.decoder import Decoder, inverse_frequencies, rotary_tables
from powertrain.models.huggingface.families import from_hf_config, to_hf_config
from powertrain.models.huggingface.folder import load_folder, save_folder
from powertrain.records import Batch, WrongUse

MakeModel, MakeBatch = Callable[..., Decoder], Callable[..., Batch]
FAR = 131_072             # tokens: where one rounding of a frequency is an angle of a hundredth

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}                                                   # Llama 3.1
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}               # Qwen3
FACTORS = {"short_factor": [1.0 + i / 24 for i in range(48)], "long_factor": [1.0 + i * 1.3 for i in range(48)]}
PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 500_000.0, "rope_scaling": LLAMA3}),
    ("llama", {"rope_theta": 500_000.0, "rope_scaling": LLAMA3 | {"factor": 32.0}, "head_dim": 64}),  # Llama 3.2 1B
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_theta": 1_000_000.0}),
    ("gpt_neox", {"rotary_pct": 0.25, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("gemma", {"head_dim": 256}),
    ("qwen2", {"rope_theta": 1_000_000.0, "rope_scaling": YARN}),
    ("qwen3", {"rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}}),
    ("mistral", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    ("llama", {"rope_scaling": YARN | {"attention_factor": 1.25}}),
    ("llama", {"rope_parameters": YARN | {"factor": None, "rope_theta": 10_000.0}}),
    ("phi3", {"hidden_size": 1152, "num_attention_heads": 12, "rope_scaling": {"type": "longrope", **FACTORS},
              "max_position_embeddings": FAR}),                                                       # Phi-3 mini 128k
    ("phi3", {"hidden_size": 1152, "num_attention_heads": 12, "max_position_embeddings": FAR,
              "rope_scaling": {"type": "su", "original_max_position_embeddings": 4096, **FACTORS}}),
    ("phi3", {"partial_rotary_factor": 0.75, "hidden_size": 1536, "num_attention_heads": 12,
              "rope_scaling": {"type": "longrope", **FACTORS}, "max_position_embeddings": FAR}),      # Phi-4 mini
    ("llama", {"head_dim": 96, "rope_scaling": {"rope_type": "longrope", "factor": 32.0, **FACTORS,
                                                "original_max_position_embeddings": 4096}}),
]


def describe(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A config.json of a published shape."""
    sizes = {"model_type": family, "vocab_size": 100, "hidden_size": 1024, "num_hidden_layers": 1, "intermediate_size": 64,
             "num_attention_heads": 8, "num_key_value_heads": 4 if family != "gpt_neox" else 8, "head_dim": None,
             "max_position_embeddings": FAR}
    if family in ("gpt_neox", "phi3"):
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"]}
        del sizes["head_dim"]
    if family == "phi3":
        sizes |= {"num_key_value_heads": 12}
    return json.loads(json.dumps({k: v for k, v in (sizes | fields).items() if not (k == "head_dim" and v is None)}))


def transformers_rotary(hf: dict[str, Any]) -> Any:
    """transformers' own module for this config.json."""
    import transformers
    from transformers.models import gemma, gpt_neox, llama, mistral, phi3, qwen2, qwen3

    modules = {"llama": llama.modeling_llama.LlamaRotaryEmbedding, "mistral": mistral.modeling_mistral.MistralRotaryEmbedding,
               "qwen2": qwen2.modeling_qwen2.Qwen2RotaryEmbedding, "qwen3": qwen3.modeling_qwen3.Qwen3RotaryEmbedding,
               "phi3": phi3.modeling_phi3.Phi3RotaryEmbedding, "gemma": gemma.modeling_gemma.GemmaRotaryEmbedding,
               "gpt_neox": gpt_neox.modeling_gpt_neox.GPTNeoXRotaryEmbedding}
    given = json.loads(json.dumps(hf))               # transformers changes what it is given
    kind = given.pop("model_type")
    return modules[kind](transformers.AutoConfig.for_model(kind, **given))


def our_tables(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    batch = Batch(positions, positions, positions, (len(positions),), 0)
    found = rotary_tables(config, batch)
    assert found is not None
    return found[0][:, 0], found[1][:, 0]


@pytest.mark.parametrize(("family", "fields"), PUBLISHED)
@pytest.mark.parametrize("last", [4095, 4096, FAR - 1])
def test_cosines_and_sines_are_those_of_transformers_to_the_bit(family: str, fields: dict[str, Any], last: int) -> None:
    hf = describe(family, fields)
    positions = torch.tensor([0, 1, 17, 2048, last])
    cosines, sines = our_tables(from_hf_config(hf), positions)
    theirs = transformers_rotary(hf)(torch.zeros(1), positions[None])
    assert torch.equal(cosines, theirs[0][0])
    assert torch.equal(sines, theirs[1][0])


@pytest.mark.parametrize(("family", "fields"), PUBLISHED)
def test_a_saved_config_keeps_its_scaling_in_both_spellings(family: str, fields: dict[str, Any]) -> None:
    config = from_hf_config(describe(family, fields))
    saved = json.loads(json.dumps(to_hf_config(config)))
    assert from_hf_config(saved) == config
    if config.rotary_scaling is not None:
        del saved["rope_parameters"]
        assert from_hf_config(saved) == config       # as transformers 4 reads it
        positions = torch.tensor([0, 5000, FAR - 1])
        theirs = transformers_rotary(to_hf_config(config))(torch.zeros(1), positions[None])
        assert torch.equal(our_tables(config, positions)[0], theirs[0][0])


SCALED: list[tuple[str, RotaryScaling]] = [
    ("llama", RotaryScaling("linear", 4.0)),
    ("llama", RotaryScaling("llama3", 8.0, 32, slow_turns=1.0, fast_turns=4.0)),
    ("qwen3", RotaryScaling("yarn", 4.0, 32, 1.1386, slow_turns=1.0, fast_turns=4.0)),
    ("gpt_neox", RotaryScaling("linear", 2.0)),
    ("phi3", RotaryScaling("longrope", 4.0, 32, 1.19, short_factors=(1.0, 1.1, 1.3, 1.5), long_factors=(1.0, 2.0, 5.0, 9.0))),
]


@pytest.mark.parametrize(("family", "scaling"), SCALED)
def test_scaled_models_give_the_logits_of_transformers_in_short_and_long_documents(
        family: str, scaling: RotaryScaling, tmp_path: Path, tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    from transformers import AutoModelForCausalLM

    plain = tiny_model(family)
    model = Decoder(replace(plain.config, rotary_scaling=scaling))
    model.load_state_dict(plain.state_dict())
    save_folder(model, tmp_path)
    theirs, batch = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), flat_batch((5, 128, 1, 32, 33))
    with torch.no_grad():
        expected = torch.cat([theirs(tokens[None]).logits[0] for tokens in batch.tokens.split(batch.lengths)])
        packed = load_folder(tmp_path)(batch)
        assert (model(batch) - plain(batch)).abs().max() > 0.01          # the scaling is not a dead letter
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)


def test_longrope_stretches_each_document_by_its_own_length() -> None:
    config, _ = make_config("phi3", vocabulary=50, layers=1, width=32, heads=4, context=128)
    config = replace(config, rotary_scaling=SCALED[-1][1])
    positions = torch.cat([torch.arange(length) for length in (32, 0, 33, 4)])
    tables = rotary_tables(config, Batch(positions, positions, positions, (32, 0, 33, 4), 0))
    assert tables is not None
    assert torch.equal(tables[0][:4], tables[0][-4:])
    assert not torch.equal(tables[0][:4], tables[0][32:36])
    assert config.positions_change_at == 32
    one = torch.tensor([32])                                            # a token after 32 others, which a cache holds
    cached = rotary_tables(config, Batch(one, one, one, (1,), 0))
    assert cached is not None
    assert torch.equal(cached[0][0], tables[0][32 + 32])
    assert make_config("llama", vocabulary=50)[0].positions_change_at is None


def test_frequencies_come_from_the_cpu_whatever_the_default_device() -> None:
    config, _ = make_config("llama", vocabulary=50)
    with torch.device("meta"):
        assert inverse_frequencies(config).device.type == "cpu"


@pytest.mark.parametrize(("scaling", "message"), [
    ({"kind": "ntk", "factor": 2.0}, "no rotary scaling 'ntk'; use one of linear, llama3"),
    ({"kind": "yarn", "factor": 2.0}, "from 0 tokens"),
    ({"kind": "linear", "factor": -1.0}, "cannot be scaled -1 times"),
])
def test_a_scaling_that_cannot_be_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        RotaryScaling(**scaling)


def test_learned_positions_cannot_be_scaled() -> None:
    config, _ = make_config("gpt2", vocabulary=50)
    with pytest.raises(WrongUse, match="gpt2 cannot have linear scaling"):
        replace(config, rotary_scaling=RotaryScaling("linear", 2.0))
