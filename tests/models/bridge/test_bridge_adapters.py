"""Adapters behind the bridge are PEFT's: they load there, and PEFT's load here; also on a base in 4 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from library_models import (
    ALL,
    CONFIGS,
    LORA,
    VOCABULARY,
    Tokenizer,
    assert_close,
    finite,
    make_batch,
    our_loss,
)
from safetensors.torch import load_file, save_file

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.bridge.loading import load_bridged
from powertrain.models.bridge.model import BridgedModel, merge_bridged
from powertrain.models.huggingface.providers import AUTO_CLASSES
from powertrain.records import WrongUse

# ------------------------------------------------------------------------------------------------ adapters


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")       # PEFT asks for it
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "use_dora": True}], ids=["lora", "rslora-dora"])
def test_adapters_train_alone_and_load_in_peft(name: str, options: dict[str, Any], load: Callable[..., BridgedModel],
                                               folders: Callable[[str], Path], tmp_path: Path) -> None:
    import peft

    task = CONFIGS[name][0]
    batch = make_batch(task)
    model = load(name, "lora", adapters=AdapterConfig(r=4, alpha=8, **options), base="org/name")
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in key or "qa_outputs.modules_to_save" in key for key in trained)
    assert ("library.base_model.model.qa_outputs.modules_to_save.default.weight" in trained) == (task == "span")
    assert not any("lora_" in key for key in trained if "qa_outputs" in key or "lm_head" in key)
    assert_close(finite(model.hidden(batch)), finite(load(name).hidden(batch)), rounding=5e-6)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    expected = model.hidden(batch).detach()
    assert not torch.equal(expected, load(name).hidden(batch))
    model.save(tmp_path, Tokenizer())
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (described["inference_mode"], described["base_model_name_or_path"]) == (True, "org/name")

    torch.manual_seed(3)                     # another head than ours, until the adapter brings it
    base = getattr(transformers, AUTO_CLASSES[task]).from_pretrained(folders(name))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert_close(finite(BridgedModel(theirs, task=task).hidden(batch)), finite(expected), rounding=5e-6)
    before = torch.get_rng_state()
    again = load(name, "lora", adapter_folder=tmp_path) if task == "span" else \
        load_bridged(folders(name), task=task, method="lora", adapter_folder=tmp_path)
    if task != "span":
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(again.hidden(batch), expected)
    assert {key for key, parameter in again.named_parameters() if parameter.requires_grad} == trained.keys()
    merged = merge_bridged(again)
    assert_close(finite(merged.hidden(batch)), finite(expected), rounding=5e-6)
    assert not merged.has_adapters
    merged.save(tmp_path / "merged")
    whole = load_bridged(tmp_path / "merged", task=task, method="full")
    assert_close(finite(whole.hidden(batch)), finite(expected), rounding=5e-6)


def test_a_gradient_reaches_every_adapter(load: Callable[..., BridgedModel]) -> None:
    for name in ALL:
        model = load(name, "lora", adapters=LORA)
        our_loss(model, make_batch(CONFIGS[name][0], (5, 3, 9))).backward()
        for key, parameter in model.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, key


def test_named_modules_are_adapted_and_unknown_names_refused(load: Callable[..., BridgedModel]) -> None:
    model = load("t5", "lora", adapters=AdapterConfig(r=2, target_modules=("q", "v")))
    adapted = {key.split(".lora_")[0].rpartition(".")[2] for key, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"q", "v"}
    pattern = load("t5", "lora", adapters=AdapterConfig(r=2, target_modules=r".*decoder.*\.(q|v)"))
    assert all("decoder" in key for key, p in pattern.named_parameters() if p.requires_grad)
    assert load("t5", "lora", adapters=AdapterConfig(r=2, target_modules="wo")).has_adapters
    for wrong in (("q", "q_proj"), r".*\.q_(a|b)", "q_proj"):
        with pytest.raises(WrongUse, match=r"no module '.*q_.*its modules are q, k, v, o, wi, wo"):
            load("t5", "lora", adapters=AdapterConfig(target_modules=wrong))


def test_adapters_that_the_bridge_does_not_have_are_refused(load: Callable[..., BridgedModel], tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"lslora.*only the native decoder"):
        load("t5", "lora", adapters=AdapterConfig(kind="lslora"))
    with pytest.raises(WrongUse, match=r"no adapter_config\.json"):
        load("t5", "lora", adapter_folder=tmp_path)
    for given, message in (({"peft_type": "LSLORA"}, "only the native decoder"),
                           ({"peft_type": "NEW"}, "is not an adapter's that peft"),
                           ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}, "learns tokens and not weights"),
                           ({"peft_type": "LORA", "task_type": "CAUSAL_LM"}, "is for CAUSAL_LM, and the task here is seq2seq")):
        (tmp_path / "adapter_config.json").write_text(json.dumps(given))
        with pytest.raises(WrongUse, match=message):
            load("t5", "lora", adapter_folder=tmp_path)


def test_modules_that_peft_refuses_are_one_sentence(tmp_path: Path) -> None:
    transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1,
                                                           state_size=4)).save_pretrained(tmp_path)
    with pytest.raises(WrongUse, match=r"no such adapters on mamba.*out_proj.*lora\.target_modules"):
        load_bridged(tmp_path, task="causal", method="lora", adapters=LORA)
    allowed = AdapterConfig(r=4, target_modules=("in_proj", "x_proj"))
    model = load_bridged(tmp_path, task="causal", method="lora", adapters=allowed)
    our_loss(model, make_batch("causal")).backward()


def test_an_adapter_of_another_base_says_what_differs(load: Callable[..., BridgedModel], tmp_path: Path) -> None:
    load("t5", "lora", adapters=AdapterConfig(r=4, target_modules=("q", "wo"))).save(tmp_path)
    with pytest.raises(WrongUse, match="belongs to another base"):
        load("bart", "lora", adapter_folder=tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = next(key for key in weights if key.endswith("decoder.block.0.layer.0.SelfAttention.q.lora_A.weight"))
    save_file(weights | {name: torch.ones(4, 99)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WrongUse, match=r"SelfAttention.q.lora_A.weight is \(4, 99\), and here it is \(4, 16\)"):
        load("t5", "lora", adapter_folder=tmp_path)
    save_file({key: tensor for key, tensor in weights.items() if key != name}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WrongUse, match="which it lacks"):
        load("t5", "lora", adapter_folder=tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(WrongUse, match="never loaded"):
        load("t5", "lora", adapter_folder=tmp_path)


# ------------------------------------------------------------------------------------------------ 4 bits


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 whose linears are as wide as bitsandbytes' CPU kernel needs."""
    folder = tmp_path_factory.mktemp("wide")
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4,
                        decoder_start_token_id=0)
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("quantisation", [("nf4", True), ("fp4", False)])
def test_a_4_bit_base_computes_with_the_rounded_weights_in_training_and_evaluation(wide: Path,
                                                                                   quantisation: tuple[str, bool]) -> None:
    import bitsandbytes.functional as bnb
    from bitsandbytes.nn import Linear4bit

    batch = make_batch("seq2seq")
    model = load_bridged(wide, task="seq2seq", method="qlora", quantisation=quantisation)
    rounded = load_bridged(wide, task="seq2seq", method="full")
    packed = [name for name, module in model.network.named_modules() if isinstance(module, Linear4bit)]
    assert packed
    with torch.no_grad():
        for name in packed:
            weight = model.network.get_submodule(name).weight
            assert weight.quant_state.quant_type == quantisation[0]
            assert weight.quant_state.nested == quantisation[1]
            rounded.network.get_submodule(name).weight.copy_(bnb.dequantize_4bit(weight.data, weight.quant_state))
    expected = rounded.hidden(batch)
    assert (load_bridged(wide, task="seq2seq", method="full").hidden(batch) - expected).abs().max() > 1e-3
    for mode in (True, False, True):
        model.train(mode)
        assert_close(model.hidden(batch), expected, rounding=5e-6)


def test_adapters_learn_on_a_4_bit_base_and_go_onto_the_unquantised_one(wide: Path, tmp_path: Path) -> None:
    batch = make_batch("seq2seq")
    torch.manual_seed(0)
    model = load_bridged(wide, task="seq2seq", method="qlora", quantisation=("nf4", True), adapters=LORA)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(20):
        loss = our_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
    model.save(tmp_path)
    with pytest.raises(WrongUse, match="cannot be merged into a base in 4 bits"):
        merge_bridged(model)
    whole = load_bridged(wide, task="seq2seq", method="lora", adapter_folder=tmp_path)
    assert float(our_loss(whole, batch).detach()) < 0.7 * losses[0]
    merged = merge_bridged(whole)
    assert float(our_loss(merged, batch).detach()) < 0.7 * losses[0]


def test_widths_that_bitsandbytes_gets_wrong_on_a_cpu_are_refused(load: Callable[..., BridgedModel]) -> None:
    if torch.cuda.is_available():
        pytest.skip("only the CPU's kernel does that")
    with pytest.raises(WrongUse, match="16 wide, which bitsandbytes unpacks wrongly on a CPU"):
        load("t5", "qlora", quantisation=("nf4", True), adapters=LORA)
