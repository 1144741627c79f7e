"""How weights come from a folder into the decoder: from shards, under several names, in their dtypes, once in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from powertrain.models.config import FAMILIES, make_config
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.families import from_hf_config, to_hf_config
from powertrain.models.huggingface.folder import load_folder, save_folder
from powertrain.records import Batch, WrongUse

MakeModel, MakeBatch = Callable[..., Decoder], Callable[..., Batch]
WEIGHTS = "model.safetensors"


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def shard(folder: Path, count: int) -> None:
    """Deals the weights out to `count` files, so that the parts of a fused tensor lie in different ones."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    where = {name: f"model-{1 + i % count}.safetensors" for i, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in where if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_weights_load(family: str, tmp_path: Path, tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family), flat_batch((5,))
    save_folder(model, tmp_path)
    shard(tmp_path, 3)
    assert torch.equal(load_folder(tmp_path)(batch), model(batch))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(WrongUse, match=r"no .*model-2\.safetensors.*incomplete"):
        load_folder(tmp_path)


def test_a_shard_cut_short_and_an_index_without_files_are_named(tmp_path: Path, tiny_model: MakeModel) -> None:
    save_folder(tiny_model("llama"), tmp_path)
    shard(tmp_path, 2)
    whole = (tmp_path / "model-2.safetensors").read_bytes()
    (tmp_path / "model-2.safetensors").write_bytes(whole[:-100])
    with pytest.raises(WrongUse, match=r"model-2\.safetensors is damaged"):
        load_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": null}')
    with pytest.raises(WrongUse, match="does not say which file holds which weight"):
        load_folder(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_come_in_fp32_or_in_the_dtype_they_are_stored_in(family: str, stored: torch.dtype, tmp_path: Path,
                                                                 tiny_model: MakeModel) -> None:
    model = tiny_model(family)
    save_folder(model, tmp_path)
    change_weights(tmp_path, lambda weights: {name: tensor.to(stored) for name, tensor in weights.items()})
    kept = torch.float32 if stored == torch.float64 else stored
    for asked, expected in ((None, kept), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        loaded = load_folder(tmp_path, dtype=asked).state_dict()
        assert all(torch.equal(loaded[name], tensor.to(stored).to(expected)) and loaded[name].dtype == expected
                   for name, tensor in model.state_dict().items())


def test_each_weight_keeps_a_dtype_of_its_own_and_a_fused_one_that_which_holds_its_parts(tmp_path: Path,
                                                                                         tiny_model: MakeModel) -> None:
    save_folder(tiny_model("llama").bfloat16(), tmp_path)
    change_weights(tmp_path, lambda weights: {
        name: tensor.float() if "norm" in name or "layers.0.self_attn.k_proj" in name else tensor
        for name, tensor in weights.items()})
    model = load_folder(tmp_path, dtype=None)
    fused = [block.qkv.weight.dtype for block in model.blocks]
    assert (model.norm.weight.dtype, model.embedding.weight.dtype) == (torch.float32, torch.bfloat16)
    assert fused == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_weights_stored_in_8_bits_are_refused(stored: torch.dtype, tmp_path: Path, tiny_model: MakeModel) -> None:
    save_folder(tiny_model("llama"), tmp_path)
    change_weights(tmp_path, lambda weights: {
        name: tensor.to(stored) if "q_proj" in name else tensor for name, tensor in weights.items()})
    for dtype in (None, torch.float32):
        with pytest.raises(WrongUse, match=r"q_proj.weight is stored as (I8|F8_E4M3).*give the unquantised model"):
            load_folder(tmp_path, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_without_the_prefix_load_as_in_transformers(family: str, tmp_path: Path, tiny_model: MakeModel,
                                                          flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family, tied_head=True), flat_batch((5,))
    save_folder(model, tmp_path)
    change_weights(tmp_path, lambda weights: {name.split(".", 1)[1]: tensor for name, tensor in weights.items()})
    assert torch.equal(load_folder(tmp_path)(batch), model(batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_beside_the_embedding_of_a_tied_model_is_taken_as_transformers_takes_it(
        family: str, tmp_path: Path, tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    from transformers import AutoModelForCausalLM

    model, batch = tiny_model(family, tied_head=True), flat_batch((5,))
    embedding, head = {"gpt2": ("transformer.wte.weight", "lm_head.weight"),
                       "gpt_neox": ("gpt_neox.embed_in.weight", "embed_out.weight")}.get(
                           family, ("model.embed_tokens.weight", "lm_head.weight"))
    cases: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], bool]] = [
        (lambda weights: weights | {head: weights[embedding].clone()}, True),
        (lambda weights: weights | {head: weights[embedding] * 2}, False),
        (lambda weights: {name if name != embedding else head: tensor for name, tensor in weights.items()}, True)]
    for change, tied in cases:
        save_folder(model, tmp_path)
        change_weights(tmp_path, change)
        loaded = load_folder(tmp_path)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert loaded.config.tied_head == tied
        with torch.no_grad():
            torch.testing.assert_close(loaded(batch), theirs(batch.tokens[None]).logits[0], atol=1e-5, rtol=1e-5)


def test_an_adapters_folder_is_told_from_a_models(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(WrongUse, match=r"holds an adapter, not a model; .*model\.adapter"):
        load_folder(tmp_path)


def test_a_loaded_model_knows_where_it_came_from(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    assert model.base == ""
    save_folder(model, tmp_path)
    assert load_folder(tmp_path).base == str(tmp_path)


def test_the_ids_that_begin_and_end_a_text_survive(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    model.config = replace(model.config, begin_of_text=1, end_of_text=2, other_ends=(7,))
    save_folder(model, tmp_path)
    for file in ("config.json", "generation_config.json"):
        saved = json.loads((tmp_path / file).read_text())
        assert (saved["bos_token_id"], saved["eos_token_id"]) == (1, [2, 7])
    assert load_folder(tmp_path).config == model.config
    edit_json(tmp_path / "config.json", eos_token_id=2)                     # chat models name the others elsewhere
    edit_json(tmp_path / "generation_config.json", eos_token_id=[9, 2, 7, 9, 1000])
    assert load_folder(tmp_path).config.other_ends == (9, 7)


def test_gelu_has_many_names() -> None:
    described = to_hf_config(make_config("gpt_neox", vocabulary=50)[0])
    for name, ours in (("gelu", "gelu"), ("gelu_fast", "gelu_tanh"), ("gelu_new", "gelu_tanh")):
        assert from_hf_config(described | {"hidden_act": name}).activation == ours
    with pytest.raises(WrongUse, match=r"activation 'relu'.*model\.provider=transformers"):
        from_hf_config(described | {"hidden_act": "relu"})


def test_fields_that_transformers_does_not_read_change_nothing() -> None:
    for family in ("phi3", "mistral", "qwen2"):
        config = make_config(family, vocabulary=50)[0]
        assert from_hf_config(to_hf_config(config) | {"attention_bias": True, "mlp_bias": True}) == config
    config = make_config("llama", vocabulary=50)[0]
    described = to_hf_config(config)
    described["rope_parameters"]["partial_rotary_factor"] = 0.5
    assert from_hf_config(described) == config


MEASURE = """
import json, os, sys, torch
from pathlib import Path
from powertrain.models.huggingface.folder import load_folder

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

tiny, *cases = json.loads(sys.argv[1])
for folder, dtype in cases:
    if os.fork() == 0:                               # each in a process that has loaded nothing else
        load_folder(Path(tiny))                      # what loading itself takes: code, caches
        Path("/proc/self/clear_refs").write_text("5")        # the peak starts anew
        before = status("VmRSS")
        model = load_folder(Path(folder), dtype=dtype and getattr(torch, dtype))
        found = status("VmHWM") - before, sum(weight.nbytes for weight in model.state_dict().values())
        print(json.dumps(found), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
LOADED = (("llama", "float32"), ("sharded", None), ("gpt_neox", None), ("gpt2", None), ("bf16", "float32"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of 70 MB in fp32, in one file and in shards, and a tiny one."""
    made = {}
    for family in ("llama", "gpt_neox", "gpt2"):
        made[family] = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        config, _ = make_config(family, vocabulary=4096, layers=7 if family == "llama" else 5, width=512, heads=8)
        save_folder(Decoder(config), made[family])
    made["sharded"] = tmp_path_factory.mktemp("sharded")
    (made["sharded"] / WEIGHTS).write_bytes((made["llama"] / WEIGHTS).read_bytes())
    (made["sharded"] / "config.json").write_bytes((made["llama"] / "config.json").read_bytes())
    shard(made["sharded"], 3)
    made["tiny"] = tmp_path_factory.mktemp("tiny")
    save_folder(Decoder(make_config("llama", vocabulary=50, layers=1, width=64)[0]), made["tiny"])
    made["bf16"] = tmp_path_factory.mktemp("bf16")
    save_folder(load_folder(made["llama"], dtype=torch.bfloat16), made["bf16"])
    return made


@pytest.fixture(scope="module")
def growths(folders: dict[str, Path]) -> list[tuple[int, int]]:
    """What loading adds to the peak of a process, and the bytes of the model, for each of LOADED."""
    told = [str(folders["tiny"]), *((str(folders[which]), dtype) for which, dtype in LOADED)]
    done = subprocess.run([sys.executable, "-c", MEASURE, json.dumps(told)], capture_output=True, text=True, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of a process's peak memory")
@pytest.mark.parametrize("case", range(len(LOADED)), ids=[f"{which}-{dtype}" for which, dtype in LOADED])
def test_loading_takes_the_memory_of_one_model(case: int, growths: list[tuple[int, int]]) -> None:
    growth, model = growths[case]
    assert model > 60e6
    assert growth < 1.25 * model
