"""Adapter files: PEFT loads ours, we load PEFT's, with equal logits and gradients; what does not fit says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapted_models import adapted, disturb
from powertrain.models.adapters.attached import adapters_of, merged
from powertrain.models.adapters.files import BY_ROW, load_adapter, read_adapter_config, row_order, save_adapter, save_model
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import load_folder, save_folder
from powertrain.records import Batch, WrongUse

MakeModel, MakeBatch = Callable[..., Decoder], Callable[..., Batch]
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")      # peft asks it

LORA = AdapterConfig(r=4, alpha=8)
KINDS = {"lora": LORA, "rslora": replace(LORA, use_rslora=True), "dora": replace(LORA, use_dora=True)}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": {}, "gpt_neox": {}, "phi3": {"kv_heads": 2},
                                       "qwen2": {"kv_heads": 2}}
SOME = {"llama": ("q_proj", "up_proj"), "gpt2": ("c_attn",), "gpt_neox": ("query_key_value", "dense_4h_to_h"),
        "phi3": ("qkv_proj",), "qwen2": ("k_proj", "v_proj", "down_proj")}
CASES = [(family, kind, targets) for family in FAMILIES for kind in KINDS for targets in ("all-linear", SOME[family])
         if kind != "rslora" or targets == "all-linear"]
CASE = pytest.mark.parametrize(("family", "kind", "targets"), CASES, ids=[f"{f}-{k}-{'all' if isinstance(t, str) else 'some'}"
                                                                         for f, k, t in CASES])
LENGTHS = (5, 1, 33)
TOLERANCE = 2e-5          # fp32, logits around 1: only the order of sums differs


def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def logits_of(model: Any, batch: Batch) -> Tensor:
    """What a transformers or PEFT model makes of each document alone."""
    return torch.cat([model(tokens[None]).logits[0] for tokens in batch.tokens.split(batch.lengths)])


def peft_config(config: AdapterConfig, family: str, **more: Any) -> Any:
    from peft import LoraConfig

    targets = config.target_modules if isinstance(config.target_modules, str) else [*config.target_modules]
    return LoraConfig(r=config.r, lora_alpha=int(config.alpha), target_modules=targets, use_rslora=config.use_rslora,
                      use_dora=config.use_dora, fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM", **more)


@CASE
def test_peft_loads_what_we_save_with_equal_logits(family: str, kind: str, targets: Any, tmp_path: Path, tiny_model: MakeModel,
                                                   flat_batch: MakeBatch) -> None:
    import peft

    model, batch = tiny_model(family, **FAMILIES[family]), flat_batch(LENGTHS)
    save_folder(model, tmp_path / "base")
    plain = model(batch)
    ours = adapted(model, replace(KINDS[kind], target_modules=targets))(batch)
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(transformers_model(tmp_path / "base"), tmp_path / "adapter")
    assert (ours - plain).abs().max() > 0.05
    torch.testing.assert_close(logits_of(theirs, batch), ours, atol=TOLERANCE, rtol=1e-5)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {key.replace(".default", "") for key in theirs.state_dict() if ".lora_" in key} == {
        key + (".weight" if key.endswith("vector") else "") for key in saved}


@CASE
def test_we_load_what_peft_saved_with_equal_logits_and_gradients(family: str, kind: str, targets: Any, tmp_path: Path,
                                                                 tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    import peft

    batch, config = flat_batch(LENGTHS), replace(KINDS[kind], target_modules=targets)
    save_folder(tiny_model(family, **FAMILIES[family]), tmp_path / "base")
    theirs = peft.get_peft_model(transformers_model(tmp_path / "base"), peft_config(config, family))
    disturb(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    model = load_folder(tmp_path / "base")
    loaded = load_adapter(model, tmp_path / "adapter")
    assert (loaded.r, loaded.alpha, loaded.use_dora, loaded.use_rslora) == (4, 8, config.use_dora, config.use_rslora)
    losses = [F.cross_entropy(logits, batch.targets) for logits in (model(batch), logits_of(theirs, batch))]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-6)
    for loss in losses:
        loss.backward()                                                          # type: ignore[no-untyped-call]
    gradients = {key.replace(".default", ""): p.grad for key, p in theirs.named_parameters() if p.requires_grad}
    compared = {}
    for slot, adapter in adapters_of(model):
        for name, parameter in adapter.tensors().items():
            assert parameter.grad is not None
            rows = row_order(slot, model.config) if name in BY_ROW else slice(None)
            key = f"base_model.model.{slot.theirs}.{name}" + (".weight" if name.endswith("vector") else "")
            compared[key] = parameter.grad[rows]
    torch.testing.assert_close(compared, gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_merged_model_is_what_peft_merges(family: str, tmp_path: Path, tiny_model: MakeModel) -> None:
    import peft

    model = tiny_model(family)
    save_folder(model, tmp_path / "base")
    adapted(model, KINDS["dora"])
    save_adapter(model, tmp_path / "adapter", base="base")
    theirs = peft.PeftModel.from_pretrained(transformers_model(tmp_path / "base"), tmp_path / "adapter").merge_and_unload()
    save_folder(merged(model), tmp_path / "merged")
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in theirs.state_dict().items():
        if name in ours:
            torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("config", [*KINDS.values(), replace(LORA, kind="lslora", sigma=0.5, regularisation=0.1)],
                         ids=[*KINDS, "lslora"])
def test_saving_and_loading_changes_no_bit_and_draws_nothing(config: AdapterConfig, tmp_path: Path, tiny_model: MakeModel,
                                                             flat_batch: MakeBatch) -> None:
    model, batch = adapted(tiny_model("gpt_neox"), config), flat_batch(LENGTHS)
    save_adapter(model, tmp_path, base="some/base")
    other = tiny_model("gpt_neox")
    before = torch.get_rng_state()
    loaded = load_adapter(other, tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    assert replace(loaded, target_modules="all-linear") == replace(config, regularisation=loaded.regularisation)
    assert config.kind == "lora" or loaded.regularisation == 0.1
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name
        assert one.requires_grad == two.requires_grad
    assert torch.equal(model(batch), other(batch))


def test_a_decoder_saves_and_names_its_base(tmp_path: Path, tiny_model: MakeModel) -> None:
    save_folder(tiny_model("llama"), tmp_path / "base")
    model = load_folder(tmp_path / "base")

    class Tokenizer:
        def save(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    save_model(adapted(model, LORA), tmp_path / "adapter", Tokenizer())
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(tmp_path / "base")
    assert described["target_modules"] == sorted(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors",
                                                                       "tokenizer.json"}


def test_the_files_of_lslora_say_that_peft_has_no_such_kind(tmp_path: Path, tiny_model: MakeModel) -> None:
    import peft

    save_folder(tiny_model("llama"), tmp_path / "base")
    save_adapter(adapted(tiny_model("llama"), replace(LORA, kind="lslora")), tmp_path / "adapter", base="base")
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["peft_type"] == "LSLORA"
    assert "PEFT does not have" in described["note"]
    with pytest.raises(KeyError, match="LSLORA"):
        peft.PeftModel.from_pretrained(transformers_model(tmp_path / "base"), tmp_path / "adapter")


@pytest.mark.parametrize("more", [{"layers_to_transform": [1]}, {"exclude_modules": ["v_proj"]},
                                  {"layers_to_transform": 0, "layers_pattern": "layers"}], ids=str)
def test_some_layers_only_as_peft_chose_them(more: dict[str, Any], tmp_path: Path, tiny_model: MakeModel,
                                             flat_batch: MakeBatch) -> None:
    import peft

    batch = flat_batch(LENGTHS)
    save_folder(tiny_model("llama"), tmp_path / "base")
    theirs = peft.get_peft_model(transformers_model(tmp_path / "base"),
                                 peft_config(replace(LORA, target_modules=("q_proj", "v_proj")), "llama", **more))
    disturb(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    model = load_folder(tmp_path / "base")
    loaded = load_adapter(model, tmp_path / "adapter")
    assert len(list(adapters_of(model))) == len(loaded.target_modules) == 2
    torch.testing.assert_close(model(batch), logits_of(theirs, batch), atol=TOLERANCE, rtol=1e-5)
    save_adapter(model, tmp_path / "again", base=str(tmp_path / "base"))
    again = peft.PeftModel.from_pretrained(transformers_model(tmp_path / "base"), tmp_path / "again")
    torch.testing.assert_close(logits_of(again, batch), model(batch), atol=TOLERANCE, rtol=1e-5)


def test_a_regular_expression_of_peft_is_read(tmp_path: Path, tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    import peft

    pattern, batch = r".*\.1\.self_attn\.[qv]_proj", flat_batch(LENGTHS)
    save_folder(tiny_model("llama"), tmp_path / "base")
    theirs = peft.get_peft_model(transformers_model(tmp_path / "base"),
                                 peft_config(replace(LORA, target_modules=pattern), "llama"))
    disturb(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    model = load_folder(tmp_path / "base")
    assert load_adapter(model, tmp_path / "adapter").target_modules == pattern
    torch.testing.assert_close(model(batch), logits_of(theirs, batch), atol=TOLERANCE, rtol=1e-5)
    save_adapter(model, tmp_path / "again", base=str(tmp_path / "base"))
    again = tiny_model("llama")
    load_adapter(again, tmp_path / "again")
    assert [slot for slot, _ in adapters_of(again)] == [slot for slot, _ in adapters_of(model)]


def test_names_that_this_base_does_not_have_are_passed_over_where_others_match(tmp_path: Path, tiny_model: MakeModel) -> None:
    """PEFT takes a list for many families; the file holds what was found."""
    save_adapter(adapted(tiny_model("llama"), replace(LORA, target_modules=("q_proj",))), tmp_path, base="base")
    edit(tmp_path, target_modules=["q_proj", "query_key_value"])
    model = tiny_model("llama")
    assert load_adapter(model, tmp_path).target_modules == ("q_proj",)
    assert {slot.name for slot, _ in adapters_of(model)} == {"q_proj"}


def test_half_precision_files_are_trained_in_fp32(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = adapted(tiny_model("llama"), LORA)
    save_adapter(model, tmp_path, base="base")
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    other = tiny_model("llama")
    load_adapter(other, tmp_path)
    for (_, one), (_, two) in zip(adapters_of(model), adapters_of(other), strict=True):
        assert two.A.dtype == torch.float32
        assert torch.equal(two.A, one.A.bfloat16().float())


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(("family", "asked", "message"), [
    ("llama", {"width": 96}, r"made for org/base, belongs to another base: its model.layers.0.self_attn.q_proj is 48 x 48, "
                             r"and in this llama of 2 layers it is 96 x 96; load the base"),
    ("llama", {"kv_heads": 2}, r"its model.layers.0.self_attn.k_proj is 48 x 48, and in this llama of 2 layers it is 16 x 48"),
    ("llama", {"mlp_width": 64}, r"its model.layers.0.mlp.gate_proj is 128 x 48, and in this llama of 2 layers it is 64 x 48"),
    ("llama", {"layers": 1}, r"it adapts model.layers.1.mlp.down_proj and 6 more modules, which this llama of 1 layers does "
                             r"not have"),
    ("llama", {"layers": 3}, r"this llama of 3 layers has model.layers.2.self_attn.q_proj too, which its adapter_config.json "
                             r"names and its adapter_model.safetensors does not hold"),
    ("gpt2", {}, r"it adapts model.layers.0.mlp.down_proj and 13 more modules, which this gpt2 of 2 layers does not have"),
])
def test_an_adapter_for_another_base_names_what_differs(family: str, asked: dict[str, Any], message: str, tmp_path: Path,
                                                        tiny_model: MakeModel) -> None:
    save_adapter(adapted(tiny_model("llama"), LORA), tmp_path, base="org/base")
    model = tiny_model(family, **asked)
    with pytest.raises(WrongUse, match=message):
        load_adapter(model, tmp_path)
    assert not list(adapters_of(model))


@pytest.mark.parametrize(("changes", "message"), [
    ({"peft_type": "IA3"}, "type 'IA3'; the decoder has LORA, LSLORA, so load it with model.provider=transformers"),
    ({"bias": "all"}, "trains biases as well"), ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="), ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern="),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which changes the base's weights"),
    ({"use_qalora": True, "qalora_group_size": 16}, "use_qalora=True"), ({"lora_bias": True}, "lora_bias=True"),
    ({"something_new": {"x": 1}}, "something_new="), ({"use_dora": True}, "makes them .*lora_magnitude_vector"),
    ({"r": 8}, "r=4 in model.layers.0.self_attn.q_proj and r=8 in its adapter_config.json"),
    ({"target_modules": r".*q_proj"}, "has weights for model.layers.0.mlp.down_proj, which its adapter_config.json does not"),
    ({"r": "many"}, "'r' = 'many', which should be a whole number"), ({"lora_alpha": None}, "not an adapter's"),
])
def test_what_would_compute_something_else_is_refused(changes: dict[str, Any], message: str, tmp_path: Path,
                                                      tiny_model: MakeModel) -> None:
    save_adapter(adapted(tiny_model("llama"), LORA), tmp_path, base="base")
    edit(tmp_path, **changes)
    with pytest.raises(WrongUse, match=message):
        load_adapter(tiny_model("llama"), tmp_path)


def test_every_default_of_peft_is_accepted(tmp_path: Path, tiny_model: MakeModel) -> None:
    from peft import LoraConfig

    save_adapter(adapted(tiny_model("llama"), LORA), tmp_path, base="base")
    defaults = LoraConfig().to_dict()
    edit(tmp_path, **{key: defaults[key] for key in defaults if key not in ("r", "lora_alpha", "target_modules")})
    assert read_adapter_config(tmp_path).r == 4


def test_missing_and_damaged_files_are_named(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    with pytest.raises(WrongUse, match="no folder"):
        load_adapter(model, tmp_path / "nowhere")
    with pytest.raises(WrongUse, match=r"no adapter_config\.json in .*, so it holds no adapter"):
        load_adapter(model, tmp_path)
    with pytest.raises(WrongUse, match="the model has no adapters"):
        save_adapter(model, tmp_path, base="base")
    save_adapter(adapted(tiny_model("llama"), LORA), tmp_path, base="base")
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if not name.endswith("0.mlp.up_proj.lora_B.weight")}, file)
    with pytest.raises(WrongUse, match=r"lacks one of the two matrices of model\.layers\.0\.mlp\.up_proj"):
        load_adapter(model, tmp_path)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(3)}, file)
    with pytest.raises(WrongUse, match=r"lm_head\.weight, which is no part of a LoRA adapter"):
        load_adapter(model, tmp_path)
    file.write_bytes(b"not weights")
    with pytest.raises(WrongUse, match="damaged"):
        load_adapter(model, tmp_path)
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(WrongUse, match="pickled"):
        load_adapter(model, tmp_path)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(WrongUse, match=r"no adapter_model\.safetensors"):
        load_adapter(model, tmp_path)
