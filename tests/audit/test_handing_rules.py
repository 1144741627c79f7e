"""Rules on what is handed on to files, models and adapters: each fires where it is so, and not in its near miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, MADE, PARALLEL, PLAIN, TOKENIZER, loop
from handing_cases import HANDING_CASES
from refusal_cases import DECODED
from test_library_rules import BY_NAME, WITH_RELEASES, said

from powertrain.audit.audit import read_subject
from powertrain.audit.project import root_of

CHANCES = "def chances(scores, tokens):\n    return scores.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)\n"
READ = ("ids = batch['ids']", "told = model(ids)", "loss = -chances(told.logits{cut}, {tokens}).mean()", *PLAIN[1:])
TWICE = ("def measure(row):\n    return tokenizer(row['text'], padding=False)\nrows.map(measure)\ndef tokenise(row):\n"
         "    told = tokenizer(row['text'], padding={padding})\n    told['labels'] = told['input_ids'].copy()\n"
         "    return told\n"
         + ARGUMENTS + "Trainer(model, args, train_dataset=rows.map(tokenise)).train()\n")
UNWRAPPED = "model.{method}()\ninner = model.module\n"
OPTION = ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--write', action='store_true')\n"
          "told_by = parser.parse_args()\n")


@pytest.mark.parametrize("name", HANDING_CASES)
def test_it_fires_in_its_case_and_not_in_its_near_miss(name: str, tmp_path: Path) -> None:
    assert len(said(name, HANDING_CASES[name][0], tmp_path)) == 1
    assert said(name, HANDING_CASES[name][1], tmp_path) == []


@pytest.mark.parametrize(("rule", "defect", "none"), [
    ("chances_of_next_token", loop(*(line.format(cut="", tokens="ids") for line in READ), before=CHANCES),
     loop(*(line.format(cut="[:, :-1]", tokens="ids[:, 1:]") for line in READ), before=CHANCES)),
    ("padding_trained", HEAD + HF + TOKENIZER + TWICE.format(padding="'max_length'"),
     HEAD + HF + TOKENIZER + TWICE.format(padding="'do_not_pad'")),
    ("method_of_wrapped_model", HEAD + MADE + PARALLEL + UNWRAPPED.format(method="configure_optimizers"),
     HEAD + MADE + PARALLEL + UNWRAPPED.format(method="train")),
    ("method_of_wrapped_model", HEAD + MADE + PARALLEL + "model.tie_weights()\n",
     HEAD + MADE + PARALLEL + "if accelerator.distributed_type == 'TPU':\n    model.tie_weights()\n"),
])
def test_a_value_is_followed_to_where_the_defect_shows(rule: str, defect: str, none: str, tmp_path: Path) -> None:
    assert len(said(rule, defect, tmp_path)) == 1
    assert said(rule, none, tmp_path) == []


def test_what_a_command_turns_on_is_looked_at_too(tmp_path: Path) -> None:
    text = HEAD + TOKENIZER + OPTION + DECODED.format(changed="pass").replace("generate=True", "generate=told_by.write")
    (tmp_path / "README.md").write_text("```\npython train.py --write\n```\n", encoding="utf-8")
    assert said("ignored_labels_decoded", text, tmp_path) == []
    told = read_subject(tmp_path / "train.py").others[-1]
    assert [one.severity for one in BY_NAME["ignored_labels_decoded"].find(told, WITH_RELEASES)] == ["critical"]


def test_a_folder_that_merely_has_a_readme_is_no_root_within_a_project(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "README.md").write_text("a part\n", encoding="utf-8")
    assert root_of(tmp_path / "inner" / "train.py") == tmp_path / "inner"
    (tmp_path / "requirements.txt").write_text("torch\n", encoding="utf-8")
    assert root_of(tmp_path / "inner" / "train.py") == tmp_path
