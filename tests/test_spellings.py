"""Other trainers' names for fine-tuning, one group a test: translated, noted, or refused where ignoring them would mislead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from powertrain.recipe import Resolved, flat, resolve
from powertrain.recipe.spellings import fine_tunes, translate
from powertrain.records import WrongUse
from powertrain.records.origins import Origin
from powertrain.training.objectives import objective_of


def written(path: Path, text: str) -> str:
    file = path / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def tuned(tmp_path: Path, text: str) -> Resolved:
    """A recipe file in another trainer's spelling that fine-tunes some model."""
    return resolve(written(tmp_path, f"base_model: org/model\n{text}"))


def value_of(resolved: Resolved, key: str) -> object:
    plain: object = resolved.recipe.model_dump()
    for part in key.split("."):
        plain = plain[part]  # type: ignore[index]
    return plain


def check(tmp_path: Path, text: str, expected: dict[str, object]) -> None:
    """Each key has its value and a note names each spelling that was used."""
    resolved = tuned(tmp_path, text)
    assert {key: value_of(resolved, key) for key in expected} == expected
    for line in text.splitlines():
        assert any(line.split(":")[0] in note for note in resolved.notes), line


@pytest.mark.parametrize(("text", "objective"), [
    ("strategy: dpo", {"name": "dpo"}), ("rl: dpo\nrl_beta: 0.2", {"name": "dpo", "beta": 0.2}),
    ("rl: ipo", {"name": "dpo", "loss_type": "ipo"}), ("rl: orpo\norpo_alpha: 0.3", {"name": "orpo", "beta": 0.3}),
    ("rl: kto\nkto_desirable_weight: 0.8", {"name": "kto", "desirable_weight": 0.8}),
    ("rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 1.2", {"name": "simpo", "beta": 2.0, "simpo_gamma": 1.2}),
    ("rl: dpo\ndpo_loss_type: [hinge]", {"name": "dpo", "loss_type": "hinge"}),
    ("stage: dpo\npref_beta: 0.3\npref_ftx: 0.5", {"name": "dpo", "beta": 0.3, "rpo_alpha": 0.5}),
    ("stage: dpo\npref_loss: ipo", {"name": "dpo", "loss_type": "ipo"}), ("stage: dpo\npref_loss: orpo", {"name": "orpo"}),
    ("stage: kto\nkto_rejected_weight: 1.5", {"name": "kto", "undesirable_weight": 1.5}),
    ("stage: rm", {"name": "reward"}), ("reward_model: true\nnum_labels: 1", {"name": "reward"}),
    ("reward_model: true\ncenter_rewards_coefficient: 0.01", {"name": "reward", "center_rewards_coefficient": 0.01}),
    ("center_rewards_coefficient: 0.02", {"name": "reward", "center_rewards_coefficient": 0.02}),
    ("stage: sft\nreward_model: false\ncenter_rewards_coefficient: null", {"name": "next_token"}),
    ("stage: sft\npref_loss: sigmoid", {"name": "next_token"}), ("rl: dpo\nreference_free: false", {"name": "dpo"}),
])
def test_objectives_over_pairs_go_by_other_trainers_names(text: str, objective: dict[str, object], tmp_path: Path) -> None:
    recipe = tuned(tmp_path, text).recipe
    assert recipe.objective.model_dump() == objective
    objective_of(recipe)


@pytest.mark.parametrize("key", ["model_name_or_path", "model_id", "base_model", "model_name", "model", "lora.model_id"])
def test_the_model_goes_by_many_names(key: str, tmp_path: Path) -> None:
    section, _, leaf = key.rpartition(".")
    name = written(tmp_path, f"{section}:\n  {leaf}: org/model\n" if section else f"{key}: org/model\n")
    resolved = resolve(name)
    assert (resolved.recipe.model.path, resolved.recipe.method) == ("org/model", "lora")
    assert "model.path" in resolved.notes[0]
    assert resolved.origins["model.path"] == Origin("file", name)


@pytest.mark.parametrize(("text", "expected"), [
    ("lora_r: 8\nlora_alpha: 64\nlora_dropout: 0.05", {"lora.r": 8, "lora.alpha": 64.0, "lora.dropout": 0.05}),
    ("lora_rank: 4", {"lora.r": 4}), ("use_rslora: true\nuse_dora: true", {"lora.use_rslora": True, "lora.use_dora": True}),
    ("peft_use_dora: true", {"lora.use_dora": True}), ("lora_target: all", {"lora.target_modules": "all-linear"}),
    ("lora_target: q_proj, v_proj", {"lora.target_modules": ["q_proj", "v_proj"]}),
    ("lora_target_modules: [k_proj]", {"lora.target_modules": ["k_proj"]}),
    ("lora_target_linear: true", {"lora.target_modules": "all-linear"}),
    ("target_modules: null", {"lora.target_modules": "all-linear"}), ("init_sigma: 2.0", {"lora.sigma": 2.0}),
])
def test_adapters_are_translated(text: str, expected: dict[str, object], tmp_path: Path) -> None:
    check(tmp_path, text, expected)


@pytest.mark.parametrize(("text", "method"), [
    ("adapter: lora", "lora"), ("adapter: qlora\nload_in_4bit: true", "qlora"), ("adapter: null", "full"),
    ("finetuning_type: lora", "lora"), ("finetuning_type: full", "full"), ("use_peft: true", "lora"),
    ("use_peft: false", "full"),
    ("finetuning_type: lora\nquantization_bit: 4", "qlora"), ("use_4bit: true", "qlora"), ("use_4bit: false", "lora"),
    ("load_in_4bit: true", "qlora"), ("strategy: qlora", "qlora"), ("strategy: sft\nuse_8bit: false", "lora"),
])
def test_adapters_and_their_bits_say_the_method_together(text: str, method: str, tmp_path: Path) -> None:
    check(tmp_path, text, {"method": method})


@pytest.mark.parametrize(("text", "expected"), [
    ("bnb_4bit_quant_type: fp4\nbnb_4bit_use_double_quant: false", {"quantisation.type": "fp4", "quantisation.double": False}),
    ("use_nested_quant: false", {"quantisation.double": False}), ("bnb_4bit_compute_dtype: float16", {"techniques": {}}),
])
def test_quantisation_is_translated(text: str, expected: dict[str, object], tmp_path: Path) -> None:
    check(tmp_path, text, expected)


@pytest.mark.parametrize("key", ["max_seq_length", "max_length", "sequence_len", "cutoff_len"])
def test_a_length_is_of_an_example_where_a_model_is_tuned_and_of_a_block_elsewhere(key: str, tmp_path: Path) -> None:
    assert tuned(tmp_path, f"{key}: 700\n").recipe.data.max_length == 700
    plain = resolve(written(tmp_path, f"{key}: 700\n")).recipe.data
    assert (plain.block, plain.max_length) == (700, None)
    assert tuned(tmp_path, f"{key}: null\n").recipe.data.max_length is None
    assert resolve(written(tmp_path, "base_model: org/model\ndata:\n  max_length: 70\n")).recipe.data.max_length == 70


def test_what_is_said_elsewhere_decides_what_a_length_is_of() -> None:
    assert translate({"max_seq_length": 5}, tunes=True)[0] == {"data.max_length": 5}
    assert translate({"max_seq_length": 5}, tunes=False)[0] == {"data.block": 5}
    for values in ({"model_id": "a"}, {"model.path": "a"}, {"method": "full"}, {"model": "a"}, {"load_in_4bit": True}):
        assert fine_tunes(values), values
    for values in ({"method": "scratch"}, {"model.path": None}, {"model.layers": 3}, {"learning_rate": 1.0}):
        assert not fine_tunes(values), values


@pytest.mark.parametrize(("text", "train_on"), [
    ("train_on_inputs: false", "assistant"), ("train_on_inputs: true", "all"), ("train_on_prompt: true", "all"),
    ("completion_only_loss: true\nassistant_only_loss: false", "assistant"), ("completion_only_loss: false", "all"),
    ("assistant_only_loss: true", "assistant"), ("roles_to_train: [assistant]", "assistant"),
])
def test_whose_words_are_learned_is_translated(text: str, train_on: str, tmp_path: Path) -> None:
    check(tmp_path, text, {"data.train_on": train_on})


@pytest.mark.parametrize(("text", "techniques"), [
    ("packing: true", {"packing": "on"}), ("sample_packing: false", {"packing": "off"}),
    ("neat_packing: true", {"packing": "on"}),
    ("padding_free: true\npacking: false", {"packing": "on"}), ("padding_free: false", {}),
    ("group_by_length: true", {"length_grouping": "on"}), ("group_by_length: false", {"length_grouping": "off"}),
    ("train_sampling_strategy: group_by_length", {"length_grouping": "on"}),
    ("optim: paged_adamw_32bit", {"paged_adamw": "on"}), ("optim: adamw_bnb_8bit", {"eight_bit_adamw": "on"}),
    ("optimizer: adamw_bnb_8bit", {"eight_bit_adamw": "on"}), ("bf16: auto", {}),
    ("gradient_checkpointing: unsloth", {"activation_checkpointing": "on"}),
    ("use_liger_kernel: true", {}), ("flash_attn: fa2", {}), ("attn_implementation: flash_attention_2", {}),
    ("plugins: [axolotl.integrations.liger.LigerPlugin]", {}), ("liger_rope: true", {}),
])
def test_techniques_go_by_many_names(text: str, techniques: dict[str, object], tmp_path: Path) -> None:
    check(tmp_path, text, {"techniques": techniques})


@pytest.mark.parametrize(("text", "expected"), [
    ("warmup_steps: 0.1", {"warmup_ratio": 0.1, "warmup_steps": None}), ("num_warmup_steps: 10.0", {"warmup_steps": 10}),
    ("lr_scheduler_type: constant_with_warmup", {"lr_scheduler_type": "constant"}),
    ("saves_per_epoch: 2\nevals_per_epoch: 4", {"save_steps": "0.5 epochs", "eval_steps": "0.25 epochs"}),
    ("eval_strategy: epoch\nsave_strategy: 'no'", {"eval_steps": "1 epochs", "save_steps": 0}),
    ("micro_batch_size: 2\ngradient_accumulation_steps: 4", {"train_batch_size": 8}),
    ("batch_size: 4\ngradient_accumulation_steps: 2", {"train_batch_size": 8}), ("batch_size: 4", {"train_batch_size": 4}),
])
def test_the_schedule_of_other_trainers_is_translated(text: str, expected: dict[str, object], tmp_path: Path) -> None:
    check(tmp_path, text, expected)


@pytest.mark.parametrize(("text", "expected"), [
    ("datasets: [{path: a.jsonl, type: alpaca}, {path: org/b, split: train}]",
     {"data.source": ["a.jsonl", "org/b"], "data.split": "train"}),
    ("datasets: [{path: json, data_files: a.jsonl, type: chat_template}]", {"data.source": "a.jsonl"}),
    ("dataset: identity,alpaca_en", {"data.source": ["identity", "alpaca_en"]}),
    ("dataset_name: org/b", {"data.source": "org/b"}),
    ("val_size: 0.2", {"data.validation_share": 0.2}), ("val_set_size: 0", {"data.validation_share": 0.0}),
    ("dataset_text_field: body", {"data.text_field": "body"}), ("max_samples: 50", {"data.max_examples": 50}),
    ("eval_dataset: held.jsonl", {"data.validation_source": "held.jsonl"}),
    ("chat_template: chatml", {"data.chat_template": "chatml"}),
    ("chat_template: llama3", {"data.chat_template": None}), ("eos_token: </s>", {"data.end_token": "</s>"}),
    ("preprocessing_num_workers: 16\noverwrite_cache: true", {"data.source": "stdlib"}),
])
def test_data_is_named_as_other_trainers_name_it(text: str, expected: dict[str, object], tmp_path: Path) -> None:
    check(tmp_path, text, expected)


@pytest.mark.parametrize("key", [
    "wandb_project: x", "hub_model_id: x", "push_to_hub: true",
    "ddp_find_unused_parameters: false",
    "deepspeed: ds_z2.json", "device_map: auto", "hf_token: secret",
])
def test_what_a_run_on_one_machine_does_not_need_says_so(key: str, tmp_path: Path) -> None:
    resolved = tuned(tmp_path, f"{key}\n")
    assert f"{key.split(':')[0]} has no effect here: " in resolved.notes[1]
    assert "secret" not in " ".join(resolved.notes)


@pytest.mark.parametrize(("text", "expected"), [
    ("report_to: wandb", ["wandb"]), ("report_to: [wandb, comet_ml, mlflow]", ["wandb", "mlflow"]), ("report_to: none", []),
    ("use_wandb: true\nuse_mlflow: true\nuse_trackio: false", ["wandb", "mlflow"]),
    ("wandb_log: false", []),
])
def test_trackers_are_named_as_other_trainers_name_them(text: str, expected: list[str], tmp_path: Path) -> None:
    check(tmp_path, text, {"report_to": expected})


@pytest.mark.parametrize("text", ["report_to: comet_ml", "report_to: all"])
def test_trackers_that_are_not_here_are_named(text: str, tmp_path: Path) -> None:
    resolved = tuned(tmp_path, f"{text}\n")
    assert f"{text} has no effect here: there are tensorboard, wandb, mlflow, trackio" in resolved.notes[1]
    assert resolved.recipe.report_to == []


@pytest.mark.parametrize(("text", "key", "value"), [
    ("early_stopping_patience: 3\nearly_stopping_threshold: 0.01", "early_stopping_threshold", 0.01),
    ("early_stopping_steps: 4", "early_stopping_patience", 4), ("load_best_model_at_end: true", "load_best_model_at_end", True),
    ("ema_decay: 0.99", "ema.decay", 0.99), ("loraplus_lr_ratio: 16", "weights.learning_rates", {"*.B": 16}),
    ("loraplus_lr_ratio: null", "weights.learning_rates", {})])
def test_how_a_run_ends_and_how_fast_weights_learn_is_named_as_elsewhere(text: str, key: str, value: object, tmp_path: Path
                                                                       ) -> None:
    assert dict(flat(tuned(tmp_path, f"{text}\n").recipe.model_dump()))[key] == value


@pytest.mark.parametrize(("text", "says"), [
    ("finetuning_type: freeze", "weights.freeze"), ("adapter: llama-adapter", "an adapter to train further"),
    ("finetuning_type: full\nquantization_bit: 4", "4-bit weights cannot be trained in full"), ("load_in_8bit: true", "qlora"),
    ("per_device_train_batch_size: auto\ngradient_accumulation_steps: 4", "leaves the batch open"),
    ("batch_size: auto", "leaves the batch open"),
    ("adapter: qlora\nload_in_4bit: false", "contradict"), ("strategy: rlhf", "stored pairs"), ("rl: grpo", "stored pairs"),
    ("stage: ppo\nreward_model: saves/scorer", "stored pairs"),
    ("stage: ppo", "stored pairs"), ("stage: dpo\npref_loss: kto_pair", "use sigmoid"),
    ("modules_to_save: [lm_head]", "weights.freeze"),
    ("train_on_inputs: true\ncompletion_only_loss: true", "data.train_on"), ("use_galore: true", "leave it out"),
    ("unfrozen_parameters: [lm_head]", "weights.freeze"),
    ("lr_groups: [{name: a, modules: [b], lr: 1}]", "weights.learning_rates"),
    ("eval_steps: 0.1", "'0.5 epochs'"),
    ("val_size: 500", "a share below 1"),
    ("packing_strategy: wrapped", "no example is cut"), ("datasets: [{path: a, field_messages: m}]", "data.columns"),
    ("datasets: [{path: a, split: x}, {path: b, split: y}]", "one data.split"),
    ("plugins: [a.CutCrossEntropy]", "CutCrossEntropy"),
    ("batch_size: 4\nmicro_batch_size: 2", "same setting"), ("optim: rmsprop", "muon"), ("task: regression", "model.task"),
    ("report_to: wanb", "did you mean wandb?"), ("lora:\n  rr: 3", "did you mean lora.r?"), ("lora_bias: all", "no bias"),
    ("eval_strategy: epoch\neval_steps: 5", "same setting"),
    ("train_sampling_strategy: sequential", "random or group_by_length"), ("quantization_bit: 8", "base of 4 bits"),
])
def test_a_key_whose_neglect_would_give_another_model_is_an_error(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(WrongUse) as error:
        tuned(tmp_path, f"{text}\n")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_of_document_000_is_read_as_it_is(tmp_path: Path) -> None:
    recipe = resolve(written(tmp_path, """
lora:
  model_id: TinyLlama/TinyLlama-1.1B-Chat-v1.0
  hf_token: null
  lora_r: 16
  lora_alpha: 32
  lora_dropout: 0.05
  use_4bit: true
  target_modules: null
  num_epochs: 4
  batch_size: 4
  eval_batch_size: 2
  gradient_accumulation_steps: 2
  learning_rate: 2.0e-4
  max_seq_length: 2048
  logging_steps: 5
  eval_steps: 20
  save_steps: 100
  save_total_limit: 1
  lr_scheduler_type: cosine
  warmup_ratio: 0.03
  output_dir: out
  dataset_path: data.jsonl
dataset:
  batch_size: 10
  random_seed: 1
""")).recipe
    assert (recipe.model.path, recipe.method, recipe.train_batch_size) == ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "qlora", 8)
    assert (recipe.lora.r, recipe.lora.dropout, recipe.lora.target_modules) == (16, 0.05, "all-linear")
    assert (recipe.num_train_epochs, recipe.data.max_length, recipe.data.source) == (4, 2048, "data.jsonl")
    assert (recipe.eval_steps, recipe.save_steps, recipe.save_total_limit, recipe.seed) == (20, 100, 1, 42)


def test_a_config_of_modelforge_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "modelforge.json"
    settings = {
        "task": "text-generation", "model_name": "org/model", "provider": "huggingface", "strategy": "sft",
        "dataset": "d.jsonl",
        "compute_specs": "low_end", "device": "auto", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "use_4bit": True,
        "use_8bit": False, "bnb_4bit_compute_dtype": "float16", "bnb_4bit_quant_type": "nf4", "use_nested_quant": False,
        "fp16": False, "bf16": False, "num_train_epochs": 1, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 4, "gradient_checkpointing": True, "max_grad_norm": 0.3, "learning_rate": 2e-4,
        "weight_decay": 0.001, "optim": "paged_adamw_32bit", "lr_scheduler_type": "cosine", "max_steps": -1,
        "warmup_ratio": 0.03,
        "group_by_length": True, "packing": False, "max_seq_length": None, "use_chat_template": False, "eval_split": 0.2,
        "eval_steps": 100}
    file.write_text(json.dumps(settings))
    resolved = resolve(str(file))
    recipe = resolved.recipe
    assert (recipe.model.path, recipe.method, recipe.model.task, recipe.train_batch_size) == ("org/model", "qlora", "causal", 4)
    assert (recipe.quantisation.double, recipe.data.validation_share, recipe.max_steps) == (False, 0.2, None)
    assert recipe.techniques == {"fp16": "off", "bf16": "off", "activation_checkpointing": "on", "paged_adamw": "on",
                                 "length_grouping": "on", "packing": "off"}
    assert any("low-end" in note for note in resolved.notes)
