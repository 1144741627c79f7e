"""What comes through a star, lists that are added to, tables that are updated, and notebooks that use a module."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF
from test_projects import project
from trl_cases import TAKEN

from powertrain.audit.audit import read_subject
from powertrain.audit.installed import Defined, parameters
from powertrain.audit.project import root_of
from powertrain.audit.rules import RULES
from powertrain.audit.subject import Circumstances
from powertrain.records import Software

BY_NAME = {rule.name: rule for rule in RULES}
TODAY = Circumstances(software=Software({"torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0"}, {}))
STAR = "from transformers import *\n"
MADE = "Trainer(model, TrainingArguments('out'), train_dataset=rows{more}).train()\n"
SYNCED = ("from vllm import LLM\nllm = LLM('gpt2')\n" + HEAD + ARGUMENTS +
          "llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(model.state_dict())\n")
UPDATED = HEAD + HF + ("given = {{'output_dir': 'out'}}\nif has_validation():\n    given.{how}\n{more}"
                       "Trainer(model, TrainingArguments(**given), train_dataset=rows).train()\n")
OLD = "update({'evaluation_strategy': 'steps'})"
CHOSEN = HEAD + HF + ARGUMENTS + (
    "import transformers\nif {test}:\n    given = {{'load_in_4bit': args.four}}\nelse:\n    given = {{}}\n"
    "model = AutoModelForCausalLM.from_pretrained('gpt2', **given)\nbar.update(1)\n")
LOOP = ("model = AutoModelForCausalLM.from_pretrained('gpt2'{more})\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "for batch in loader:\n    loss = model(**batch).loss\n    loss.backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\n")
OPTION = ("import argparse\nfrom datasets import load_dataset\nparser = argparse.ArgumentParser()\n"
          "parser.add_argument('--data', default='{data}')\ntold = parser.parse_args()\nrows = load_dataset(told.data)\n")
PAIRS = HEAD + ("from trl import RewardConfig, RewardTrainer\n"
                "def tokenised(row):\n    return {{'input_ids_chosen': tokenizer(row['chosen'])['input_ids']}}\n"
                "rows = rows.map(tokenised)\nrows = rows.remove_columns([{gone}])\n"
                "RewardTrainer(model, args=RewardConfig('out'), train_dataset=rows).train()\n")
GROWN = HEAD + HF + ("found = []\nfor path in paths:\n    {does}\nif found:\n"
                     "    Trainer(model, TrainingArguments('out', past_index=1), train_dataset=found).train()\n")


@pytest.mark.parametrize(("name", "text", "fires"), [
    ("removed_imports", STAR + "tokenizer = BertTokenizerFast.from_pretrained('x')\n" + MADE.format(more=""), True),
    ("removed_imports", STAR + "tokenizer = RobertaTokenizerFast.from_pretrained('x')\n" + MADE.format(more=""), False),
    ("removed_imports", "from transformers import BertTokenizerFast\n" + HEAD + ARGUMENTS, False),
    ("removed_imports", STAR + "rows = LineByLineTextDataset(tokenizer, 'x')\n" + MADE.format(more=""), True),
    ("removed_imports", STAR + "from own import *\nrows = LineByLineTextDataset(tokenizer, 'x')\n"
     + MADE.format(more=""), False),
    ("removed_imports", STAR + "class LineByLineTextDataset:\n    pass\nrows = LineByLineTextDataset()\n"
     + MADE.format(more=""), False),
    ("arguments_not_taken", STAR + MADE.format(more=", prediction_loss_only=True"), True),
    ("arguments_not_taken", STAR + MADE.format(more=", eval_dataset=rows"), False),
    ("attributes_missing", SYNCED, True),
    ("attributes_missing", "import os\nos.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] = '0'\n" + SYNCED, False),
    ("attributes_missing", SYNCED.replace("model_executor", "engine_core"), False),
    ("arguments_not_taken", UPDATED.format(how=OLD, more=""), True),
    ("arguments_not_taken", UPDATED.format(how=OLD.replace("evaluation", "eval"), more=""), False),
    ("arguments_not_taken", UPDATED.format(how=OLD, more="given.pop('evaluation_strategy', None)\n"), False),
    ("arguments_not_taken", UPDATED.format(how="clear()", more="") + f"given.{OLD}\n", False),
    ("removed_call_arguments", CHOSEN.format(test="transformers.__version__ >= '4.30'"), True),
    ("removed_call_arguments", CHOSEN.format(test="transformers.__version__ < '5'"), False),
    ("removed_call_arguments", CHOSEN.format(test="four") + "given.pop('load_in_4bit', None)\n", False),
    ("removed_call_arguments", HEAD + HF + LOOP.format(more=", load_in_8bit=True"), True),
    ("removed_call_arguments", HEAD + HF + LOOP.format(more=""), False),
    ("data_with_script", HEAD + HF + OPTION.format(data="own_data.py") + ARGUMENTS, True),
    ("data_with_script", HEAD + HF + OPTION.format(data="own_data") + ARGUMENTS, False),
    ("data_with_script", HEAD + TAKEN.format(name="rows", split="train"), False),
    ("pairs_of_older_trainer", PAIRS.format(gone="'prompt', 'chosen', 'rejected'"), True),
    ("pairs_of_older_trainer", PAIRS.format(gone="'prompt'"), False),
    ("removed_names", GROWN.format(does="found.append(path)"), True),
    ("removed_names", GROWN.format(does="print(path)"), False),
])
def test_it_is_found_there_and_in_no_near_miss(name: str, text: str, fires: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    assert bool([*BY_NAME[name].find(read_subject(path), TODAY)]) is fires


@pytest.mark.parametrize("taken", ["*", "Trainer, TrainingArguments"])
def test_a_star_of_one_file_says_nothing_of_another(taken: str, tmp_path: Path) -> None:
    path = project(tmp_path, own=f"from transformers import {taken}\nrows = LineByLineTextDataset('x')\n",
                   train=HEAD + HF + "import own\n" + MADE.format(more=""))
    found = [*BY_NAME["removed_imports"].find(read_subject(path), TODAY)]
    assert [item.place.line for each in found for item in each.evidence] == ([2] if taken == "*" else [])


@pytest.mark.parametrize("others", [0, 1])
def test_a_notebook_that_alone_uses_a_module_is_read_with_it(others: int, tmp_path: Path) -> None:
    (tmp_path / "ReadMe.md").write_text("a project\n", encoding="utf-8")
    (tmp_path / "parts").mkdir()
    module = tmp_path / "parts" / "fitting.py"
    module.write_text(HEAD + "def fit(model, loader):\n    for batch in loader:\n        model(**batch).loss.backward()\n",
                      encoding="utf-8")
    cell = {"cell_type": "code", "source": ["from parts.fitting import fit\n", "fit(model, loader)\n"]}
    for at in range(1 + others):
        (tmp_path / f"run{at}.ipynb").write_text(json.dumps({"cells": [cell], "nbformat": 4}, indent=1), encoding="utf-8")
    assert root_of(module) == tmp_path.resolve()
    assert [other.path.name for other in read_subject(module).others] == ([] if others else ["run0.ipynb"])


def test_a_class_that_derives_from_one_of_its_own_name_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("import other\nclass Own(other.Own):\n    pass\n", encoding="utf-8")
    node = ast.parse("class Own(other.Own):\n    pass\n").body[0]
    assert isinstance(node, ast.ClassDef)
    assert parameters(Defined(path, node)) is None
