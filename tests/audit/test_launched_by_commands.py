"""What an audit sees of the commands by which a project starts its script, and of the configs that the script reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from powertrain.audit.audit import audit, read_subject
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records import Software, WrongUse
from powertrain.records.findings import Finding

TODAY = Circumstances(software=Software({"transformers": "5.23.0", "trl": "1.16.0", "torch": "2.13.0", "peft": "0.21.2"}, {}))
HF = "from transformers import Trainer, TrainingArguments\n"
TOLD_FACTORY = "stage: sft\nfinetuning_type: lora\nmodel_name_or_path: x\ndataset: alpaca\ntemplate: qwen\n"
TRAIN = "Trainer(model, args).train()\n"
PARSED = HF + ("import argparse\nparser = argparse.ArgumentParser()\n"
               "parser.add_argument('--lr', '-l', type=float, default=1e-3)\n"
               "parser.add_argument('--packed', action='store_true')\nparser.add_argument('--sizes', nargs='+', type=int)\n"
               "parser.add_argument('data')\ngiven = parser.parse_args()\n"
               "args = TrainingArguments('out', learning_rate=given.lr, bf16=given.packed, seed=given.sizes[1],\n"
               "                         run_name=given.data)\n") + TRAIN
CLASSES = HF + ("from dataclasses import dataclass\nfrom transformers import HfArgumentParser\n@dataclass\nclass Own:\n"
                "    rank: int = 8\n    packed: bool = False\nparser = HfArgumentParser((Own, TrainingArguments))\n"
                "own, args = parser.{parse}\nargs.seed = own.rank if own.packed else 1\n") + TRAIN
HYDRA = HF + ("import hydra\n@hydra.main(config_path='conf', config_name='base')\ndef main(cfg):\n"
              "    args = TrainingArguments(**cfg.train)\n    Trainer(model, args).train()\nmain()\n")
FIRED = HF + ("import fire\ndef main(lr=1e-3, packed=False):\n"
              "    args = TrainingArguments('out', learning_rate=lr, bf16=packed)\n"
              "    Trainer(model, args).train()\nfire.Fire(main)\n")
READ = HF + ("import yaml\nwith open('{file}') as file:\n    cfg = yaml.safe_load(file)\n"
             "args = TrainingArguments('out', learning_rate={rate})\n") + TRAIN


def subject_of(folder: Path, text: str, **files: str) -> Subject:
    for name, told in {"README.md": "", **files}.items():
        path = folder / name.replace("__", "/").replace("_yaml", ".yaml").replace("_json", ".json").replace("_sh", ".sh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(told, encoding="utf-8")
    (folder / "train.py").write_text(text, encoding="utf-8")
    return read_subject(folder / "train.py")


def findings(folder: Path, rule: str, text: str, **files: str) -> list[Finding]:
    subject_of(folder, text, **files)
    return [each for each in audit(folder / "train.py", TODAY).findings if each.rule == rule]


def values(subject: Subject, *keys: str) -> list[Any]:
    return [subject.others[0].value(f"training.{key}") for key in keys]


@pytest.mark.parametrize(("words", "expected"), [
    ("rows.json --lr 2e-4 --packed --sizes 3 4", [2e-4, True, 4, "rows.json"]),
    ("rows.json -l=2e-4 --sizes 3 4", [2e-4, False, 4, "rows.json"]),
    ("rows.json --sizes 3 4 --lr $RATE", [None, False, 4, "rows.json"]),
    ("--si 3 4 --unknown rows.json --pack", [1e-3, True, 4, "rows.json"])])
def test_options_of_argparse(words: str, expected: list[Any], tmp_path: Path) -> None:
    subject = subject_of(tmp_path, PARSED, run_sh=f"python train.py {words}\n")
    assert values(subject, "learning_rate", "bf16", "seed", "run_name") == expected
    assert subject.value("training.learning_rate") == 1e-3
    assert subject.others[0].launch == "started as in run.sh:1"


@pytest.mark.parametrize(("parse", "words", "expected"), [
    ("parse_args_into_dataclasses()", "--rank 4 --packed --learning_rate 2e-4 --bf16", [2e-4, True, 4]),
    ("parse_args_into_dataclasses()", "--rank 4 --packed False --learning_rate 2e-4", [2e-4, None, 1]),
    ("parse_yaml_file(sys.argv[1])", "told.yaml", [3e-4, None, 16])])
def test_options_of_dataclasses(parse: str, words: str, expected: list[Any], tmp_path: Path) -> None:
    text = "import sys\n" + CLASSES.format(parse=parse)
    told = "rank: 16\npacked: true\nlearning_rate: 3.0e-4\n"
    subject = subject_of(tmp_path, text, run_sh=f"python train.py {words}\n", told_yaml=told)
    assert values(subject, "learning_rate", "bf16", "seed") == expected


def test_config_that_trl_is_given(tmp_path: Path) -> None:
    text = CLASSES.format(parse="parse_args_and_config()").replace("from transformers import HfArg", "from trl import HfArg")
    text = text.replace("HfArgumentParser", "TrlParser")
    command = "python train.py --config told.yaml --bf16\n"
    subject = subject_of(tmp_path, text, run_sh=command, told_yaml="learning_rate: 3e-4\n")
    assert values(subject, "learning_rate", "bf16") == [3e-4, True]


def test_configs_of_hydra_with_what_the_command_changes(tmp_path: Path) -> None:
    files = {"conf__base_yaml": "defaults:\n  - train: small\n  - _self_\ntrain:\n  seed: 5\n",
             "conf__train__small_yaml": "learning_rate: 2e-4\nnum_train_epochs: 3\n"}
    plain = subject_of(tmp_path, HYDRA, **files)
    assert not plain.others
    assert plain.value("training.seed") == 5
    files["conf__base_yaml"] = "defaults:\n  - train: small\n"
    subject = subject_of(tmp_path, HYDRA, run_sh="python train.py train.num_train_epochs=1 +train.bf16=true\n", **files)
    assert [subject.value(f"training.{key}") for key in ("learning_rate", "num_train_epochs")] == [2e-4, 3]
    assert values(subject, "learning_rate", "num_train_epochs", "bf16") == [2e-4, 1, True]


def test_arguments_that_fire_gives(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, FIRED, run_sh="python train.py --lr 2e-4 --packed\n")
    assert values(subject, "learning_rate", "bf16") == [2e-4, True]


def test_configs_that_fit_an_option_stand_for_a_command(tmp_path: Path) -> None:
    text = HF + ("import argparse, yaml\nparser = argparse.ArgumentParser()\nparser.add_argument('--config', required=True)\n"
                 "with open(parser.parse_args().config) as file:\n    cfg = yaml.safe_load(file)\n"
                 "args = TrainingArguments(cfg['out'], learning_rate=cfg['rate'])\n") + TRAIN
    told = {"configs__told_yaml": "out: here\nrate: 2.0e-4\n", "configs__other_yaml": "zero: 1\nstage: 3\n"}
    subject = subject_of(tmp_path, text, **told)
    assert [other.launch for other in subject.others] == ["started with configs/told.yaml"]
    assert values(subject, "learning_rate") == [2e-4]
    assert not subject_of(tmp_path, text.replace("required=True", "default='configs/told.yaml'")).others
    assert not subject_of(tmp_path, text.replace("--config", "--name")).others


def test_findings_say_whether_options_make_them(tmp_path: Path) -> None:
    text = PARSED.replace("bf16=given.packed", "bf16=given.packed, fp16=not given.packed").replace(
        "'--packed', action", "'--halved', action='store_true')\nparser.add_argument('--packed', action")
    text = text.replace("fp16=not given.packed", "fp16=given.halved")
    command = "python train.py rows --sizes 1 2 --packed --halved\n"
    made = findings(tmp_path, "both_half_precisions", text, run_sh=command)
    assert [each.when for each in made] == ["started as in run.sh:1"]
    text = text.replace("'--halved', action='store_true'", "'--halved', action='store_false'").replace(
        "'--packed', action='store_true'", "'--packed', action='store_false'")
    made = findings(tmp_path, "both_half_precisions", text, run_sh=command)
    assert [each.when for each in made] == ["started with other options than the project gives it"]
    assert [each.when for each in findings(tmp_path, "both_half_precisions", text, run_sh="")] == [""]


@pytest.mark.parametrize(("told", "rate", "fires"), [
    ("rate: 2e-5\n", "cfg['rate']", True), ("rate: 2.0e-5\n", "cfg['rate']", False),
    ("rate: 2.0e5  # of steps\n", "cfg['rate']", True), ("rate: 2.0e+5\n", "cfg['rate']", False),
    ("rate: 2e-5\n", "float(cfg['rate'])", False)])
def test_numbers_that_pyyaml_reads_as_texts(told: str, rate: str, fires: bool, tmp_path: Path) -> None:
    made = findings(tmp_path, "number_is_text", READ.format(file="told.yaml", rate=rate), told_yaml=told)
    assert [each.severity for each in made] == ["critical"] * fires


def test_json_reads_numbers(tmp_path: Path) -> None:
    text = READ.format(file="told.json", rate="cfg['rate']").replace("yaml.safe_load", "json.load").replace("yaml", "json")
    assert not findings(tmp_path, "number_is_text", text, told_json='{\n"rate": 2e-5\n}\n')


@pytest.mark.parametrize(("more", "fires"), [
    ("", True), ("cfg['pace'] = 1e-5\n", False), ("cfg.update(extra)\n", False), ("cfg.update(pace=1e-5)\n", False),
    ("if here:\n    cfg['pace'] = 1e-5\n", False)])
def test_keys_that_a_config_lacks(more: str, fires: bool, tmp_path: Path) -> None:
    text = READ.format(file="told.yaml", rate="cfg['pace']").replace("args =", f"{more}args =")
    made = findings(tmp_path, "key_missing", text, told_yaml="rate: 2.0e-5\n")
    assert [each.why for each in made] == ["The config has no pace: the run ends in a KeyError here"] * fires
    assert not findings(tmp_path, "key_missing", text.replace("args =", "try:\n    args =").replace(
        "\nTrainer(", "\nexcept KeyError:\n    args = None\nTrainer("), told_yaml="rate: 2.0e-5\n")


@pytest.mark.parametrize(("given", "fires"), [
    ("{'output_dir': 'o', 'no_such_thing': 1}", True), ("dict(output_dir='o', no_such_thing=1)", True),
    ("{k: v for k, v in {'output_dir': 'o', 'no_such_thing': 1}.items() if v is not None}", True),
    ("{k: v for k, v in {'output_dir': 'o', 'no_such_thing': 1}.items() if k in known}", False),
    ("{k: v for k, v in {'output_dir': 'o', 'no_such_thing': None}.items() if v is not None}", False)])
def test_arguments_that_a_table_gives(given: str, fires: bool, tmp_path: Path) -> None:
    text = HF + f"def make(table):\n    return TrainingArguments(**table)\nargs = make({given})\n" + TRAIN
    made = [each for rule in ("arguments_not_taken", "unknown_keys") for each in findings(tmp_path, rule, text)]
    assert bool(made) == fires
    popped = "    table = dict(table)\n    if here:\n        table.pop('no_such_thing', None)\n    return"
    text = text.replace("    return", popped)
    assert not findings(tmp_path, "arguments_not_taken", text)


def test_methods_know_what_their_object_was_made_with(tmp_path: Path) -> None:
    text = HF + ("class Runner:\n    def __init__(self, rate):\n        self.rate = rate\n        self.size = 4\n"
                 "    def grow(self):\n        self.size += 1\n    def run(self):\n"
                 "        args = TrainingArguments('out', learning_rate=self.rate, per_device_train_batch_size=self.size)\n"
                 "        Trainer(model, args).train()\nrunner = Runner(3e-4)\n")
    subject = subject_of(tmp_path, text)
    assert subject.value("training.learning_rate") == 3e-4
    assert subject.value("training.per_device_train_batch_size") is None      # a method changes it


@pytest.mark.parametrize(("how", "seed"), [
    ("for key, value in cfg.items():\n    setattr(given, key, value)\n", 7),
    ("for key, value in cfg.items():\n    if hasattr(given, key):\n        setattr(given, key, value)\n", None),
    ("for key in cfg:\n    setattr(given, key, cfg[key])\n", None), ("given = SimpleNamespace(**cfg)\n", 7),
    ("given = OmegaConf.create(cfg)\n", 7), ("", 1)])
def test_objects_that_take_the_entries_of_a_config(how: str, seed: int | None, tmp_path: Path) -> None:
    text = HF + ("import argparse, yaml\nfrom types import SimpleNamespace\nfrom omegaconf import OmegaConf\n"
                 "parser = argparse.ArgumentParser()\nparser.add_argument('--seed', default=1)\ngiven = parser.parse_args()\n"
                 f"with open('told.yaml') as file:\n    cfg = yaml.safe_load(file)\n{how}"
                 "args = TrainingArguments('out', seed=given.seed)\n") + TRAIN
    assert subject_of(tmp_path, text, told_yaml="seed: 7\nname: x\n").value("training.seed") == seed


def test_options_of_click(tmp_path: Path) -> None:
    text = HF + ("import click\n@click.command()\n@click.option('--lr', default=1e-3)\ndef main(lr):\n"
                 "    args = TrainingArguments('out', learning_rate=lr)\n    Trainer(model, args).train()\nmain()\n")
    subject = subject_of(tmp_path, text, run_sh="python train.py --lr 2e-4\n")
    assert [subject.value("training.learning_rate"), *values(subject, "learning_rate")] == [1e-3, 2e-4]


def test_a_config_that_a_function_reads_where_it_can(tmp_path: Path) -> None:
    text = HF + ("import yaml\ndef read(path):\n    try:\n"
                 "        with open(path) as file:\n            return yaml.safe_load(file)\n"
                 "    except OSError as error:\n        return str(error)\ncfg = read('told.yaml')\n"
                 "args = TrainingArguments('out', seed=cfg['seed'])\n") + TRAIN
    assert subject_of(tmp_path, text, told_yaml="seed: 7\n").value("training.seed") == 7


@pytest.mark.parametrize("told", [b"\xff\xfe\x00rate", b"rate: [", b"- 1\n", b"x" * 2_000_000])
def test_configs_that_cannot_be_read_are_left_out(told: bytes, tmp_path: Path) -> None:
    (tmp_path / "told.yaml").write_bytes(told)
    text = READ.format(file="told.yaml", rate="cfg['rate']")
    assert subject_of(tmp_path, text).value("training.learning_rate") is None
    wanted = text.replace("'told.yaml'", "parser.parse_args().config").replace(
        "import yaml", "import argparse, yaml\nparser = argparse.ArgumentParser()\nparser.add_argument('--config')")
    assert not subject_of(tmp_path, wanted).others


STARTS = ("#!/bin/bash\nRATE=3e-4\n# python other.py\npython scripts/prepare.py\ncd src\n"
          "torchrun --nproc_per_node 2 train.py rows --lr $RATE --sizes 1 2\n")


def test_a_shell_script_is_read_as_the_training_that_it_starts(tmp_path: Path) -> None:
    told = {"src__train.py": PARSED, "scripts__prepare.py": "print(1)\n", "other.py": PARSED, "jobs__started_sh": STARTS,
            "a_sh": "python src/train.py rows --lr 1e-5\n", "b_sh": "python src/train.py rows --lr 2e-5\n",
            "jobs__tool_sh": "llamafactory-cli train told.yaml\n", "told_yaml": TOLD_FACTORY, "empty_sh": "ls train.py\n",
            "other_sh": "python train.py\n", "far_sh": "cd /home/someone/project/src  # of the author\npython train.py rows\n"}
    (tmp_path / ".git").mkdir()
    subject_of(tmp_path, "print(1)\n", **told)
    subject = read_subject(tmp_path / "jobs" / "started.sh")
    assert subject.path == tmp_path / "src" / "train.py"
    assert [other.launch for other in subject.others][:1] == ["started as in jobs/started.sh:6"]
    assert values(subject, "learning_rate") == [3e-4]
    assert read_subject(tmp_path / "far.sh").path.resolve() == tmp_path / "src" / "train.py"
    assert read_subject(tmp_path / "jobs" / "tool.sh").framework == "llama-factory"
    for name, said in (("empty", "starts no script or config that is there"), ("other", "starts .*train.py, which trains")):
        with pytest.raises(WrongUse, match=said):
            read_subject(tmp_path / f"{name}.sh")
