"""Scripts are read without running them: arguments, dataclasses, helpers and files give the settings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from powertrain.audit.reading_script import read_script
from powertrain.audit.subject import Subject
from powertrain.records import WrongUse


def read(folder: Path, text: str) -> Subject:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return read_script(path)


def values(folder: Path, text: str) -> dict[str, Any]:
    return {key: setting.value for key, setting in read(folder, text).settings.items()}


def test_a_default_of_argparse_reaches_a_config_through_a_helper(tmp_path: Path) -> None:
    subject = read(tmp_path, """
import argparse
from trl import SFTConfig
def make(size, **more):
    common = {"bf16": True, **more}
    return SFTConfig("out", per_device_train_batch_size=2 * size, **common)
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default="4")
    args = parser.parse_args()
    make(args.batch_size, optim="adamw_torch")
if __name__ == "__main__":
    main()
""")
    assert subject.framework == "trl"
    assert {key: setting.value for key, setting in subject.settings.items()} == {
        "training.output_dir": "out", "training.per_device_train_batch_size": 8, "training.bf16": True,
        "training.optim": "adamw_torch"}
    assert (subject.settings["training.bf16"].place.line, subject.settings["training.bf16"].spelled) == (5, '"bf16": True')


def test_fields_of_a_dataclass_are_settings_of_the_arguments_it_extends(tmp_path: Path) -> None:
    assert values(tmp_path, """
from dataclasses import dataclass, field
from transformers import HfArgumentParser, TrainingArguments
@dataclass
class Arguments(TrainingArguments):
    learning_rate: float = 1e-4
    gradient_checkpointing: bool = field(default=True)
args, = HfArgumentParser(Arguments).parse_args_into_dataclasses()
""")["training.activation_checkpointing"] is True


def test_what_only_a_run_would_tell_is_unread_and_says_both_values(tmp_path: Path) -> None:
    subject = read(tmp_path, """
import os
from trl import SFTConfig
steps = 4
if int(os.environ["WORLD_SIZE"]) > 1:
    steps = 2
SFTConfig(gradient_accumulation_steps=steps, max_steps=int(os.environ["STEPS"]))
""")
    assert set(subject.unread) == {"training.gradient_accumulation_steps", "training.max_steps"}
    assert "2 or 4" in subject.unread["training.gradient_accumulation_steps"].spelled
    assert not subject.settings


def test_a_name_that_a_loop_changes_is_not_taken_for_its_first_value(tmp_path: Path) -> None:
    assert "training.max_steps" in read(tmp_path, """
from trl import SFTConfig
steps = 0
for _ in range(3):
    steps += 10
SFTConfig(max_steps=steps)
""").unread


def test_a_yaml_file_beside_the_script_is_read_with_its_lines(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("training:\n  learning_rate: 2.0e-4\n", encoding="utf-8")
    setting = read(tmp_path, """
import yaml
from trl import SFTConfig
with open("config.yaml") as file:
    config = yaml.safe_load(file)
SFTConfig(**config["training"])
""").settings["training.learning_rate"]
    assert (setting.value, Path(setting.place.file).name, setting.place.line) == (2e-4, "config.yaml", 2)


def test_older_names_are_read_under_the_new_ones(tmp_path: Path) -> None:
    assert values(tmp_path, """
import torch
from transformers import AutoModelForCausalLM, TrainingArguments
TrainingArguments("out", evaluation_strategy="steps", group_by_length=True, warmup_ratio=0.1)
AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float16)
""") == {"training.output_dir": "out", "training.eval_strategy": "steps", "training.train_sampling_strategy": "group_by_length",
         "training.warmup_steps": 0.1, "model.dtype": "float16", "model.path": "gpt2"}


def test_the_arguments_that_the_trainer_is_given_count_and_not_others(tmp_path: Path) -> None:
    assert values(tmp_path, """
from transformers import Trainer, TrainingArguments
other = TrainingArguments("other", max_steps=1)
args = TrainingArguments("out", max_steps=2)
Trainer(model, args).train()
""")["training.max_steps"] == 2


def test_a_plain_loop_is_a_training_loop_also_where_its_step_is_a_function(tmp_path: Path) -> None:
    subject = read(tmp_path, """
import torch
def step(batch):
    model(batch).backward()
    optimizer.step()
def train():
    for epoch in range(3):
        for batch in loader:
            step(batch)
train()
""")
    assert subject.framework == "pytorch"
    assert subject.script is not None
    assert [loop.lineno for loop in subject.script.training_loops] == [8]


def test_nothing_of_the_script_is_run(tmp_path: Path) -> None:
    read(tmp_path, f"open({str(tmp_path / 'written')!r}, 'w').write('x')\nx = 10 ** 10 ** 10\ny = 'a' * 10 ** 12\n")
    assert not (tmp_path / "written").exists()


def test_functions_that_call_each_other_without_end_are_read(tmp_path: Path) -> None:
    text = "".join(f"def f{i}(x):\n    return f{(i + 1) % 9}(x), f{(i + 2) % 9}(x), f{(i + 3) % 9}(x)\n" for i in range(9))
    read(tmp_path, text + "f0(1)\n")


def test_a_script_that_does_not_parse_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"train\.py:2"):
        read(tmp_path, "x = 1\n" + "print 'much of another Python'\n" * 60)
