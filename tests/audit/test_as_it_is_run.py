"""What a project tells to run: shell scripts with variables and options, errors that still end a run, files of other runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, MADE
from test_paths import PARSED, project
from test_trl_rules import found

from powertrain.audit.audit import audit, read_subject
from powertrain.audit.commands import commands
from powertrain.audit.reading_script import read_script

TRAINED = HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n"
FACTORY = ("--stage sft --finetuning_type lora --model_name_or_path Qwen/Qwen2.5-0.5B --template {template} \\\n"
           "  --dataset rows --learning_rate {rate} --output_dir out\n")


@pytest.mark.parametrize(("handler", "fires"), [
    ("except OSError as error:\n    print(error)\n    sys.exit(1)\n", True), ("except OSError:\n    raise\n", True),
    ("finally:\n    print(1)\n", True), ("except KeyboardInterrupt:\n    print(1)\n", True),
    ("except OSError:\n    rows = None\n", False), ("except (OSError, ValueError):\n    pass\n", False),
    ("except OSError:\n    raise\nexcept NameError:\n    pass\n", False)])
def test_an_error_that_is_caught_may_still_end_the_run(handler: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + "import sys\ntry:\n    rows = load_rows()\n" + handler + TRAINED
    assert bool(found("undefined_names", text.replace("DataLoader", "Loaders"), tmp_path)) == fires


def test_what_stands_in_a_handler_is_run_in_some_cases_only(tmp_path: Path) -> None:
    text = HEAD + "try:\n    rows = None\nexcept OSError:\n    rows = load_rows()\n    raise\n" + TRAINED
    assert not found("undefined_names", text, tmp_path)


@pytest.mark.parametrize(("default", "command", "more", "fires"), [
    ("b", "", "", True), ("a", "", "", False), ("b", "python train.py --kind a", "", False),
    ("b", "python train.py --rate 1", "", True), ("b", "", "else:\n    width = 8\n", False)])
def test_a_name_has_a_value_by_default(default: str, command: str, more: str, fires: bool, tmp_path: Path) -> None:
    parsed = PARSED.format(flag="kind", more=f", default='{default}'", words="").replace(
        "told =", "parser.add_argument('--rate')\ntold =")
    text = HEAD + parsed + "if told.kind == 'a':\n    width = 16\n" + more + "print(width)\n" + TRAINED
    assert bool(found("given_in_some_cases", text, project(tmp_path, **{"run.sh": command}))) == fires


def test_the_rest_of_the_command_line_is_one_value_more(tmp_path: Path) -> None:
    text = HEAD + ("from dataclasses import dataclass\nfrom transformers import HfArgumentParser\n@dataclass\nclass Own:\n"
                   "    rate: float = 3.0\nparser = HfArgumentParser((Own, TrainingArguments))\n"
                   "own, args, rest = parser.parse_args_into_dataclasses(return_remaining_strings=True)\n"
                   "optimizer = torch.optim.AdamW(model.parameters(), lr=own.rate)\nTrainer(model, args).train()\n")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    made = next(each for each in read_script(tmp_path / "train.py").calls if each.last == "AdamW")
    assert made.get("lr") == 3.0


@pytest.mark.parametrize(("lines", "words"), [
    ("RATE=${RATE:-1e-4}\npython train.py --rate $RATE", "--rate 1e-4"), ("python train.py --rate ${RATE:-2}", "--rate 2"),
    (': "${RATE:=3}"\npython train.py --rate "$RATE"', "--rate 3"),
    ("BASE=runs\nOUT=$BASE/a\npython train.py --out ${OUT}", "--out runs/a"),
    ("RATE=1\nif [ -n x ]; then\n  RATE=2\nfi\npython train.py --rate $RATE", "--rate $RATE"),
    ('ARGS=(\n  --rate 1  # slow\n  --out "a b"\n)\npython train.py "${ARGS[@]}"', "--rate 1 --out a b"),
    ("CMD=(python train.py\n  --rate 1)\n\"${CMD[@]}\"", "--rate 1"),
    ("rate=1\npython train.py \\\n  rate=$rate", "rate=1"), ('echo python train.py --rate 1', "")])
def test_the_variables_of_a_shell_are_filled_in(lines: str, words: str, tmp_path: Path) -> None:
    project(tmp_path, **{"run.sh": f"{lines}\n", "train.py": HEAD + TRAINED})
    script = read_script(tmp_path / "train.py").script
    said = [" ".join(each.words) for each in commands(script)] if script is not None else []
    assert said == ([words] if words else [])


@pytest.mark.parametrize("starter", ["llamafactory-cli train", "deepspeed --num_gpus 2 src/train_bash.py"])
def test_options_are_read_as_a_config(starter: str, tmp_path: Path) -> None:
    run = project(tmp_path, **{"run.sh": f"RATE=1e-4\n{starter} " + FACTORY.format(template="qwen2", rate="$RATE")}) / "run.sh"
    subject = read_subject(run)
    assert (subject.framework, subject.value("training.learning_rate")) == ("llama-factory", 1e-4)
    assert subject.settings["training.learning_rate"].place.line == 3
    rules = {one.rule: one for one in audit(run).findings}
    assert "template_unknown" in rules
    assert ("settings_refused" in rules) == starter.startswith("deepspeed")
    assert not any(one.cure.edits for one in rules.values())


def test_an_option_that_a_shell_fills_in_is_not_known(tmp_path: Path) -> None:
    run = project(tmp_path, **{"run.sh": "llamafactory-cli train " + FACTORY.format(template="qwen", rate="$1")}) / "run.sh"
    subject = read_subject(run)
    assert (subject.is_unread("training.learning_rate"), subject.in_force("training.learning_rate")) == (True, None)


def test_a_starter_of_the_projects_own_is_there(tmp_path: Path) -> None:
    run = project(tmp_path, **{"lf__src__train_bash.py": "", "run.sh": "python src/train_bash.py " + FACTORY.format(
        template="qwen", rate=1)}) / "run.sh"
    assert not any(one.rule == "settings_refused" for one in audit(run).findings)


@pytest.mark.parametrize(("path", "fires"), [("out/last", True), ("out", True), ("other", False), ("out/checkpoint-8", False)])
def test_a_model_is_loaded_from_where_one_was_saved(path: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + TRAINED + f"again = AutoModelForCausalLM.from_pretrained('{path}')\n"
    assert bool(found("loaded_but_never_saved", text, tmp_path)) == fires
    piped = "from transformers import pipeline\n" + text.replace(
        f"AutoModelForCausalLM.from_pretrained('{path}')", f"pipeline('text-generation', model='{path}')")
    assert bool(found("loaded_but_never_saved", piped, tmp_path)) == fires
    saved = text.replace("again", "model.save_pretrained('out/last')\nagain")
    assert not found("loaded_but_never_saved", saved, tmp_path)


@pytest.mark.parametrize(("other", "fires"), [
    ("open('ckpts/a.txt')\n", True), ("os.makedirs(x)\nopen('ckpts/a.txt')\n", False), ("show('ckpts')\n", False),
    ("model.save_pretrained('ckpts/a')\n", False)])
def test_another_script_that_only_reads_makes_no_folder(other: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + TRAINED + "torch.save(model.state_dict(), 'ckpts/last.pt')\n"
    assert bool(found("folder_never_made", text, project(tmp_path, **{"show.py": other}))) == fires


OPTIONS = ("rate", "steps", "width", "seed")


@pytest.mark.parametrize(("name", "options", "fires"), [
    ("train_alpaca.py", OPTIONS, True), ("train_alpaca.py", (*OPTIONS, "other"), False), ("evaluate.py", OPTIONS, False),
    ("train_alpaca.py", OPTIONS[:2], False)])
def test_a_command_whose_options_one_script_takes_means_it(name: str, options: tuple[str, ...], fires: bool,
                                                           tmp_path: Path) -> None:
    parsed = "import argparse\nparser = argparse.ArgumentParser()\n" + "".join(
        f"parser.add_argument('--{option}')\n" for option in OPTIONS) + "told = parser.parse_args()\n"
    words = " ".join(f"--{option} 1" for option in options)
    project(tmp_path, **{"scripts__run.sh": f"python {name} {words}\n"})
    assert bool(found("script_missing", HEAD + parsed + TRAINED, tmp_path)) == fires
    project(tmp_path, **{"train_alpacas.py": parsed})
    assert not found("script_missing", HEAD + parsed + TRAINED, tmp_path)


@pytest.mark.parametrize(("line", "fires"), [
    ("All of our runs are logged with the help of wandb, so that you can look at them later.", True),
    ("You need wandb, torch and transformers of a new release to run any of the scripts here.", False), ("- wandb", False)])
def test_a_sentence_that_names_a_package_lists_none(line: str, fires: bool, tmp_path: Path) -> None:
    told = f"pip install -r requirements.txt\n{line}\n"
    project(tmp_path, **{"README.md": told, "requirements.txt": "torch\ntransformers\ntrl"})
    text = HEAD.replace("from accelerate import Accelerator\n", "") + "import wandb\n" + TRAINED
    assert bool(found("packages_unlisted", text, tmp_path)) == fires


@pytest.mark.parametrize(("line", "fires"), [
    ("python train.py --resume_from_checkpoint out/checkpoint-8", True),
    ("python train.py --resume_from_checkpoint /data/checkpoint-8", False),
    ("python train.py --resume_from_checkpoint out", False),
    ("python train.py --out out\npython train.py --resume_from_checkpoint out/checkpoint-8", False)])
def test_a_command_goes_on_from_a_checkpoint_that_is_there(line: str, fires: bool, tmp_path: Path) -> None:
    parsed = PARSED.format(flag="resume_from_checkpoint", more="", words="").replace(
        "told =", "parser.add_argument('--out')\ntold =")
    project(tmp_path, **{"run.sh": f"{line}\n", "train.py": HEAD + MADE + parsed + TRAINED})
    assert any(one.rule == "resumes_from_nothing" for one in audit(tmp_path / "run.sh").findings) == fires


def test_the_config_of_deepspeed_is_read_where_the_run_is_started(tmp_path: Path) -> None:
    text = HEAD + PARSED.format(flag="rate", more="", words="") + TRAINED.replace("='out'", "='out', deepspeed='zero.json'")
    project(tmp_path, **{"run.sh": "python code/train.py --rate 1\n", "code__zero.json": "{}", "code__train.py": text})
    assert any(one.rule == "no_folder_fits" for one in audit(tmp_path / "code" / "train.py").findings)
    project(tmp_path, **{"zero.json": "{}"})
    assert not any(one.rule == "no_folder_fits" for one in audit(tmp_path / "code" / "train.py").findings)
