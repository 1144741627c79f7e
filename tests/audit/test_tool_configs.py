"""The rules on what Axolotl, LLaMA-Factory and torchtune refuse, and on adapters for layers that a model does not have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from code_cases import HEAD, HF
from transformers import AutoConfig, AutoModelForCausalLM

from powertrain.audit.audit import read_subject
from powertrain.audit.reading_script import read_script
from powertrain.audit.rules import RULES
from powertrain.audit.rules.base import known
from powertrain.audit.subject import Circumstances
from powertrain.records.findings import Finding

BY_NAME = {rule.name: rule for rule in RULES}
DATA = "datasets:\n  - path: rows.jsonl\n    type: alpaca\n"
AXOLOTL = "base_model: mine\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\nsequence_len: 512\n" + DATA
QLORA = AXOLOTL + "adapter: qlora\nload_in_4bit: true\n"
FACTORY = ("model_name_or_path: mine\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: rows\ntemplate: qwen\n"
           "cutoff_len: 512\n")
FULL = FACTORY.replace("lora\n", "full\n")
TORCHTUNE = ("tokenizer:\n  _component_: torchtune.models.llama3.llama3_tokenizer\n  path: x\ndataset:\n"
             "  _component_: torchtune.datasets.alpaca_dataset\n{data}batch_size: 2\nepochs: 1\n{more}")
OWN_PROMPT = AXOLOTL.replace("type: alpaca", "type:\n      field_instruction: q\n      field_output: a\n      {formats}")


def found(name: str, text: str, folder: Path) -> list[Finding]:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return list(BY_NAME[name].find(read_subject(path), Circumstances()))


@pytest.mark.parametrize(("base", "fires", "silent"), [
    (AXOLOTL, "max_memory:\n  - 20GB\n", "max_memory: {0: 20GB}\n"),
    (AXOLOTL, "wandb_watch: false\n", "wandb_watch: 'false'\n"),
    (AXOLOTL, "warmup_steps: 0.1\n", "warmup_steps: 10.0\n"),
    (AXOLOTL, "save_strategy: no\n", "save_strategy: 'no'\n"),
    (AXOLOTL, "fp16: auto\n", "fp16: 'Yes'\nbf16: auto\n"),
    (AXOLOTL, "learning_rate: fast\n", "learning_rate: 2e-4\nweight_decay:\n"),
    (AXOLOTL, "max_steps: ''\n", "max_steps: ${STEPS}\n"),
    (AXOLOTL, "tokens: {pad_token: '<pad>'}\n", "tokens: ['<pad>']\n"),
    (AXOLOTL, "sample_packing: true\neval_table_size: 5\n",
     "sample_packing: true\neval_table_size: 5\neval_sample_packing: false\n"),
    (AXOLOTL.replace("gradient_accumulation_steps: 4\n", ""), "num_epochs: 1\n", "batch_size: 8\n"),
    (AXOLOTL, "warmup_steps: 10\nwarmup_ratio: 0.1\n", "warmup_steps: 0\nwarmup_ratio: 0.1\n"),
    (AXOLOTL, "save_steps: 10\nsave_strategy: epoch\n", "save_steps: 10\nsave_strategy: steps\n"),
    (AXOLOTL, "early_stopping_patience: 3\nevals_per_epoch: 1\nsave_steps: 10\n",
     "early_stopping_patience: 3\neval_steps: 10\nsave_steps: 10\n"),
    (AXOLOTL, "load_in_8bit: true\n", "load_in_8bit: true\nadapter: lora\n"),
    (AXOLOTL + "adapter: qlora\n", "load_in_4bit: false\n", "load_in_4bit: true\n"),
    (AXOLOTL, "gradient_checkpointing: unsloth\n", "gradient_checkpointing: offload\n"),
    (AXOLOTL, "save_safetensors: false\n", "save_safetensors: true\n"),
    (QLORA, "flash_attention: true\nbf16: false\nfp16:\n", "flash_attention: true\nfp16: false\n"),
    (AXOLOTL.replace("mine", "mine/model-bnb-4bit"), "num_epochs: 1\n", "adapter: lora\n"),
    (QLORA.replace("mine", "microsoft/phi-4"), "num_epochs: 1\n", "lora_qkv_kernel: false\nlora_o_kernel: false\n"),
    (QLORA.replace("mine", "microsoft/phi-4"), "num_epochs: 1\n", "trust_remote_code: true\n"),
    (FACTORY, "flash_attn: true\n", "flash_attn: fa2\n"),
    (FACTORY, "eval_strategy: steps\n", "eval_strategy: steps\nval_size: 0.1\n"),
    (FACTORY, "eval_dataset: a\nval_size: 0.1\n", "eval_dataset: a\n"),
    (FULL, "quantization_bit: 4\n", "pure_bf16: true\n"),
    (FULL, "use_dora: true\n", "use_dora: false\n"),
    (FACTORY.replace("sft", "dpo"), "neat_packing: true\n", "packing: true\n"),
    (FACTORY, "deepspeed: examples/ds_z3_config.json\nuse_unsloth: true\n",
     "deepspeed: examples/ds_z2_config.json\nuse_unsloth: true\n"),
    (FACTORY, "quantization_bit: 4\nquantization_method: bitsandbytes\n", "quantization_bit: 4\nquantization_method: bnb\n")])
def test_settings_that_the_tool_does_not_take(base: str, fires: str, silent: str, tmp_path: Path) -> None:
    assert found("settings_refused", base + silent, tmp_path) == []
    made = found("settings_refused", base + fires, tmp_path)
    assert [each.severity for each in made] == ["moderate" if "bitsandbytes" in fires else "critical"]
    assert all(each.evidence for each in made)


def test_a_model_with_separate_projections_takes_the_kernels(tmp_path: Path) -> None:
    made = found("settings_refused", QLORA.replace("mine", "microsoft/phi-4") + "load_in_8bit: false\n", tmp_path)
    assert [each.what for each in made[0].evidence] == ["adapter: qlora", "base_model: microsoft/phi-4"]
    assert found("settings_refused", QLORA.replace("mine", "mistralai/Mistral-7B-v0.1"), tmp_path) == []


@pytest.mark.parametrize(("asked", "severity"), [("eval_steps: 10", "critical"), ("evals_per_epoch: 1", "moderate")])
def test_axolotl_refuses_steps_between_evaluations_of_nothing(asked: str, severity: str, tmp_path: Path) -> None:
    made = found("evaluation_never", f"{AXOLOTL}val_set_size: 0\n{asked}\n", tmp_path)
    assert [each.severity for each in made] == [severity]


CONDITIONS = [(tool, conditions) for table in ("refused", "not_in_force") for tool, said in known(table).items()
              for conditions in said]
EXAMPLE = {"~.": "x", "~gptq|awq|bnb-4bit|w4a16": "x-awq", "~gptq|awq|bnb-4bit": "x-awq", "~z(ero)?_?3": "ds_z3.json",
           "~(alpaca|cleaned|chat|instruct)_dataset$": "torchtune.datasets.chat_dataset"}


@pytest.mark.parametrize(("tool", "conditions"), CONDITIONS)
def test_each_condition_is_met_by_a_config_that_is_written_for_it(tool: str, conditions: str, tmp_path: Path) -> None:
    base = {"axolotl": AXOLOTL, "llama-factory": FACTORY, "torchtune": TORCHTUNE.format(data="", more="")}
    table = yaml.safe_load(base[tool])
    for term in conditions.split():
        name, sign, wanted = re.findall(r"(!?[\w.]+)[|\w]*?(!?=|~|$)(.*)", term)[0]
        first = yaml.safe_load(wanted.split("|")[0]) if sign == "=" else "other"
        value = {"": True, "~": EXAMPLE.get(sign + wanted)}.get(sign, first)
        place = table
        for outer in name.split(".")[:-1]:
            place = place[outer]
        if name.startswith("!"):
            table.pop(name[1:], None)
        elif name == "fused":
            table["base_model"] = "microsoft/phi-2"
        elif value is not None or wanted == "none":
            place[name.rpartition(".")[2]] = value
    says = known("refused")[tool].get(conditions) or known("not_in_force")[tool][conditions]
    assert any(says in each.why for each in found("settings_refused", yaml.safe_dump(table), tmp_path))


@pytest.mark.parametrize(("data", "more", "fires"), [
    ("", "dtype: fp16\n", True), ("", "dtype: bf16\n", False),
    ("", "optimizer_in_bwd: true\nclip_grad_norm: 1.0\n", True), ("", "optimizer_in_bwd: true\nclip_grad_norm: null\n", False),
    ("", "enable_activation_offloading: true\nenable_activation_checkpointing: false\n", True),
    ("  max_seq_len: 512\n", "", True), ("  packed: true\n", "", False)])
def test_settings_that_torchtune_does_not_take(data: str, more: str, fires: bool, tmp_path: Path) -> None:
    assert bool(found("settings_refused", TORCHTUNE.format(data=data, more=more), tmp_path)) == fires


@pytest.mark.parametrize(("text", "words"), [
    (AXOLOTL.replace("alpaca", "alpaca_chat.load_qa"), ""), (AXOLOTL.replace("alpaca", "alpaca:chat"), ""),
    (AXOLOTL.replace("alpaca", "mine.prompts"), ""), (AXOLOTL.replace("alpaca", "alpacca"), "no prompt type alpacca"),
    ("rl: dpo\n" + AXOLOTL.replace("alpaca", "chatml.intel"), ""), ("rl: grpo\n" + AXOLOTL.replace("alpaca", "rows.load"), ""),
    ("rl: dpo\n" + AXOLOTL.replace("alpaca", "chatml.intel_prefilled"), "no prompt type chatml.intel_prefilled"),
    ("rl: ipo\n" + AXOLOTL.replace("alpaca", "chatml.intel_prefilled"), "no prompt type chatml.intel_prefilled"),
    (AXOLOTL.replace("alpaca", "sharegpt"), ""),                           # of which format_gone tells more
    (AXOLOTL.replace("path: rows.jsonl", "data_files: rows.jsonl"), "opens the path first"),
    (AXOLOTL.replace("path: rows.jsonl", "path: json\n    data_files: rows.jsonl"), ""),
    (OWN_PROMPT.format(formats="format: '{instruction} {input} {output}'"), "format has a field"),
    (OWN_PROMPT.format(formats="format: '{instruction} {input}'\n      no_input_format: '{instruction}'"), ""),
    (OWN_PROMPT.format(formats="format: '[INST] {instruction} [/INST]'"), "Only format is written"),
    (OWN_PROMPT.format(formats="format: '[INST] {instruction}'\n      no_input_format: '[INST] {instruction}'"), ""),
    (OWN_PROMPT.format(formats="format: '{instruction} {{output}} {input}'"), ""),
    (OWN_PROMPT.format(formats="format: '{instruction} {input}'\n      no_input_format: '{input}'"), "no_input_format has"),
    (OWN_PROMPT.format(formats="format: '{instruction} {input}'"), "")])
def test_data_that_axolotl_makes_no_examples_of(text: str, words: str, tmp_path: Path) -> None:
    made = found("data_refused", text, tmp_path)
    assert len(made) == bool(words)
    assert all(words in each.why and each.evidence for each in made)


@pytest.mark.parametrize(("names", "lost"), [("rows, other", "other"), ("rows", ""), ("rows,more", "")])
def test_data_of_llama_factory_stand_in_the_projects_own_list(names: str, lost: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for folder in (tmp_path, tmp_path / "data"):
        (folder / "dataset_info.json").write_text(json.dumps({"rows": {}, "more": {}}), encoding="utf-8")
    text = FACTORY.replace("dataset: rows", f"dataset: {names}")
    made = found("data_not_defined", text + "dataset_dir: data\n", tmp_path)
    assert [lost in each.why for each in made] == [True] * bool(lost)
    assert len(found("data_not_defined", text, tmp_path)) == bool(lost)
    assert found("data_not_defined", text.replace(names, "identity"), tmp_path) == []           # LLaMA-Factory brings it
    assert found("data_not_defined", text + "dataset_dir: elsewhere\n", tmp_path) == []
    assert len(found("data_not_defined", text.replace(names, "identity") + "dataset_dir: data\n", tmp_path)) == 1
    assert found("data_not_defined", FACTORY.replace("dataset: rows\n", ""), tmp_path) == []
    (tmp_path / "data" / "dataset_info.json").unlink()
    assert found("data_not_defined", text, tmp_path) == []


def test_data_of_other_tools_stand_in_no_such_list(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text("{}", encoding="utf-8")
    assert found("data_not_defined", FACTORY, tmp_path)
    assert found("data_not_defined", AXOLOTL, tmp_path) == []


@pytest.mark.parametrize(("template", "folder", "fires"), [
    ("phi3", "src", True), ("qwen", "src", False), ("phi3", "src/llamafactory", False), ("phi3", "src/llmtuner", False),
    ("${TEMPLATE}", "src", False), ("null", "src", False)])
def test_llama_factory_has_templates_of_some_names(template: str, folder: str, fires: bool, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(parents=True)
    assert bool(found("template_unknown", FACTORY.replace("qwen", template), tmp_path)) == fires
    assert not found("template_unknown", AXOLOTL + f"chat_template: {template}\n", tmp_path)


@pytest.mark.parametrize(("model", "targets", "severity"), [
    ("gpt2", "q_proj, v_proj", "critical"), ("gpt2", "c_attn, c_proj", None), ("mine/gpt2-tuned", "q_proj, v_proj", None),
    ("gpt2-tuned", "q_proj, v_proj", None), ("gpt2", "attn.q_proj, attn.v_proj", "critical"), ("gpt2", "lm_head", None),
    ("microsoft/Phi-3-mini-4k-instruct", "q_proj, k_proj, v_proj, o_proj", "moderate"),
    ("microsoft/phi-2", "Wqkv, out_proj", "critical"), ("unsloth/Phi-3-mini-4k-instruct", "q_proj, v_proj", None),
    ("Qwen/Qwen2.5-7B-Instruct", "q_proj, v_proj, query_key_value", None), ("Qwen/Qwen2.5-VL-7B-Instruct", "qkv", None),
    ("google/flan-t5-base", "q_proj, v_proj", "critical"), ("google/flan-t5-base", "SelfAttention.q, SelfAttention.v", None)])
def test_adapters_are_for_layers_that_the_model_has(model: str, targets: str, severity: str | None, tmp_path: Path) -> None:
    config = QLORA.replace("mine", model) + f"lora_target_modules: [{targets}]\n"
    listed = ", ".join(f"'{name}'" for name in targets.split(", "))
    script = tmp_path / "train.py"
    script.write_text(HEAD + "from peft import LoraConfig, get_peft_model\n" + HF.replace("gpt2", model)
                      + f"model = get_peft_model(model, LoraConfig(r=8, target_modules=[{listed}]))\n", encoding="utf-8")
    for made in (found("targets_missing", config, tmp_path),
                 list(BY_NAME["targets_missing"].find(read_script(script), Circumstances()))):
        assert [each.severity for each in made] == ([severity] if severity else [])


@pytest.mark.parametrize(("name", "kind"), [
    ("openai-community/gpt2", "gpt2"), ("eleutherai/gpt-neo-125m", "gpt_neo"), ("eleutherai/gpt-j-6b", "gptj"),
    ("eleutherai/pythia-70m", "gpt_neox"), ("tiiuae/falcon-7b", "falcon"), ("bigscience/bloom-560m", "bloom"),
    ("facebook/opt-125m", "opt"), ("microsoft/phi-2", "phi"), ("microsoft/phi-3-mini-4k-instruct", "phi3"),
    ("meta-llama/llama-3.1-8b", "llama"), ("mistralai/mistral-7b-v0.3", "mistral"), ("qwen/qwen2.5-7b", "qwen2"),
    ("qwen/qwen3-8b", "qwen3"), ("google/gemma-2b", "gemma"), ("google/gemma-2-9b-it", "gemma2")])
def test_the_layers_of_a_family_are_those_of_transformers(name: str, kind: str) -> None:
    listed = {layer for form, layers in known("lora_families").items() if re.fullmatch(form, name) for layer in layers.split()}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
    layers = {each.rpartition(".")[2] for each, module in model.named_modules() if type(module).__name__ in
              ("Linear", "Conv1D", "Embedding", "FalconLinear")} - {"lm_head"}
    assert layers - {"wpe"} <= listed | {"embed_positions", "project_in", "project_out"}


@pytest.mark.parametrize(("adapter", "base", "fires"), [
    ("lora", "mine", True), ("lora", "someone/mine-bnb-4bit", False), ("qlora", "mine", False)])
def test_lora_of_axolotl_does_not_load_four_bits(adapter: str, base: str, fires: bool, tmp_path: Path) -> None:
    text = QLORA.replace("adapter: qlora", f"adapter: {adapter}").replace("base_model: mine", f"base_model: {base}")
    made = found("settings_refused", text, tmp_path)
    assert [each.severity for each in made] == (["moderate"] if fires else [])
