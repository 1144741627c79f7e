"""The rules on how a project starts its script: where Python looks for modules, and the configs that parsers are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, MADE
from running_cases import ENGINE
from test_trl_rules import OF_CLASSES, TODAY, YEARS_AGO, found

from powertrain.audit.audit import audit

TOOLS = HEAD + "import sizes\n" + ARGUMENTS
PLAIN, DOTTED = "python code/train.py", "python -m code.train"


def project(folder: Path, **files: str) -> Path:
    """Write a README and files of a project ("run" is run.sh, "code__told" code/told.py), and return its folder code/."""
    for name, text in {"README.md": "", **files}.items():
        path = folder / name.replace("__", "/")
        path = path if path.suffix else path.with_suffix(".sh" if name == "run" else ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "code").mkdir(exist_ok=True)
    return folder / "code"


SHARDED = "accelerate launch --config_file zero3.yaml code/train.py"


@pytest.mark.parametrize(("command", "beside"), [(PLAIN, False), ("accelerate launch code/train.py", False), (DOTTED, True)])
def test_modules_stand_where_python_looks_for_them(command: str, beside: bool, tmp_path: Path) -> None:
    there, nearby = ("code__sizes", "sizes") if beside else ("sizes", "code__sizes")
    code = project(tmp_path, run=f"{command}\n", **{there: ""})
    made = found("modules_out_of_reach", TOOLS, code)
    assert [each.why.partition(", and ")[2].partition(" is")[0] for each in made] == ["sizes"]
    assert f" {tmp_path if beside else code}," in made[0].why
    assert [item.what for item in made[0].evidence][1:] == ([] if beside else [command.replace("code/", "")])
    project(tmp_path, **{nearby: ""})
    assert not found("modules_out_of_reach", TOOLS, code)


@pytest.mark.parametrize(("name", "text"), [
    ("run", f"export PYTHONPATH=.\n{PLAIN}"), ("run", f"pip install -e .\n{PLAIN}"), ("run", f"pip install .\n{PLAIN}"),
    ("run", f"conda develop .\n{PLAIN}"), ("run", f"{PLAIN}\n{DOTTED}"), ("run", "ls"), ("run", "python -m torch.train"),
    ("run", "deepspeed code/train.py"), ("run", SHARDED),
    ("setup.py", ""), ("pyproject.toml", ""), ("setup.cfg", ""), ("code__sizes", ""),
    ("code__sizes__inner", ""), ("Dockerfile", "ENV PYTHONPATH=/work")])
def test_modules_may_be_found_all_the_same(name: str, text: str, tmp_path: Path) -> None:
    code = project(tmp_path, run=PLAIN, sizes="")
    assert found("modules_out_of_reach", TOOLS, code)
    project(tmp_path, **{name.replace("Dockerfile", "Dockerfile.gpu"): text})
    assert not found("modules_out_of_reach", TOOLS, code)


@pytest.mark.parametrize(("line", "more"), [
    ("import sys\nsys.path.append('.')\nimport sizes\n", ""), ("try:\n    import sizes\nexcept ImportError:\n    pass\n", ""),
    ("if later:\n    import sizes\n", ""), ("from ..sizes import x\n", ""), ("import json\n", ""),
    ("import pytest\n", "pytest")])
def test_imports_that_may_work(line: str, more: str, tmp_path: Path) -> None:
    code = project(tmp_path, run=PLAIN, **{more or "sizes": ""})
    assert not found("modules_out_of_reach", TOOLS.replace("import sizes\n", line), code)
    assert found("modules_out_of_reach", TOOLS.replace("import sizes\n", "from sizes2 import x\n"), project(
        tmp_path, sizes2="x = 1\n"))


def test_a_dotted_name_begins_at_a_folder_below_the_root(tmp_path: Path) -> None:
    project(tmp_path, run="cd src\npython -m kit.train\n", src__kit__sizes="")
    text = TOOLS.replace("import sizes", "from kit import sizes")
    assert not found("modules_out_of_reach", text, tmp_path / "src" / "kit")
    assert found("modules_out_of_reach", TOOLS, tmp_path / "src" / "kit")
    project(tmp_path, run="python -m other.train\n")
    assert not found("modules_out_of_reach", TOOLS, tmp_path / "src" / "kit")
    project(tmp_path, run="python -m src.kit.train\n")
    assert found("modules_out_of_reach", text, tmp_path / "src" / "kit")


HANDBOOK = OF_CLASSES.replace("from transformers import Hf", "from alignment import DataArguments, H4").replace(
    "HfArgumentParser((Told,)).parse_args_into_dataclasses()", "H4ArgumentParser(({classes})).parse()")
BY_OPTION = OF_CLASSES.replace("args, =", "args, = told, = made()\nparser =").replace(
    ".parse_args_into_dataclasses()", "\nargs, = parser.{reads}\n")


@pytest.mark.parametrize(("classes", "key", "fires"), [
    ("Told,", "other", True), ("Told,", "learning_rate", False), ("DataArguments, Told", "evaluation_strategy", True),
    ("DataArguments, Told", "other", False), ("DataArguments, Told", "max_seq_length", False),
    ("DataArguments, DataArguments", "evaluation_strategy", False)])
def test_the_parser_of_the_alignment_handbook_refuses_keys_too(classes: str, key: str, fires: bool, tmp_path: Path) -> None:
    code = project(tmp_path, run="python code/train.py sft.yaml\n")
    (tmp_path / "sft.yaml").write_text(f"own: 2\noutput_dir: out\n{key}: 1\n", encoding="utf-8")
    text = HEAD + HANDBOOK.replace("{classes}", classes)
    assert bool(found("config_refused", text, code)) == fires
    assert not found("config_refused", text, code, YEARS_AGO)


def test_a_class_of_the_project_that_is_not_known_may_take_any_key(tmp_path: Path) -> None:
    code = project(tmp_path, run="python code/train.py sft.yaml\n")
    (tmp_path / "sft.yaml").write_text("output_dir: out\nevaluation_strategy: steps\n", encoding="utf-8")
    text = HEAD + HANDBOOK.replace("{classes}", "Told, TrainingArguments")
    assert found("config_refused", text, code)
    assert not found("config_refused", text.replace("Told(TrainingArguments)", "Told(Missing)"), code)


@pytest.mark.parametrize("rest", [False, True])
def test_a_parser_that_gives_back_the_rest_drops_what_it_does_not_know(rest: bool, tmp_path: Path) -> None:
    code = project(tmp_path, run="python code/train.py --config sft.yaml\n")
    (tmp_path / "sft.yaml").write_text("output_dir: out\nwarmup_ratio: 0.1\n", encoding="utf-8")
    (code / "train.py").write_text(HEAD + (
        "from transformers import Trainer, TrainingArguments\nfrom trl import TrlParser\n"
        f"told = TrlParser((TrainingArguments,)).parse_args_and_config({'return_remaining_strings=True' * rest})\n"
        "Trainer(model, told[0]).train()\n"), encoding="utf-8")
    said = {one.rule for one in audit(code / "train.py", TODAY).findings}
    assert ({"removed_names", "config_refused"} & said == set()) == rest


@pytest.mark.parametrize(("reads", "option", "fires"), [
    ("parse_json_file(args.told_json)", "--told_json", True), ("parse_json_file(args.told_json)", "--other", False),
    ("parse_yaml_file(os.path.abspath(told))", "--path", False),
    ("parse_json_file(args.told_json, allow_extra_keys=True)", "--told_json", False)])
def test_a_config_that_an_option_names_is_read(reads: str, option: str, fires: bool, tmp_path: Path) -> None:
    code = project(tmp_path, run=f"python code/train.py {option} sft.json\n")
    (tmp_path / "sft.json").write_text('{"own": 2, "other": 1}', encoding="utf-8")
    assert bool(found("config_refused", HEAD + BY_OPTION.replace("{reads}", reads), code)) == fires


@pytest.mark.parametrize(("call", "command", "text", "fires"), [
    ("config='ds.json'", "", '{"zero_optimization": {"stage": 2}}', True),
    ("config_params='../ds.json'", "", '{"zero_optimization": {"stage": 2}}', True),
    ("args=told", "--deepspeed_config ds.json", '{"bf16": {"enabled": "auto"}}', True),
    ("args=told", "--deepspeed ds.json", '{"bf16": {"enabled": "auto"}}', False),
    ("config=made(), args=told", "--deepspeed_config ds.json", '{"bf16": {"enabled": "auto"}}', False),
    ("config='ds.json'", "", '{"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}', False),
    ("config='ds.json'", "", "no table", False), ("config='ds.json'", "", '["auto"]', False)])
def test_the_config_of_an_engine_is_read_from_its_file(call: str, command: str, text: str, fires: bool, tmp_path: Path) -> None:
    code = project(tmp_path, run=f"deepspeed code/train.py {command}\n")
    (tmp_path / "ds.json").write_text(text, encoding="utf-8")
    made = found("engine_refused", HEAD + MADE + ENGINE.format(stage=2).replace("config=settings", call), code)
    assert [item.what for each in made for item in each.evidence][1:] == (["ds.json"] if "../" not in call else [
        "../ds.json"]) * fires


@pytest.mark.parametrize(("module", "fires"), [("trl.trainer.sft_config", True), ("mine.trainer.x", False)])
def test_classes_that_come_from_the_file_of_a_trainer_are_those_of_trl(module: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD.replace("from trl import SFTConfig, SFTTrainer\n", "") + f"from {module} import SFTConfig\n" + HF
    assert bool(found("arguments_not_taken", text + "SFTConfig('out', lenght=8)\n", tmp_path)) == fires
