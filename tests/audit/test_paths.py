"""The rules on the files and folders that a run reads and writes, and on the commands that start it."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF
from test_trl_rules import found

from powertrain.audit.audit import audit

TRAINED = HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n"
ROWS = "from datasets import load_dataset\nrows = load_dataset('json', data_files='{path}')['train']\n"
PARSED = ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--{flag}'{more})\n"
          "told = parser.parse_args({words})\n")
ADAPTER = "from peft import PeftModel\nmodel = PeftModel.from_pretrained(model, '{name}')\n"


def project(folder: Path, **files: str) -> Path:
    """Write a README and files of a project ("data__rows.json" is data/rows.json)."""
    for name, text in {"README.md": "", **files}.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("path", "others", "case"), [
    ("rows.json", {"data__rows.json": "[]"}, "data/rows.json"),
    ("data/rows.json", {"split.py": "import json\njson.dump([], open('rows.json', 'w'))\n"}, "writes it to rows.json"),
    ("data/rows.json", {"split.py": "a = 'data'\njson.dump([], open('rows.json', 'w'))\n"}, ""),       # it knows the folder
    ("data/rows.json", {"split.py": "open('/work/rows.json', 'w')\n"}, ""), ("data/config.json", {
        "split.py": "open('config.json', 'w')\n"}, ""),
    ("data/rows.json", {"split.py": "open('data/rows.json', 'w')\n"}, ""),                  # written there
    ("data/rows.json", {"split.py": "def write(folder):\n    open(folder + '/rows.json', 'w')\n"
                                    "write('other')\nwrite(input())\n"}, ""),
    ("data/rows.json", {"data__rows.json": "[]", "old__rows.json": "[]"}, ""),               # there
    ("rows.json", {"a__rows.json": "[]", "b__rows.json": "[]"}, ""),                         # which of them is not known
    ("rows.json", {"data__rows.json": "[]", "run.sh": "cd data\npython ../train.py\n"}, ""),
    ("rows.json", {"data__rows.json": "[]", "run.sh": "cp data/rows.json .\npython train.py\n"}, ""),
    ("rows.json", {"data__rows.json": "[]", ".gitignore": "*.json\n"}, ""),
    ("rows.json", {}, ""),                                                                   # the user's own data
    ("https://x.org/rows.json", {"data__rows.json": "[]"}, "")])
def test_a_file_is_read_where_it_is(path: str, others: dict[str, str], case: str, tmp_path: Path) -> None:
    made = found("file_elsewhere", HEAD + ROWS.format(path=path) + TRAINED, project(tmp_path, **others))
    assert bool(made) == bool(case)
    assert not made or case in made[0].why


@pytest.mark.parametrize("guard", [
    "import os\nif os.path.exists('rows.json'):\n    pass\n{}", "try:\n    {}except OSError:\n    pass\n", "if said:\n    {}"])
def test_a_file_that_the_script_asks_for_may_be_elsewhere(guard: str, tmp_path: Path) -> None:
    read = "rows = open('rows.json').read()\n"
    project(tmp_path, data__rows="", **{"data__rows.json": "[]"})
    assert found("file_elsewhere", HEAD + read + TRAINED, tmp_path)
    assert not found("file_elsewhere", HEAD + guard.format(read) + TRAINED, tmp_path)


@pytest.mark.parametrize(("name", "text", "fires"), [
    ("axolotl.yaml", "base_model: x/y\nadapter: lora\ndatasets:\n  - path: data/rows.json\n    type: alpaca\n"
                     "micro_batch_size: 1\nnum_epochs: 1\n", True),
    ("factory.yaml", "model_name_or_path: x/y\nstage: sft\nfinetuning_type: lora\ndataset: a\ndataset_dir: data\n"
                     "template: qwen\ndo_train: true\n", False)])
def test_a_config_names_data_that_are_there(name: str, text: str, fires: bool, tmp_path: Path) -> None:
    project(tmp_path, **{"rows.json": "[]", "lf__dataset_info.json": "{}", name: text})
    assert any(one.rule == "file_elsewhere" for one in audit(tmp_path / name).findings)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.json").write_text("[]", encoding="utf-8")
    (tmp_path / "data" / "dataset_info.json").write_text("{}", encoding="utf-8")
    assert not any(one.rule == "file_elsewhere" for one in audit(tmp_path / name).findings)


@pytest.mark.parametrize(("before", "path", "others", "fires"), [
    ("", "'ckpts/last.pt'", {}, True), ("", "f'ckpts/{step}.pt'", {}, True), ("", "'ckpts/%d.pt' % step", {}, True),
    ("import os\n", "os.path.join('ckpts', f'{step}.pt')", {}, True), ("", "'last.pt'", {}, False),
    (PARSED.format(flag="out", more=", default='ckpts'", words=""), "told.out + '/last.pt'", {}, True),
    ("", "folder + '/last.pt'", {}, False), ("", "'ckpts/last.pt'", {"ckpts__.keep": ""}, False),
    ("import os\nos.makedirs('ckpts')\n", "'ckpts/last.pt'", {}, False),
    ("import os\nos.makedirs('logs')\n", "'ckpts/last.pt'", {}, True),
    ("import os\nos.makedirs(f'logs/{step}')\n", "'ckpts/last.pt'", {}, True),
    ("import os\nos.makedirs(folder)\n", "'ckpts/last.pt'", {}, False),
    ("model.save_pretrained('ckpts')\n", "'ckpts/last.pt'", {}, False),
    ("", "'ckpts/last.pt'", {"run.sh": "mkdir -p ckpts\n"}, False),
    ("", "'ckpts/last.pt'", {"README.md": "The folder ckpts is needed.\n"}, True),
    ("", "'ckpts/last.pt'", {"prepare.py": "make_all('ckpts')\n"}, False)])
def test_a_folder_is_made_before_it_is_written_into(before: str, path: str, others: dict[str, str], fires: bool,
                                                    tmp_path: Path) -> None:
    text = HEAD + "step, folder = state()\n" + before + TRAINED + f"torch.save(model.state_dict(), {path})\n"
    assert bool(found("folder_never_made", text, project(tmp_path, **others))) == fires


@pytest.mark.parametrize(("read", "fires"), [
    ("open('/home/nuc/data/rows.txt')", True), ("AutoTokenizer.from_pretrained('/Users/nuc/gpt')", True),
    ("open('/data/rows.txt')", False), ("open('/home/user/rows.txt')", False),
    ("open(told.data)", False)])
def test_a_path_of_one_persons_machine(read: str, fires: bool, tmp_path: Path) -> None:
    parsed = PARSED.format(flag="data", more=", default='/home/someone/rows.txt'", words="")
    assert bool(found("path_of_author", HEAD + parsed + f"rows = {read}\n" + TRAINED, tmp_path)) == fires


@pytest.mark.parametrize(("first", "second", "fires"), [
    ("../data/a.txt", "../../words/b.txt", True), ("../../data/a.txt", "../../words/b.txt", False),
    ("../data/a.txt", "../../words/none.txt", False), ("../data/a.txt", "/words/b.txt", False)])
def test_all_files_are_found_from_one_folder(first: str, second: str, fires: bool, tmp_path: Path) -> None:
    project(tmp_path, data__a="", **{"data__a.txt": "", "words__b.txt": "", "src__code__x.py": ""})
    text = HEAD + f"a, b = open('{first}'), open('{second}')\n" + TRAINED
    assert bool(found("no_folder_fits", text, tmp_path / "src" / "code")) == fires


@pytest.mark.parametrize(("command", "fires"), [
    ("python train.py --data code/rows.json", True), ("python train.py --data rows.json", False),
    ("python code/train.py --data code/rows.json", False), ("cd code && python train.py --data code/rows.json", False)])
def test_a_command_finds_the_script_and_its_files(command: str, fires: bool, tmp_path: Path) -> None:
    project(tmp_path, **{"code__rows.json": "[]", "code__run.sh": f"{command}\n"})
    text = HEAD + PARSED.format(flag="data", more="", words="") + TRAINED
    (tmp_path / "code" / "train.py").write_text(text, encoding="utf-8")
    made = audit(tmp_path / "code" / "train.py").findings
    assert any(one.rule == "no_folder_fits" for one in made) == fires


@pytest.mark.parametrize(("default", "others", "fires"), [
    ("'train.yaml'", {"configs__a.yaml": ""}, True), ("'train.yaml'", {}, False), ("'train.yaml'", {"train.yaml": ""}, False),
    ("'train.yaml'", {"configs__a.yaml": "", "run.sh": "python train.py --config configs/a.yaml"}, False),
    ("None", {"configs__a.yaml": ""}, False)])
def test_the_default_config_is_there(default: str, others: dict[str, str], fires: bool, tmp_path: Path) -> None:
    text = HEAD + PARSED.format(flag="config", more=f", default={default}", words="") + TRAINED
    assert bool(found("default_config_missing", text, project(tmp_path, **others))) == fires


@pytest.mark.parametrize(("line", "fires"), [
    ("python run_train.py", True), ("python train.py", False), ("python other_name.py", False), ("python $X_train.py", False),
    ("git clone x\npython run_train.py", False), ("cd x\npython run_train.py", False)])
def test_a_command_starts_a_script_that_is_there(line: str, fires: bool, tmp_path: Path) -> None:
    assert bool(found("script_missing", HEAD + TRAINED, project(tmp_path, **{"run.sh": f"{line}\n"}))) == fires
    project(tmp_path, **{"run_train.py": ""})
    assert not found("script_missing", HEAD + TRAINED, tmp_path)


@pytest.mark.parametrize(("words", "command", "severity"), [
    ("''", "python train.py --rate 1", "critical"), ("[]", "python train.py --rate 1", "critical"),
    ("[]", "python train.py", "moderate"), ("", "python train.py --rate 1", ""),
    ("sys.argv[1:]", "python train.py --rate 1", "")])
def test_the_command_line_is_read(words: str, command: str, severity: str, tmp_path: Path) -> None:
    text = HEAD + PARSED.format(flag="rate", more="", words=words) + TRAINED
    made = found("command_line_ignored", text, project(tmp_path, **{"run.sh": f"{command}\n"}))
    assert [one.severity for one in made] == [severity] * bool(severity)


@pytest.mark.parametrize(("name", "more", "others", "fires"), [
    ("my-adapter", "", {}, True), ("owner/my-adapter", "", {}, False),
    ("my-adapter", "model.save_pretrained('my-adapter')\n", {}, False),
    ("my-adapter", "", {"first.py": "save('my-adapter')"}, False), ("my-adapter", "", {"my-adapter__x": ""}, False),
    ("my-adapter", "model.push_to_hub('my-adapter')\n", {}, True)])
def test_adapters_are_saved_before_they_are_loaded(name: str, more: str, others: dict[str, str], fires: bool,
                                                   tmp_path: Path) -> None:
    text = HEAD + TRAINED + more + ADAPTER.format(name=name)
    assert bool(found("adapter_not_there", text, project(tmp_path, **others))) == fires


WORDS = PARSED.format(flag="rate", more=", type=float", words="")


@pytest.mark.parametrize(("name", "text", "lost"), [
    ("run.sh", "python train.py --rate 1 steps=2", "steps=2"), ("run.sh", "RATE=2\npython train.py --other $RATE", "--other"),
    ("docs__use.md", "Say `python train.py --other 1` then.", "--other"),
    ("Makefile", "all:\n\tpython train.py --other 1\n", "--other"),
    ("run.bat", "python train.py ^\n  --other 1\n", "--other"), ("use.ipynb", '"!python train.py --other 1\\n",\n', "--other"),
    ("run.sh", "python train.py --rate 1; python b.py --other 2", ""), ("run.sh", "R=1\npython train.py --rate ${R:-2}", ""),
    ("run.sh", "python -m train --other 1", "--other"), ("run.sh", "python train.py --rate 1", ""),
    ("README.md", "python train.py and then wait", ""), ("use.ipynb", '"python train.py --other 1"\n', "")])
def test_commands_of_all_kinds_of_files(name: str, text: str, lost: str, tmp_path: Path) -> None:
    made = found("command_refused", HEAD + WORDS + TRAINED, project(tmp_path, **{name: text}))
    assert [one.why.partition("take ")[2].partition(":")[0] for one in made] == [lost] * bool(lost)


@pytest.mark.parametrize(("words", "fires"), [("ldoss=a", True), ("lr=1", False), ("loss=b", False), ("+new=1", False),
                                              ("model.size=3", False), ("hydra.run.dir=x", False)])
def test_hydra_refuses_keys_that_its_config_does_not_have(words: str, fires: bool, tmp_path: Path) -> None:
    config = "defaults:\n  - loss: a\n  - model: none\nlr: 2\n"
    project(tmp_path, **{"conf__config.yaml": config, "conf__loss__a.yaml": "beta: 1\n",
                         "conf__model__b.yaml": "size: 2\n", "run.sh": f"python train.py {words}\n"})
    text = HEAD + ("import hydra\n@hydra.main(config_path='conf', config_name='config')\ndef main(cfg):\n"
                   "    print(cfg.lr)\n") + TRAINED
    assert bool(found("command_refused", text, tmp_path)) == fires


@pytest.mark.parametrize(("flag", "fires"), [("--test", True), ("--size", False), ("--nofast", False), ("--flagfile", False)])
def test_absl_refuses_flags_that_it_was_not_told_of(flag: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + ("from absl import app, flags\nflags.DEFINE_integer('size', 1, 'x')\nflags.DEFINE_bool('fast', True, 'x')\n"
                   "def main(_):\n    pass\n") + TRAINED + "app.run(main)\n"
    assert bool(found("command_refused", text, project(tmp_path, **{"run.sh": f"python train.py {flag} 1\n"}))) == fires


RESUMED = HF + ARGUMENTS + "trainer = Trainer(model, args, train_dataset=rows)\ntrainer.train(resume_from_checkpoint={value})\n"


@pytest.mark.parametrize(("value", "config", "fires"), [
    ("True", "", True), ("told['again']", "again: true\n", True), ("told['again']", "again: false\n", False),
    ("told['again']", "again: /home/x/out/checkpoint-5\n", True), ("told['again']", "again: out/checkpoint-5\n", False)])
def test_the_first_run_has_no_checkpoint(value: str, config: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + "import yaml\ntold = yaml.safe_load(open('a.yaml'))\n" + RESUMED.format(value=value)
    assert bool(found("resumes_from_nothing", text, project(tmp_path, **{"a.yaml": config}))) == fires


@pytest.mark.parametrize(("said", "needs"), [
    ("model = AutoModelForCausalLM.from_pretrained('x/y', attn_implementation='flash_attention_2')\n", "flash_attn"),
    ("args = TrainingArguments('out', optim='paged_adamw_8bit')\n", "bitsandbytes"),
    ("args = TrainingArguments('out', deepspeed='ds.json')\n", "deepspeed"), ("", "")])
def test_packages_that_a_setting_needs_are_listed(said: str, needs: str, tmp_path: Path) -> None:
    text = HEAD + HF + (said or ARGUMENTS) + "Trainer(model, args).train()\n"
    project(tmp_path, **{"requirements.txt": "torch\ntrl\n", "README.md": "pip install -r requirements.txt\n"})
    made = found("packages_unlisted", text, tmp_path)
    assert [one.severity for one in made] == ["critical"] * bool(needs)
    (tmp_path / "requirements.txt").write_text(f"torch\ntrl\n{needs}\n", encoding="utf-8")
    assert not found("packages_unlisted", text, tmp_path)
