"""What a run needs of its project, where guards once were too wide: saving, packages, modules, attributes and names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, MADE, PLAIN, loop
from test_notebooks import notebook
from test_paths import PARSED, TRAINED, project
from test_trl_rules import found

from powertrain.audit.audit import audit

SAVED = "if told.save:\n    torch.save(model.state_dict(), 'last.pt')\n"
TOLD = PARSED.format(flag="save", more=", action='store_true'", words="")


@pytest.mark.parametrize(("default", "command", "fires"), [
    ("action='store_true'", "", True), ("default=True, type=bool", "", False), ("default=None", "", True),
    ("action='store_true'", "python train.py --save\n", False), ("required=True", "", False)])
def test_weights_are_saved_by_default(default: str, command: str, fires: bool, tmp_path: Path) -> None:
    text = loop(*PLAIN, before=PARSED.format(flag="save", more=f", {default}", words=""), after=SAVED)
    made = found("never_saved", text, project(tmp_path, **{"run.sh": command}))
    assert [one.why.partition(" nothing")[0] for one in made] == ["With the defaults"] * fires


def test_where_nothing_trains_by_default_nothing_has_to_be_saved(tmp_path: Path) -> None:
    text = loop(*PLAIN, before=TOLD + "def train():\n    pass\n", after=SAVED)
    head, found_loop, rest = text.partition("for ")
    whole = head + "if told.save:\n" + "".join(f"    {line}\n" for line in (found_loop + rest).splitlines())
    assert found("never_saved", text, tmp_path)
    assert not found("never_saved", whole, tmp_path)


@pytest.mark.parametrize(("readme", "others", "fires"), [
    ("pip install torch transformers datasets peft\n", {}, True),
    ("$ pip install torch==2.1 transformers datasets wandb\n", {}, False),
    ("pip install torch\n", {}, False), ("pip install -e .[torch] and more of it\n", {}, False),
    ("pip install numpy pandas scipy tqdm\n", {}, False),
    ("pip install torch transformers datasets peft\n", {"setup.py": "wandb"}, False),
    ("pip install torch transformers unsloth axolotl\n", {}, False)])
def test_a_readme_may_say_what_to_install(readme: str, others: dict[str, str], fires: bool, tmp_path: Path) -> None:
    made = found("packages_unlisted", HEAD + "import wandb\n" + TRAINED, project(tmp_path, **{"README.md": readme, **others}))
    assert [one.severity for one in made if "wandb" in one.why] == ["critical"] * fires


@pytest.mark.parametrize(("name", "text", "fires"), [
    ("README.md", "```> python code/train.py```\n", True), ("README.md", "`python -m code.train`\n", False),
    ("run.sh", "PYTHONPATH=. python code/train.py\n", False),
    ("run.sh", "PYTHONPATH=. python app.py\npython code/train.py\n", True),
    ("run.sh", "export PYTHONPATH=.\npython code/train.py\n", False),
    ("use.ipynb", '"%env PYTHONPATH=x\\n",\n"!python code/train.py"\n', False)])
def test_modules_are_where_python_looks(name: str, text: str, fires: bool, tmp_path: Path) -> None:
    project(tmp_path, **{name: text, "parts__net.py": "import sys\nsys.path.append('.')\nsize = 8\n", "code__x.py": ""})
    (tmp_path / "code" / "train.py").write_text(HEAD + "from parts.net import size\n" + TRAINED, encoding="utf-8")
    made = [one for one in audit(tmp_path / "code" / "train.py").findings if one.rule == "modules_out_of_reach"]
    assert bool(made) == fires


def test_a_script_that_tells_python_where_to_look_finds_its_modules(tmp_path: Path) -> None:
    project(tmp_path, **{"run.sh": "python code/train.py\n", "parts__net.py": "size = 8\n", "code__x.py": ""})
    text = HEAD + "import sys\nsys.path.append('.')\nfrom parts.net import size\n" + TRAINED
    (tmp_path / "code" / "train.py").write_text(text, encoding="utf-8")
    assert not any(one.rule == "modules_out_of_reach" for one in audit(tmp_path / "code" / "train.py").findings)


NETWORK = ("class Other:\n    def tell_all(self):\n        embeddings = 1\n        return embeddings\n\n"
           "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(8, 8)\n"
           "        self.local_rank = 0\n        self.log = None\n\n    def forward(self, x):\n{body}"
           "        return self.head(x)\n"
           "model = Net()\n")


@pytest.mark.parametrize(("body", "more", "fires"), [
    ("        x = self.embeddings(x)\n", "", True),                                          # another class's own variable
    ("        self.tell_all()\n", "", True),
    ("        self.tell_all()\n", "Net.tell_all = Other.tell_all\n", False),
    ("        if self.local_rank == 0:\n            self.tell()\n", "", True),
    ("        if self.log is not None:\n            self.tell()\n", "", False),
    ("        self.tell_all()\n", "config = Other()\nconfig.__dict__.update(size=1)\n", True),
    ("        self.embeddings(x)\n", "other = Net()\nother.__dict__.update(size=1)\n", False)])
def test_an_attribute_is_given_by_its_own_class(body: str, more: str, fires: bool, tmp_path: Path) -> None:
    assert bool(found("attributes_missing", loop(*PLAIN, before=NETWORK.format(body=body) + more), tmp_path)) == fires


@pytest.mark.parametrize(("asked", "fires"), [("Reader.from_file", True), ("Reader.load", False), ("Reader.mro", False)])
def test_a_class_of_an_installed_folder_is_read(asked: str, fires: bool, tmp_path: Path) -> None:
    project(tmp_path, **{"kit__setup.py": "", "kit__kit____init__.py": "", "kit__kit__read.py": ""})
    (tmp_path / "kit" / "kit").mkdir(exist_ok=True)
    (tmp_path / "kit" / "kit" / "__init__.py").write_text(
        "class Reader:\n    @classmethod\n    def load(cls):\n        return cls()\n\n"
        "class Net:\n    @classmethod\n    def from_file(cls):\n        return cls()\n", encoding="utf-8")
    text = HEAD + "from kit import Reader\n" + TRAINED + f"{asked}()\n"
    assert bool(found("attributes_missing", text, tmp_path)) == fires


@pytest.mark.parametrize(("inner", "fires"), [("load_dataset('json', data_files='x')", True), ("load_rows('json')", False)])
def test_a_function_that_takes_the_name_of_an_import_calls_itself(inner: str, fires: bool, tmp_path: Path) -> None:
    project(tmp_path, **{"data.py": "from datasets import load_dataset\nfrom datasets import load_dataset as load_rows\n"
                                    f"def load_dataset():\n    return {inner}\n"})
    text = HEAD + HF + "from data import load_dataset\nrows = load_dataset()\n" + ARGUMENTS + "Trainer(model, args).train()\n"
    assert bool(found("arguments_refused", text, tmp_path)) == fires


def test_an_import_below_takes_the_name_back(tmp_path: Path) -> None:
    text = HEAD + MADE + "def tell():\n    return 1\nfrom rich import tell\ntell(1, 2)\n" + ARGUMENTS
    assert not found("arguments_refused", text, tmp_path)
    assert found("arguments_refused", text.replace("from rich import tell\n", ""), tmp_path)


def test_lines_without_their_indent_are_refused_whatever_else_they_have(tmp_path: Path) -> None:
    text = HEAD + TRAINED + "for epoch in range(3):\nprint(f'{epoch}')\n"
    assert found("refused_by_python", text, tmp_path)


@pytest.mark.parametrize(("cell", "fires"), [
    ("again = PeftModel.from_pretrained(model, 'out')", True), ("print(_)", False),
    ("%store -r PeftModel\nPeftModel(1)", False),
    ("PeftModel = 1", False), ("%run other.ipynb\nPeftModel(1)", False)])
def test_a_notebook_has_no_names_that_no_cell_gives(cell: str, fires: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps(notebook(HEAD + "rows = []\n" + TRAINED, cell), indent=1), encoding="utf-8")
    assert any("PeftModel" in one.why for one in audit(path).findings if one.rule == "undefined_names") == fires
    path.write_text(json.dumps(notebook("# Databricks notebook source\n" + HEAD + TRAINED, cell), indent=1), encoding="utf-8")
    assert not any(one.rule == "undefined_names" for one in audit(path).findings)


SWITCHED = PARSED.format(flag="no-log", more=", action='store_true'", words="") + (
    "{given}if {test}:\n    name = 'run'\nprint(name)\n")


@pytest.mark.parametrize(("given", "test", "said"), [
    ("logs = not told.no_log\n", "logs", "With --no_log"), ("logs = told.no_log\n", "logs", "Only --no_log"),
    ("logs = True\nlogs = not told.no_log\n", "logs", ""), ("logs = wanted(told.no_log)\n", "logs", "")])
def test_a_name_of_an_option_says_what_the_option_says(given: str, test: str, said: str, tmp_path: Path) -> None:
    made = found("given_in_some_cases", HEAD + SWITCHED.format(given=given, test=test) + TRAINED, tmp_path)
    assert [one.why.partition(" nothing")[0].partition(" gives")[0] for one in made] == [said] * bool(said)


CHOSEN = (PARSED.format(flag="kind", more=", default='{default}', choices=['a', 'b']", words="")
          + "if told.kind == 'a':\n    width = 8\nelif told.kind == 'b':\n    width = 16\nelse:\n    print('kind?')\n"
          "print(width)\n")


@pytest.mark.parametrize(("default", "command", "fires"), [
    ("c", "", True), ("a", "", False), ("c", "python train.py --kind a\n", False)])
def test_a_default_that_no_case_is_made_for(default: str, command: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + CHOSEN.format(default=default) + TRAINED
    assert bool(found("given_in_some_cases", text, project(tmp_path, **{"run.sh": command}))) == fires


@pytest.mark.parametrize(("call", "fires"), [
    ("os.mkdir('runs/first')", True), ("os.mkdir('runs')", False), ("os.makedirs('runs/first')", False),
    ("os.mkdir('runs')\nos.mkdir('runs/first')", False)])
def test_mkdir_makes_one_folder(call: str, fires: bool, tmp_path: Path) -> None:
    assert bool(found("folder_never_made", HEAD + f"import os\n{call}\n" + TRAINED, project(tmp_path))) == fires


@pytest.mark.parametrize(("name", "fires"), [
    ("Qwen/Qwen3-7B", True), ("Qwen/Qwen3-8B", False), ("meta-llama/Llama-3.2-8B-Instruct", True),
    ("Qwen/Qwen3-30B-A3B", False), ("meta-llama/Llama-3.2-11B-Vision", False), ("google/gemma-2-2b-it", False),
    ("google/gemma-2-7b", True),
    ("me/Qwen3-7B", False)])
def test_a_model_has_a_size_that_there_is(name: str, fires: bool, tmp_path: Path) -> None:
    assert bool(found("model_not_published", HEAD + HF.replace("gpt2", name) + ARGUMENTS, tmp_path)) == fires
    path = tmp_path / "a.yaml"
    path.write_text(f"base_model: {name}\nadapter: lora\ndatasets:\n  - path: a/b\n    type: alpaca\nmicro_batch_size: 1\n",
                    encoding="utf-8")
    assert any(one.rule == "model_not_published" for one in audit(path).findings) == fires


def test_lines_that_only_say_something_leave_nothing_out(tmp_path: Path) -> None:
    text = HEAD + HF + "def main():\n" + "".join(f"    {line}\n" for line in TRAINED.removeprefix(HF).splitlines())
    assert found("training_never_called", text, tmp_path)
    assert found("training_never_called", text + "print('a' 1)\n", tmp_path)
    assert not found("training_never_called", text + "main(1 2)\n", tmp_path)


STEPPED = ("import torch\n{imports}\nmodel = torch.nn.Linear(4, 4)\noptimizer = torch.optim.AdamW(model.parameters())\n"
           "for batch in rows:\n    {calls}(model(batch))\n    optimizer.step()\n    optimizer.zero_grad()\n")


@pytest.mark.parametrize(("imports", "calls", "fires"), [
    ("import steps", "steps.learn", True), ("from kit import steps", "steps.learn", True),
    ("import kit.steps", "kit.steps.learn", True), ("import steps as own", "own.learn", True),
    ("import steps", "steps.measure", False), ("from library.kit import steps\nimport steps as own", "steps.learn", False)])
def test_a_module_has_functions_too(imports: str, calls: str, fires: bool, tmp_path: Path) -> None:
    name = "kit__steps.py" if "from kit" in imports or "kit.steps" in imports else "steps.py"
    learns = "def learn(loss):\n    loss.mean().backward()\ndef measure(loss):\n    print(loss)\n"
    made = found("never_saved", STEPPED.format(imports=imports, calls=calls), project(tmp_path, **{name: learns}))
    assert bool(made) == fires
