"""Configs as recipes: every key accounted for, what is trained stays the same, and the recipe trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import config_examples
import pytest

from adapted_models import make_base
from example_folders import chat_folder
from powertrain.audit.configs import read_config
from powertrain.audit.conversion import FATES, Conversion, account_json, recipe_yaml
from powertrain.audit.convert import convert
from powertrain.audit.reading_script import read_script
from powertrain.audit.subject import Setting, Subject
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.huggingface.folder import save_folder
from powertrain.recipe import resolve
from powertrain.records import WrongUse
from powertrain.records.event_log import read_events
from powertrain.records.events import Step
from powertrain.records.findings import Place

Cli = Callable[..., tuple[int, str, str]]
# what a recipe says by one key, and other trainers by several
SAID_TOGETHER = {"training.per_device_train_batch_size", "training.gradient_accumulation_steps", "training.evals_per_epoch",
                 "training.saves_per_epoch", "training.eval_strategy", "training.save_strategy", "training.eval_interval",
                 "training.save_interval", "training.optim", "training.min_lr"}
# the same by a recipe's name
RENAMED = {"constant_with_warmup": "constant", "chat_template": "messages", "text-generation": "causal"}
NOTHING = {("training.report_to", "none"): []}


def converted(folder: Path, name: str) -> Conversion:
    path = folder / name
    path.write_text(config_examples.ALL[name][0], encoding="utf-8")
    return convert(read_config(path))


def pins(conversion: Conversion) -> dict[str, Any]:
    return {key: value for account in conversion.accounts for key, value in account.pins.items()}


def fate(conversion: Conversion, key: str) -> tuple[str, dict[str, Any]]:
    found = next(account for account in conversion.accounts if account.key == key)
    return found.fate, dict(found.ours)


def subject_of(framework: str, **settings: object) -> Subject:
    """A subject as a reader of scripts would give it."""
    return Subject(Path("train.py"), framework, {  # type: ignore[arg-type]
        key.replace("__", "."): Setting(value, Place("train.py", line), f"{key}={value}")
        for line, (key, value) in enumerate(settings.items(), 1)})


@pytest.mark.parametrize("name", config_examples.TRAINABLE)
def test_every_key_is_accounted_for_once(name: str, tmp_path: Path) -> None:
    conversion = converted(tmp_path, name)
    subject = conversion.subject
    accounted = [account.key for account in conversion.accounts if account.setting is not None]
    assert sorted(accounted) == sorted({*subject.settings, *subject.unknown})
    assert all(account.fate in FATES for account in conversion.accounts)
    assert all(account.ours or account.why for account in conversion.accounts), "what is not translated says why"
    assert all(account["fate"] in recipe_yaml(conversion) or account["ours"] or account["why"] in recipe_yaml(conversion)
               for account in account_json(conversion))


@pytest.mark.parametrize("name", config_examples.TRAINABLE)
def test_the_recipe_resolves_without_another_trainer_s_spelling(name: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe-of-it.yaml"
    file.write_text(recipe_yaml(converted(tmp_path, name)))
    assert not resolve(str(file)).notes


@pytest.mark.parametrize("name", config_examples.TRAINABLE)
def test_settings_survive_the_way_there_and_back(name: str, tmp_path: Path) -> None:
    conversion = converted(tmp_path, name)
    file = tmp_path / "recipe-of-it.yaml"
    file.write_text(recipe_yaml(conversion))
    back, subject = read_config(file), conversion.subject
    assert back.framework == "powertrain"
    translated = [account for account in conversion.accounts if account.fate == "translated" and account.ours]
    assert translated
    for account in translated:
        if account.key not in SAID_TOGETHER and account.setting is not None:
            value = account.setting.value
            meant = NOTHING.get((account.key, value), RENAMED.get(value, value)) if isinstance(value, str) else value
            assert back.value(account.key) == meant, account.key
    micro = subject.value("training.per_device_train_batch_size")
    if micro is not None:
        steps = subject.value("training.gradient_accumulation_steps") or (4 if name == "modelforge" else 1)
        assert back.value("training.train_batch_size") == micro * steps


@pytest.mark.parametrize("name", [name for name in config_examples.TRAINABLE if name != "recipe.yaml"])
def test_converting_what_was_converted_changes_nothing(name: str, tmp_path: Path) -> None:
    first = converted(tmp_path, name)
    file = tmp_path / "recipe-of-it.yaml"
    file.write_text(recipe_yaml(first))
    second = tmp_path / "again.yaml"
    second.write_text(recipe_yaml(convert(read_config(file))))
    once, twice = (resolve(str(path)).recipe.model_dump() for path in (file, second))
    assert twice == once | {"techniques": twice["techniques"]}


def test_what_only_decides_the_speed_is_left_to_the_plan_with_the_pin_that_would_keep_it(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "lora.yml")
    assert not any(key.startswith("techniques.") for key in conversion.values)
    assert pins(conversion)["techniques.activation_checkpointing"] == "on"
    assert pins(conversion)["techniques.packing"] == "on"
    assert pins(conversion)["techniques.micro_batch"] == {"examples": 3}


def test_adamw_of_any_maker_is_adamw(tmp_path: Path) -> None:
    for name in ("lora.yml", "training_args.json", "modelforge.json", "qlora-fsdp.yaml"):
        assert fate(converted(tmp_path, name), "training.optim") == ("planned", {})
    other = convert(subject_of("transformers", model__path="m", training__optim="rmsprop"))
    assert fate(other, "training.optim") == ("not supported", {})


def test_a_trainer_s_own_defaults_are_written_out(tmp_path: Path) -> None:
    values = converted(tmp_path, "training_args.json").values
    assert (values["weight_decay"], values["adam_beta2"], values["seed"], values["method"]) == (0.01, 0.999, 42, "full")
    assert (values["lr_scheduler_type"], values["data.validation_share"], values["data.train_on"]) == ("linear", 0.0, "all")
    values = converted(tmp_path, "sft.yaml").values
    assert (values["lora.r"], values["lora.alpha"], values["lora.dropout"]) == (8, 32, 0.05)
    values = converted(tmp_path, "llama3_lora_sft.yaml").values
    assert values["lora.alpha"] == 16, "LLaMA-Factory takes twice the rank"


def test_steps_of_evaluation_have_no_effect_where_nothing_evaluates(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "training_args.json")
    assert fate(conversion, "training.eval_steps")[0] == "no effect"
    assert conversion.values["eval_steps"] == 0
    assert conversion.values["save_steps"] == "1 epochs"


@pytest.mark.parametrize(("name", "key"), [
    ("character.yaml", "noise.sigma_min"),
    ("training_config.py", "training.background_upload"),
])
def test_what_changes_the_training_and_is_not_here_says_so(name: str, key: str, tmp_path: Path) -> None:
    conversion = converted(tmp_path, name)
    assert fate(conversion, key)[0] == "not supported"
    assert "NOT SUPPORTED" in recipe_yaml(conversion)


def test_llama_factory_s_names_of_data_are_looked_up_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    entry = {"mine": {"file_name": "rows.json", "columns": {"prompt": "frage", "response": "antwort"}}}
    (tmp_path / "sets/dataset_info.json").write_text(json.dumps(entry))
    values = converted(tmp_path, "llama3_lora_sft.yaml").values
    assert values["data.source"] == str(tmp_path / "sets/rows.json")
    assert values["data.columns"] == {"instruction": "frage", "output": "antwort"}


def test_names_of_data_that_are_not_here_are_missing(tmp_path: Path) -> None:
    assert "dataset_info.json" in converted(tmp_path, "llama3_lora_sft.yaml").missing[0]
    assert len(converted(tmp_path, "training_args.json").missing) == 2, "neither model nor data"


def test_local_data_lie_relative_to_the_config_and_hub_ids_stay(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}\n")
    assert converted(tmp_path, "lora.yml").values["data.source"] == str(tmp_path / "data.jsonl")
    assert converted(tmp_path, "qlora-fsdp.yaml").values["data.source"] == "org/rows"


def test_what_only_launches_is_not_converted(tmp_path: Path) -> None:
    for name in ("default_config.yaml", "ds_z3_config.json"):
        with pytest.raises(WrongUse, match="how a training is launched"):
            converted(tmp_path, name)


def test_a_script_s_settings_convert_like_a_config_s() -> None:
    conversion = convert(subject_of("pytorch", model__path="org/model", loader__batch_size=4, optimizer__name="AdamW",
                                    optimizer__lr=3e-4, optimizer__betas=[0.9, 0.95], loader__num_workers=4,
                                    environment__OMP_NUM_THREADS="8", data__padding="max_length"))
    assert conversion.values["train_batch_size"] == 4
    assert (conversion.values["learning_rate"], conversion.values["adam_beta2"]) == (3e-4, 0.95)
    assert pins(conversion)["techniques.threads"] == {"threads": 8}
    assert fate(conversion, "data.padding")[0] == "planned"


TRL_SCRIPT = """
from trl import {config}, {trainer}
from peft import LoraConfig
{trainer}(model="m", args={config}({arguments}), peft_config=LoraConfig(r=8, lora_dropout=0.05)).train()
"""


@pytest.mark.parametrize(("kind", "arguments", "wanted"), [
    ("DPO", "beta=0.2, loss_type=['ipo']", {"name": "dpo", "beta": 0.2, "loss_type": "ipo", "learning_rate": 1e-6}),
    ("KTO", "desirable_weight=1.5", {"name": "kto", "desirable_weight": 1.5, "learning_rate": 1e-6}),
    ("Reward", "center_rewards_coefficient=0.1", {"name": "reward", "center_rewards_coefficient": 0.1, "learning_rate": 1e-4}),
    ("CPO", "loss_type='simpo', simpo_gamma=0.3", {"name": "simpo", "beta": 0.1, "cpo_alpha": 1.0, "simpo_gamma": 0.3}),
    ("DPO", "disable_dropout=False", {"name": "dpo", "dropout": 0.05}),
    ("SFT", "", {"dropout": 0.05, "train_on": "all", "learning_rate": 2e-5})])
def test_trl_s_trainers_of_preferences_keep_what_they_learn(kind: str, arguments: str, wanted: dict[str, Any],
                                                            tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRL_SCRIPT.format(config=f"{kind}Config", trainer=f"{kind}Trainer", arguments=arguments))
    conversion = convert(read_script(tmp_path / "train.py"))
    found = {key.rpartition(".")[2]: value for key, value in conversion.values.items()}
    without_dropout = {} if kind == "SFT" else {"dropout": 0.0}
    assert {key: found.get(key) for key in {**without_dropout, **wanted}} == {**without_dropout, **wanted}
    assert ("train_on" in found) == (kind == "SFT")
    assert "not supported" not in {account.fate for account in conversion.accounts if account.key.startswith("objective.")}


def test_a_loss_that_is_no_simpo_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRL_SCRIPT.format(config="CPOConfig", trainer="CPOTrainer", arguments=""))
    assert fate(convert(read_script(tmp_path / "train.py")), "training.rl") == ("not supported", {})


def test_files_that_a_builder_of_datasets_reads_are_the_source() -> None:
    conversion = convert(subject_of("trl", model__path="m", data__source="json", data__data_files="rows.jsonl",
                                    loader__shuffle=True))
    assert conversion.values["data.source"] == "rows.jsonl"
    assert fate(conversion, "loader.shuffle")[0] == "no effect"
    assert "not supported" not in {account.fate for account in conversion.accounts}


def test_processes_that_a_script_is_launched_on_make_the_batch_larger() -> None:
    conversion = convert(subject_of("accelerate", model__path="m", training__per_device_train_batch_size=2,
                                    training__gradient_accumulation_steps=4, accelerate__num_processes=2,
                                    accelerate__num_machines=1))
    assert conversion.values["train_batch_size"] == 16
    machines = next(account for account in conversion.accounts if account.key == "accelerate.num_machines")
    assert "`powertrain train --processes N`" in machines.why


def test_what_only_running_the_script_would_tell_is_named() -> None:
    script = subject_of("trl", training__bf16=True)
    unread = {"training.learning_rate": Setting(None, Place("train.py", 9), "learning_rate=lr()")}
    conversion = convert(Subject(script.path, script.framework, script.settings, unread=unread))
    assert fate(conversion, "training.learning_rate") == ("unread", {})
    assert "learning_rate" not in conversion.values, "a default would be a guess"


def test_four_bits_without_adapters_cannot_be() -> None:
    conversion = convert(subject_of("transformers", model__path="m", quantisation__load_in_4bit=True))
    assert conversion.values["method"] == "full"
    assert fate(conversion, "quantisation.load_in_4bit")[0] == "not supported"


@pytest.mark.parametrize("adapter", ["adapter:", "adapter: null", "adapter: ''", ""])
def test_adapter_keys_without_an_adapter_train_all_weights(adapter: str, tmp_path: Path) -> None:
    (tmp_path / "full.yml").write_text(f"base_model: m\nmicro_batch_size: 2\nlora_r:\nlora_alpha: 16\n{adapter}\n"
                                       "learning_rate: 1e-5\n")
    conversion = convert(read_config(tmp_path / "full.yml"))
    assert conversion.values["method"] == "full"
    assert not [key for key in conversion.values if key.startswith("lora.")]
    assert not conversion.subject.has_adapters


def test_axolotl_drops_long_examples_and_evaluates_only_when_asked(tmp_path: Path) -> None:
    text = "base_model: m\nmicro_batch_size: 2\nlearning_rate: 1e-5\nval_set_size: 0.1\n"
    (tmp_path / "plain.yml").write_text(text)
    values = convert(read_config(tmp_path / "plain.yml")).values
    assert (values["data.long_examples"], values["eval_steps"], values["num_train_epochs"]) == ("drop", 0, 1.0)
    assert (values["lr_scheduler_type"], values["warmup_ratio"], values["train_batch_size"]) == ("cosine", 0.03, 2)
    (tmp_path / "plain.yml").write_text(text.replace("learning_rate: 1e-5\n", "excess_length_strategy: truncate\n"))
    conversion = convert(read_config(tmp_path / "plain.yml"))
    assert conversion.values["data.long_examples"] == "cut"
    assert any("no learning rate" in one for one in conversion.missing), "Axolotl has none of its own"


def test_torchtune_s_builders_say_how_the_model_is_trained(tmp_path: Path) -> None:
    values = converted(tmp_path, "torchtune.yaml").values
    assert (values["method"], values["lora.r"], values["train_batch_size"], values["model.path"]) == ("lora", 4, 6, "base")
    assert values["lora.target_modules"] == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (values["data.source"], values["data.max_length"]) == ("yahma/alpaca-cleaned", 64)
    assert values["data.train_on"] == "assistant"
    assert (values["learning_rate"], values["lr_scheduler_type"], values["warmup_steps"]) == (3e-4, "cosine", 7)
    assert values["max_grad_norm"] == 0.0, "no clipping unless it is asked for"


def test_nanogpt_s_smallest_learning_rate_is_a_share_of_the_largest(tmp_path: Path) -> None:
    values = converted(tmp_path, "train_shakespeare_char.py").values
    assert (values["min_lr_rate"], values["max_steps"], values["train_batch_size"]) == (0.1, 5000, 64)
    assert (values["model.layers"], values["model.width"], values["data.block"]) == (6, 384, 256)
    assert (values["model.dropout"], values["weight_decay"]) == (0.2, 0.1)


def test_an_expression_over_names_is_no_list_of_linear_layers(tmp_path: Path) -> None:
    (tmp_path / "all.yml").write_text("base_model: m\nmicro_batch_size: 2\nlearning_rate: 1e-5\nadapter: lora\nlora_r: 8\n"
                                      "lora_target_modules: 'layers.[0-9]+.(q|k)_proj'\n")
    assert fate(convert(read_config(tmp_path / "all.yml")), "lora.target_modules") == ("not supported", {})


def test_the_fields_of_axolotl_s_conversations_are_the_recipe_s_columns(tmp_path: Path) -> None:
    def of(fields: str) -> dict[str, Any]:
        (tmp_path / "chat.yml").write_text("base_model: m\nmicro_batch_size: 1\nlearning_rate: 1e-5\ndatasets:\n"
                                           f"  - path: org/rows\n    type: chat_template\n{fields}")
        values = convert(read_config(tmp_path / "chat.yml")).values
        return {key: values.get(key) for key in ("data.format", "data.columns")}

    assert of("") == {"data.format": "messages", "data.columns": None}
    assert of("    field_messages: talk\n") == {"data.format": "messages", "data.columns": {"messages": "talk"}}
    assert of("    field_messages: conversations\n    message_property_mappings: {role: from, content: value}\n") == {
        "data.format": "sharegpt", "data.columns": None}
    assert of("    message_field_role: who\n") == {"data.format": None, "data.columns": None}


# ------------------------------------------------------------------------------------------------ training


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with what the example configs name: a tiny model, rows, and a text."""
    tokenizer = open_example_tokenizer(chat_folder(tmp_path / "tokenizer"))
    save_folder(make_base("llama", vocabulary=330, context=96), tmp_path / "base", tokenizer)
    rows = [{"instruction": f"what is {i} and one ?", "input": "", "output": f"it is {i + 1}"} for i in range(24)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json"}}))
    (tmp_path / "sets/rows.json").write_text(json.dumps(rows))
    (tmp_path / "text.txt").write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)))
    return tmp_path


@pytest.mark.parametrize("name", ["lora.yml", "llama3_lora_sft.yaml", "llama3_full_sft.yaml", "modelforge.json", "config.yaml",
                                  "character.yaml"])
def test_the_converted_recipe_trains(name: str, beside: Path, cli: Cli) -> None:
    file = beside / "converted.yaml"
    file.write_text(recipe_yaml(converted(beside, name)))
    code, _, err = cli("train", str(file), "max_steps=2", "output_dir=run", "techniques.threads=off", "sample.tokens=0",
                       folder=beside)
    assert code == 0, err
    steps = [event for event in read_events(beside / "run/events.jsonl") if isinstance(event, Step)]
    assert [event.step for event in steps][-1] == 2
