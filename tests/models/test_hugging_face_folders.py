"""Folders that we write are transformers', and theirs are ours: equal logits for every family, both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from powertrain.models.config import FAMILIES
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.families import FORMATS, from_hf_config, to_hf_config
from powertrain.models.huggingface.folder import load_folder, save_folder
from powertrain.records import Batch, WrongUse

MakeModel, MakeBatch = Callable[..., Decoder], Callable[..., Batch]
LENGTHS = (5, 1, 123)
PADDED = (7, 1, 40)       # real tokens of three rows of 40
TOLERANCE = 1e-5          # fp32, logits around 1: only the order of sums differs

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(family, {}) for family in FAMILIES],
    *[(family, {"tied_head": not row.tied_head}) for family, row in FAMILIES.items()],
    *[(family, {"kv_heads": 2}) for family, row in FAMILIES.items() if row.grouped_heads],
    *[(family, {"head_width": 16, "kv_heads": 1}) for family, row in FAMILIES.items() if row.free_head_width],
    ("gpt2", {"activation": "gelu"}), ("gpt2", {"bias": False}), ("gpt2", {"bias": False, "activation": "gelu"}),
    ("mistral", {"window": 7, "kv_heads": 3}), ("phi3", {"window": 9}), ("llama", {"end_of_text": 60}),
    ("llama", {"width": 64, "heads": 16, "kv_heads": 2, "mlp_width": 176}),                          # TinyLlama's proportions
    ("llama", {"width": 72, "heads": 9, "kv_heads": 3, "mlp_width": 192, "tied_head": True}),        # SmolLM's
]


def transformers_logits(folder: Path, batch: Batch) -> Tensor:
    """What transformers makes of each document alone. Fails if it had to invent a weight or leave one out."""
    from transformers import AutoModelForCausalLM

    model, notes = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(notes.values()), notes
    with torch.no_grad():
        return torch.cat([model.eval()(tokens[None]).logits[0] for tokens in batch.tokens.split(batch.lengths)])


@pytest.mark.parametrize(("family", "asked"), VARIANTS)
def test_a_saved_folder_gives_equal_logits_in_transformers(family: str, asked: dict[str, Any], tmp_path: Path,
                                                           tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family, **asked), flat_batch(LENGTHS)
    save_folder(model, tmp_path)
    torch.testing.assert_close(transformers_logits(tmp_path, batch), model(batch).detach(), atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize(("family", "asked"), VARIANTS)
def test_a_padded_batch_gives_the_logits_that_transformers_gives_behind_its_mask(
        family: str, asked: dict[str, Any], tmp_path: Path, tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    from transformers import AutoModelForCausalLM

    model, batch = tiny_model(family, **asked), flat_batch((len(PADDED) * max(PADDED),))
    tokens = batch.tokens.view(len(PADDED), max(PADDED))
    positions = torch.arange(max(PADDED)).repeat(len(PADDED))
    ours = model(replace(batch, positions=positions, lengths=(max(PADDED),) * len(PADDED)))
    save_folder(model, tmp_path)
    mask = torch.arange(max(PADDED)) < torch.tensor(PADDED)[:, None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(tokens, attention_mask=mask.long()).logits
    torch.testing.assert_close(ours.detach()[mask.flatten()], theirs[mask], atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize(("family", "asked"), VARIANTS)
def test_saving_and_loading_changes_no_bit(family: str, asked: dict[str, Any], tmp_path: Path, tiny_model: MakeModel,
                                           flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family, **asked), flat_batch(LENGTHS)
    save_folder(model, tmp_path)
    before = torch.get_rng_state()
    loaded = load_folder(tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(loaded(batch), model(batch))
    if asked.get("bias") is not False:
        assert loaded.config == model.config
        assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_transformers_saved_gives_equal_logits(family: str, tmp_path: Path, tiny_model: MakeModel,
                                                             flat_batch: MakeBatch) -> None:
    import transformers

    config = to_hf_config(tiny_model(family, kv_heads=2 if FAMILIES[family].grouped_heads else None).config)
    kind = getattr(transformers, FORMATS[family].architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(tmp_path)
    batch = flat_batch(LENGTHS)
    ours = load_folder(tmp_path)(batch).detach()
    torch.testing.assert_close(ours, transformers_logits(tmp_path, batch), atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_defaults_of_a_published_config_are_read_as_transformers_reads_them(family: str) -> None:
    import transformers

    config = getattr(transformers, FORMATS[family].architecture).config_class()
    full = config.to_dict() | {"sliding_window": getattr(config, "sliding_window", None)}
    ours = from_hf_config({key: value for key, value in full.items() if key in (
        "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        "n_embd", "n_layer", "n_head", "bos_token_id", "eos_token_id")})
    assert ours == from_hf_config(full)


def test_a_half_precision_model_is_saved_as_it_is_and_loaded_in_fp32(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = tiny_model("llama").bfloat16()
    save_folder(model, tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_folder(tmp_path)
    assert loaded.norm.weight.dtype == torch.float32
    assert torch.equal(loaded.norm.weight, model.norm.weight.float())


def test_dropout_is_the_callers(tmp_path: Path, tiny_model: MakeModel) -> None:
    save_folder(tiny_model("gpt2", dropout=0.3), tmp_path)
    assert load_folder(tmp_path).config.dropout == 0
    assert load_folder(tmp_path, dropout=0.1).config.dropout == 0.1


def test_gpt2_as_it_was_published_loads(tmp_path: Path, tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    """Names without the prefix, masks among the weights, defaults left out."""
    model, batch = tiny_model("gpt2", mlp_width=192), flat_batch((5,))
    save_folder(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128) for i in range(2)}
    save_file(old, tmp_path / "model.safetensors")
    edit_config(tmp_path, n_inner=None, activation_function="gelu_new")
    assert torch.equal(load_folder(tmp_path)(batch), model(batch))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(("family", "changes", "message"), [
    ("llama", {"model_type": "t5"}, "type 't5'; the decoder loads gpt2, gpt_neox, llama"),
    ("llama", {"hidden_size": None}, "no 'hidden_size'"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0}},
     "rotary positions by 'dynamic'.*model.provider=transformers"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
     "different rotary positions in different layers"),
    ("llama", {"rope_scaling": {"type": "llama3", "factor": 2}}, "positions by 'llama3' without 'low_freq_factor'"),
    ("llama", {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
     "4 is not below 1"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "cannot be scaled 0 times"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "phi3 cannot have linear scaling"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1, 1], "long_factor": [1]}}, "2 factors for 4 pairs"),
    ("llama", {"hidden_act": "relu"}, "activation 'relu'"),
    ("llama", {"intermediate_size": 64}, r"layers.0.mlp.gate_proj.weight is \(128, 48\) in the folder.*\(64, 48\)"),
    ("gpt2", {"n_inner": 64}, r"h.0.mlp.c_fc.weight is \(48, 192\) in the folder.*\(48, 64\)"),
    ("llama", {"num_hidden_layers": 1}, "has no place for 9 weights of the folder.*layers.1"),
    ("llama", {"num_hidden_layers": 3}, "the folder lacks 9 weights.*layers.2"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\).*method=qlora"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding window in some layers"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding window in some layers"),
])
def test_a_model_that_would_compute_something_else_is_refused(family: str, changes: dict[str, Any], message: str,
                                                              tmp_path: Path, tiny_model: MakeModel) -> None:
    save_folder(tiny_model(family), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(WrongUse, match=message):
        load_folder(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path: Path, tiny_model: MakeModel) -> None:
    with pytest.raises(WrongUse, match="no folder"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(WrongUse, match=r"no .*config\.json"):
        load_folder(tmp_path)
    save_folder(tiny_model("gpt2"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(WrongUse, match="damaged"):
        load_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WrongUse, match="pickled"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WrongUse, match="not whole JSON"):
        load_folder(tmp_path)


def test_the_tokenizer_goes_into_the_folder(tmp_path: Path, tiny_model: MakeModel) -> None:
    class Tokenizer:
        def save(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    save_folder(tiny_model("gpt2"), tmp_path, Tokenizer())
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors",
                                                          "tokenizer.json"}


def test_neox_without_parallel_residual_and_with_another_share(tmp_path: Path, tiny_model: MakeModel,
                                                               flat_batch: MakeBatch) -> None:
    plain = tiny_model("gpt_neox")
    model = Decoder(replace(plain.config, parallel_residual=False, rotary_share=0.5, rotary_base=500.0))
    model.load_state_dict(plain.state_dict())
    save_folder(model, tmp_path)
    batch = flat_batch(LENGTHS)
    torch.testing.assert_close(transformers_logits(tmp_path, batch), model(batch).detach(), atol=TOLERANCE, rtol=1e-5)
    assert load_folder(tmp_path).config == model.config
