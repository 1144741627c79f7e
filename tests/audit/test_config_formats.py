"""Configs of every trainer: recognised by what is in them, each key with its line, keys that the trainer lacks set aside."""

from __future__ import annotations

from pathlib import Path

import config_examples
import pytest

from powertrain.audit.configs import read_config, why_recognised
from powertrain.audit.subject import Subject
from powertrain.records import WrongUse


def read(folder: Path, text: str, name: str = "config.yaml") -> Subject:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_config(path)


@pytest.mark.parametrize("name", config_examples.ALL)
def test_each_format_is_recognised_by_its_content(name: str, tmp_path: Path) -> None:
    text, framework = config_examples.ALL[name]
    subject = read(tmp_path, text, f"any{Path(name).suffix}")
    assert subject.framework == framework
    assert "keys" in why_recognised(subject.path)


@pytest.mark.parametrize("name", config_examples.ALL)
def test_every_setting_stands_on_the_line_that_spells_it(name: str, tmp_path: Path) -> None:
    text, _ = config_examples.ALL[name]
    subject = read(tmp_path, text, f"any{Path(name).suffix}")
    lines = text.splitlines()
    found = {**subject.settings, **subject.unknown}
    assert found
    for setting in found.values():
        key = setting.spelled.split(":")[0]
        assert key in lines[setting.place.line - 1] or "path:" in lines[setting.place.line], (key, setting.place)


@pytest.mark.parametrize(("name", "key", "value"), [
    ("lora.yml", "training.per_device_train_batch_size", 3), ("lora.yml", "model.attn_implementation", "flash_attention_2"),
    ("lora.yml", "lora.target_modules", "all-linear"), ("lora.yml", "data.format", "alpaca"),
    ("lora.yml", "tokenizer.pad_token", "<pad>"), ("lora.yml", "training.activation_checkpointing", True),
    ("qlora-fsdp.yaml", "quantisation.load_in_4bit", True), ("qlora-fsdp.yaml", "training.use_peft", True),
    ("qlora-fsdp.yaml", "training.assistant_only_loss", False), ("qlora-fsdp.yaml", "fsdp.fsdp_offload_params", True),
    ("qlora-fsdp.yaml", "data.padding", "max_length"), ("qlora-fsdp.yaml", "training.use_liger_kernel", True),
    ("llama3_lora_sft.yaml", "lora.r", 8), ("llama3_lora_sft.yaml", "training.max_length", 64),
    ("llama3_qlora_sft.yaml", "lora.target_modules", ["q_proj", "v_proj"]),
    ("llama3_qlora_sft.yaml", "model.attn_implementation", "flash_attention_2"),
    ("llama3_qlora_sft.yaml", "quantisation.bnb_4bit_use_double_quant", False),
    ("training_args.json", "training.train_sampling_strategy", "group_by_length"),
    ("training_args.json", "deepspeed.zero_optimization.stage", 2), ("training_args.json", "training.learning_rate", 5e-5),
    ("sft.yaml", "data.source", "org/rows"), ("modelforge.json", "training.learning_rate", 3e-4),
    ("modelforge.json", "model.provider", "unsloth"), ("config.yaml", "training.per_device_train_batch_size", 4),
    ("config.yaml", "model.path", "base"), ("character.yaml", "data.source", "text.txt"),
    ("character.yaml", "training.learning_rate", 1e-4), ("character.yaml", "model.num_hidden_layers", 2),
    ("training_config.py", "training.torch_compile", True), ("default_config.yaml", "accelerate.num_processes", 2),
    ("default_config.yaml", "accelerate.fsdp_config.fsdp_sharding_strategy", "FULL_SHARD"),
    ("ds_z3_config.json", "deepspeed.zero_optimization.stage", 3), ("recipe.yaml", "training.packing", True),
    ("recipe.yaml", "training.bf16", False), ("recipe.yaml", "training.train_batch_size", 8),
])
def test_settings_go_by_the_shared_names(name: str, key: str, value: object, tmp_path: Path) -> None:
    text, _ = config_examples.ALL[name]
    assert read(tmp_path, text, f"any{Path(name).suffix}").value(key) == value


def test_a_key_that_the_trainer_lacks_is_unknown_with_the_one_that_may_be_meant(tmp_path: Path) -> None:
    subject = read(tmp_path, config_examples.SFT)
    assert list(subject.unknown) == ["gradient_acumulation"]
    assert "did you mean gradient_accumulation_steps?" in subject.unknown["gradient_acumulation"].spelled
    assert subject.unknown["gradient_acumulation"].place.line == 16


def test_the_deepspeed_file_that_a_config_names_is_read_with_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "ds_z3_config.json").write_text(config_examples.DEEPSPEED)
    found = read(tmp_path, config_examples.LLAMA_FACTORY_FULL).settings["deepspeed.zero_optimization.stage"]
    assert (found.value, found.place.line, Path(found.place.file).name) == (3, 6, "ds_z3_config.json")


def test_a_document_s_snippet_of_two_lines_is_enough(tmp_path: Path) -> None:
    assert read(tmp_path, "batch_size: 4\ngradient_accumulation_steps: 2\n").framework == "lora-trainer"
    assert read(tmp_path, "training:\n  batch_size: 96\n").framework == "character-transformer"
    assert read(tmp_path, '{"bf16": true, "fp16": false}').framework == "transformers"
    assert read(tmp_path, '{"max_seq_length": 1024  // Instead of 2048\n}').framework == "trl"
    assert read(tmp_path, '{"use_4bit": true, "bnb_4bit_quant_type": "nf4"}').framework == "modelforge"


def test_a_table_called_model_makes_no_recipe_of_another_trainer_s_file(tmp_path: Path) -> None:
    foreign = "model:\n  _component_: x.llama\nseed: 1\nbatch_size: 8\nmax_seq_length: 64\n"
    assert read(tmp_path, foreign).framework != "powertrain"
    assert read(tmp_path, foreign.replace("_component_: x.llama", "layers: 3")).framework == "powertrain"


def test_merged_tables_of_yaml_keep_their_own_lines(tmp_path: Path) -> None:
    subject = read(tmp_path, "a: &common {lora_r: 8}\nbase_model: m\nmicro_batch_size: 1\n<<: *common\n")
    assert (subject.value("lora.r"), subject.settings["lora.r"].place.line) == (8, 1)


def test_a_deepspeed_value_that_is_no_files_name_is_left(tmp_path: Path) -> None:
    text = config_examples.LLAMA_FACTORY_FULL
    named = next(line for line in text.splitlines() if line.startswith("deepspeed:"))
    assert read(tmp_path, text.replace(named, f"deepspeed: {'a' * 300}")).framework == "llama-factory"


@pytest.mark.parametrize(("text", "said"), [
    ("base_model: a\nstage: sft\n", "would decide it"), ("colour: blue\nsize: 3\n", "no config that is known here"),
    ("", "sets nothing"), ("- a\n- b\n", "it holds a list"), ("a: [1\n", ":2 is not YAML"),
    ('{"bf16": true,\n "fp16" false}', ":2 is not JSON: Expecting ':' delimiter"),
    ('{"bf16": tru}', "Expecting value"), ('{"bf16": true} 3', "Extra data"),
    ('{"bf16": true,\n"bf16": false}', "a second time (line 1 does so too)"),
    ("bf16: true\nbf16: false\n", ":2 sets bf16 a second time"),
])
def test_what_cannot_be_read_says_so_in_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(WrongUse) as error:
        read(tmp_path, text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_yaml_that_unfolds_without_end_is_refused(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8))
    with pytest.raises(WrongUse, match="unfolds to more than"):
        read(tmp_path, bomb)


def test_a_tag_that_names_python_is_never_followed(tmp_path: Path) -> None:
    subject = read(tmp_path, "output_dir: !!python/object/apply:os.system ['touch made']\nbf16: !!python/name:os.system\n")
    assert subject.value("training.output_dir") == ["touch made"]
    assert not Path("made").exists()
