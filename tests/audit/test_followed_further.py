"""Modules that lie elsewhere, and calls that no start comes to."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import HEAD, HF
from test_names_as_found import BY_NAME, TODAY
from test_paths import project

from powertrain.audit.audit import read_subject

GONE = "from transformers import AutoModelForVision2Seq\n"
LOOP = HEAD + "for batch in loader:\n    model(**batch).loss.backward()\n"
OF_LIGHTNING = ("import pytorch_lightning as pl\nfrom transformers import T5Tokenizer\n"
                "class Own(pl.LightningModule):\n    def training_step(self, batch, at):\n        return self.trainer.{asks}\n")
FIT = "trainer = pl.Trainer(max_epochs=1)\ntrainer.fit(Own())\n"
LATE = HEAD + HF + ("def main():\n    {before}\n    args = TrainingArguments('out', evaluation_strategy='no')\n"
                    "    Trainer(model, args, train_dataset=rows).train()\nmain()\n")


def fires(name: str, path: Path) -> bool:
    subject = read_subject(path)
    return any([*BY_NAME[name].find(each, TODAY)] for each in (subject, *subject.others))


@pytest.mark.parametrize(("there", "line", "said"), [
    ({"book__setup.py": "", "book__src__kit__models.py": GONE, "setup.cfg": ""}, "from kit.models import x\n", True),
    ({"deep__kit__models.py": GONE, "setup.cfg": ""}, "import sys\nsys.path.append('deep/kit')\nfrom models import x\n", True),
    ({"deep__kit__models.py": GONE, "setup.cfg": ""}, "from models import x\n", False)])
def test_modules_are_looked_for_where_a_run_finds_them(there: dict[str, str], line: str, said: bool, tmp_path: Path) -> None:
    path = project(tmp_path, **{**there, "part__train.py": line + LOOP}) / "part" / "train.py"
    assert fires("removed_imports", path) is said


@pytest.mark.parametrize(("asks", "said"), [
    ("gpus", True), ("num_devices", False), ("checkpoint_callback", False)])
def test_lightning_trains_by_fit_and_its_trainer_has_lost_attributes(asks: str, said: bool, tmp_path: Path) -> None:
    project(tmp_path, **{"own.py": OF_LIGHTNING.format(asks=asks), "train.py": (
        "import pytorch_lightning as pl\nfrom own import *\n" + FIT.replace("(max_epochs=1)", ".from_argparse_args(told)"))})
    assert fires("attributes_missing", tmp_path / "train.py") is said


@pytest.mark.parametrize(("asks", "said"), [("lr_schedulers", True), ("checkpoint_callback", False)])
def test_a_trainer_of_lightning_still_has_its_checkpoint_callback(asks: str, said: bool, tmp_path: Path) -> None:
    path = project(tmp_path, **{"train.py": OF_LIGHTNING.format(asks="x") + FIT + f"print(trainer.{asks})\n"})
    assert fires("attributes_missing", path / "train.py") is said


@pytest.mark.parametrize(("before", "said"), [("for x in open('a'):\n        raise SystemExit", False), ("pass", False),
                                              ("found = check()\n    if found is None or True:\n        return", True)])
def test_arguments_are_said_of_calls_that_no_start_comes_to(before: str, said: bool, tmp_path: Path) -> None:
    path = project(tmp_path, **{"train.py": LATE.format(before=before)}) / "train.py"
    assert fires("removed_names", path) is not said
    assert fires("arguments_not_taken", path) is said


@pytest.mark.parametrize(("more", "users"), [({}, []), ({"b__fitting.py": ""}, ["main.py"])])
def test_a_module_is_used_by_those_who_do_not_have_their_own(more: dict[str, str], users: list[str], tmp_path: Path) -> None:
    both = {f"{folder}__main.py": "from fitting import fit\nfit(model, loader)\n" for folder in "ab"}
    project(tmp_path, **both, **more, **{"README.md": "", "a__fitting.py": (
        HEAD + "def fit(model, loader):\n    for batch in loader:\n        model(**batch).loss.backward()\n")})
    assert [other.path.name for other in read_subject(tmp_path / "a" / "fitting.py").others] == users


@pytest.mark.parametrize(("line", "recipe", "said"), [
    ("tune run own_recipe --config own.yaml", "own_recipe.py", True),
    ("tune run own_recipe.py --config own.yaml", "own_recipe.py", True),
    ("tune run own_recipe --config other.yaml", "own_recipe.py", False),
    ("tune run lora_finetune_single_device --config own.yaml", "lora_finetune_single_device.py", False)])
def test_the_recipe_of_a_config_is_read(line: str, recipe: str, said: bool, tmp_path: Path) -> None:
    project(tmp_path, **{"README.md": f"    {line}\n", recipe: "from torchtune.modules.peft import load_dora_magnitudes\n",
                         "own.yaml": "model:\n  _component_: torchtune.models.llama2.lora_llama2_7b\n"
                         "tokenizer:\n  _component_: torchtune.models.llama2.llama2_tokenizer\nepochs: 1\n"})
    assert fires("components_moved", tmp_path / "own.yaml") is said


@pytest.mark.parametrize(("key", "said"), [("0", True), ("'train'", False)])
def test_a_value_is_followed_into_the_module_that_gives_it(key: str, said: bool, tmp_path: Path) -> None:
    path = project(tmp_path, **{
        "rows.py": "from datasets import load_dataset\nparts = load_dataset('text', data_files={'train': 'a.txt'})\n",
        "train.py": HEAD + f"from rows import parts as data\nprint(data[{key}])\nTrainer(1).train()\n"})
    assert fires("split_not_there", path / "train.py") is said
