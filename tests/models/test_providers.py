"""Who computes a model, and why the others do not: read off config.json, and said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from powertrain.facts.software import read_software
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.bridge.loading import load_bridged, load_unsloth
from powertrain.models.config import FAMILIES, make_config
from powertrain.models.huggingface.families import to_hf_config
from powertrain.models.huggingface.providers import availability, choose_provider, decoder_start, find_task
from powertrain.records import Software, WrongUse

HERE = Software({"transformers": "5.23", "torch": "2.13"}, {"unsloth": "needs a CUDA GPU; torch sees none here"})
ON_A_GPU = Software({"transformers": "5.23", "unsloth": "2026.1"}, {})


def library_config(kind: str, architecture: str, **fields: Any) -> dict[str, Any]:
    """What transformers writes for a default model of this class."""
    config = getattr(transformers, kind)(**fields).to_dict()
    return config | {"architectures": [architecture]}


T5 = library_config("T5Config", "T5ForConditionalGeneration")
BART = library_config("BartConfig", "BartForConditionalGeneration")
BERT = library_config("BertConfig", "BertForMaskedLM")
BERT_DECODER = library_config("BertConfig", "BertLMHeadModel", is_decoder=True)
ANSWERS = library_config("DistilBertConfig", "DistilBertForQuestionAnswering")
OPT = library_config("OPTConfig", "OPTForCausalLM")
BLOOM = library_config("BloomConfig", "BloomForCausalLM")
LLAMA = to_hf_config(make_config("llama", vocabulary=61, layers=2, width=48, heads=6)[0])
UNKNOWN = {"model_type": "own", "architectures": ["OwnModel"]}
IMAGES = library_config("ViTConfig", "ViTForImageClassification")


@pytest.mark.parametrize(("config", "task", "provider"), [
    (T5, "seq2seq", "transformers"), (BART, "seq2seq", "transformers"), (BERT, "span", "transformers"),
    (ANSWERS, "span", "transformers"), (OPT, "causal", "transformers"), (BLOOM, "causal", "transformers"),
    (BERT_DECODER, "causal", "transformers"), (LLAMA, "causal", "native"),
    (UNKNOWN | {"auto_map": {"AutoModelForCausalLM": "own.OwnModel"}}, "causal", "transformers"),
], ids=["t5", "bart", "bert", "answers", "opt", "bloom", "bert-decoder", "llama", "own-code"])
def test_a_config_says_the_task_and_who_computes_it(config: dict[str, Any], task: str, provider: str) -> None:
    choice = choose_provider(config, None, None, HERE)
    assert find_task(config) == task
    assert (choice.task, choice.provider) == (task, provider)
    if provider == "transformers":
        assert choice.because.startswith("computed by transformers: ")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_the_decoder_is_native(family: str) -> None:
    config = to_hf_config(make_config(family, vocabulary=61, layers=2, width=48, heads=2)[0])
    assert availability(config, "causal", HERE) | {"unsloth": ""} == {"native": None, "transformers": None, "unsloth": ""}
    assert choose_provider(config, None, None, HERE).provider == "native"
    assert choose_provider(config, "transformers", None, HERE).provider == "transformers"


def test_transformers_has_every_family_of_the_decoder_as_a_decoder() -> None:
    from transformers.models.auto import modeling_auto

    assert FAMILIES.keys() <= modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert not FAMILIES.keys() & modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()


def test_a_model_of_the_decoders_own_is_chosen_without_importing_transformers() -> None:
    config = to_hf_config(make_config("llama", layers=1, width=64, heads=2, vocabulary=300)[0])
    code = (f"import sys; from powertrain.models.huggingface.providers import *; from powertrain.records import Software; "
            f"here = Software({{'transformers': '5.23'}}, {{}}); config = {config!r}; "
            f"assert choose_provider(config, None, None, here).provider == 'native'; "
            f"assert availability(config, 'causal', here)['transformers'] is None; sys.exit('transformers' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_the_decoder_cannot_compute_of_its_families_goes_over_the_bridge() -> None:
    choice = choose_provider(LLAMA | {"hidden_act": "relu"}, None, None, HERE)
    assert choice.provider == "transformers"
    assert "relu" in choice.because


@pytest.mark.parametrize(("config", "wanted", "task", "message"), [
    (T5, "native", None, "model.provider=native was asked for, and the native decoder is for predicting the next token.*"
                         "use model.provider=transformers"),
    (OPT, "native", None, "a model of type 'opt'.*use model.provider=transformers"),
    (LLAMA, "unsloth", None, "unsloth needs a CUDA GPU.*use model.provider=native"),
    (LLAMA, None, "seq2seq", "model.task=seq2seq was asked for.*no encoder-decoder"),
    (OPT, None, "seq2seq", "model.task=seq2seq was asked for.*'opt'.*no encoder-decoder"),
    (T5, None, "causal", "model.task=causal was asked for.*an encoder-decoder, which reads a source"),
    (BERT, None, "causal", "model.task=causal was asked for.*would see the tokens that it is to predict"),
    (BLOOM | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, None, "span", "no AutoModelForQuestionAnswering"),
    (UNKNOWN, None, None, "'own'.*none of the tasks"),
    (IMAGES, None, None, "'vit'.*none of the tasks"),
])
def test_what_cannot_be_is_one_sentence_with_its_reason(config: dict[str, Any], wanted: str | None, task: str | None,
                                                        message: str) -> None:
    with pytest.raises(WrongUse, match=message) as refused:
        choose_provider(config, wanted, task, HERE)
    assert "\n" not in str(refused.value)


def test_the_software_that_is_really_here_is_asked() -> None:
    reasons = availability(LLAMA, "causal", read_software())
    assert reasons["native"] is None
    assert reasons["transformers"] is None
    if not torch.cuda.is_available():
        assert "CUDA GPU" in str(reasons["unsloth"])


def test_choosing_loads_no_torch_for_the_data_room() -> None:
    code = "import sys, powertrain.models.huggingface.providers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------ the target's start


def test_the_start_of_a_target_is_what_the_library_starts_with(tmp_path: Path) -> None:
    t5 = transformers.T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=8, num_layers=1, num_heads=2, pad_token_id=0,
                               decoder_start_token_id=0)
    bart = transformers.BartConfig(vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                                   decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8)
    for model in (transformers.T5ForConditionalGeneration(t5), transformers.BartForConditionalGeneration(bart)):
        folder = tmp_path / model.config.model_type
        model.save_pretrained(folder)
        assert decoder_start(folder) == int(model.prepare_decoder_input_ids_from_labels(torch.tensor([[3, 4]]))[0, 0])


def test_the_start_is_read_where_it_is_written_and_missed_where_it_is_not(tmp_path: Path) -> None:
    def write(**fields: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(fields))

    write(model_type="t5", pad_token_id=3)
    assert decoder_start(tmp_path) == 3
    write(model_type="bart", decoder_start_token_id=2)
    assert decoder_start(tmp_path) == 2
    (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 5}))
    assert decoder_start(tmp_path) == 5
    (tmp_path / "generation_config.json").unlink()
    write(model_type="mbart")
    with pytest.raises(WrongUse, match="names no decoder_start_token_id"):
        decoder_start(tmp_path)


# ------------------------------------------------------------------------------------------------ unsloth


class FastLanguageModel:
    """Stands in for unsloth's, which needs a GPU: it notes what it is called with."""

    def __init__(self) -> None:
        self.opened: dict[str, Any] = {}
        self.adapted: dict[str, Any] = {}

    def from_pretrained(self, **given: Any) -> tuple[Any, Any]:
        self.opened = given
        return torch.nn.Linear(2, 2), SimpleNamespace()

    def get_peft_model(self, model: Any, **given: Any) -> Any:
        self.adapted = given
        return model


def call_unsloth(fast: FastLanguageModel, **asked: Any) -> None:
    load_unsloth(Path("model"), **({"method": "lora", "adapters": AdapterConfig(), "quantisation": None, "dropout": 0.0,
                                    "adapter_folder": None, "max_length": 512, "code": {"trust_remote_code": False},
                                    "fast": fast} | asked))


def test_unsloth_is_called_with_what_the_recipe_says() -> None:
    fast = FastLanguageModel()
    torch.manual_seed(0)
    call_unsloth(fast, method="qlora", quantisation=("nf4", True), adapters=AdapterConfig(r=8, alpha=4, use_rslora=True))
    opened, adapted = fast.opened, fast.adapted
    assert (opened["model_name"], opened["max_seq_length"], opened["load_in_4bit"]) == ("model", 512, True)
    assert (opened["full_finetuning"], opened["trust_remote_code"], opened["local_files_only"]) == (False, False, True)
    assert (adapted["r"], adapted["lora_alpha"], adapted["lora_dropout"], adapted["use_rslora"]) == (8, 4, 0.0, True)
    assert adapted["target_modules"][:2] == ["q_proj", "k_proj"]
    first = adapted["random_state"]
    torch.manual_seed(0)
    call_unsloth(fast, adapters=AdapterConfig(target_modules=("q_proj",)))
    assert (fast.opened["load_in_4bit"], fast.adapted["target_modules"]) == (False, ["q_proj"])
    assert fast.adapted["random_state"] == first
    torch.manual_seed(1)
    call_unsloth(fast)
    assert fast.adapted["random_state"] != first


def test_unsloth_in_full_gets_no_adapters_and_goes_on_with_old_ones() -> None:
    fast = FastLanguageModel()
    call_unsloth(fast, method="full", adapters=None)
    assert fast.opened["full_finetuning"]
    assert not fast.adapted
    call_unsloth(fast, adapters=None, adapter_folder=Path("adapter"))
    assert fast.opened["model_name"] == "adapter"
    assert not fast.adapted


@pytest.mark.parametrize(("asked", "message"), [
    ({"adapters": AdapterConfig(use_dora=True)}, "use_dora"), ({"adapters": AdapterConfig(kind="lslora")}, "lslora"),
    ({"dropout": 0.1}, "model.dropout=0.1"), ({"method": "qlora", "quantisation": ("fp4", True)}, "fp4"),
])
def test_what_unsloth_would_pass_over_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        call_unsloth(FastLanguageModel(), **asked)


def test_unsloth_that_is_not_here_is_said(tmp_path: Path) -> None:
    if "unsloth" in read_software().versions:
        pytest.skip("unsloth is installed here")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(WrongUse, match=r"cannot be imported here.*pip install unsloth"):
        load_bridged(tmp_path, task="causal", method="lora", adapters=AdapterConfig(), provider="unsloth")
    assert choose_provider(LLAMA, "unsloth", None, ON_A_GPU).provider == "unsloth"
    with pytest.raises(WrongUse, match="FastLanguageModel is for predicting the next token"):
        choose_provider(T5, "unsloth", None, ON_A_GPU)
