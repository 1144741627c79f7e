"""What objects of the project hold and take, known by the class that makes them, in whatever file that is."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_subjects import software
from code_cases import HEAD

from powertrain.audit.audit import read_subject
from powertrain.audit.rules import RULES
from powertrain.audit.subject import Circumstances

BY_NAME = {rule.name: rule for rule in RULES}
NETWORK = (HEAD + "class Block(nn.Module):\n    def forward(self, x):\n        return x\n"
           "class Network(nn.Module):\n    def forward(self, x, mask):\n        return x, mask\n"
           "    def step(self, x):\n        return x\n{more}"
           "model = Network()\n{then}for batch in rows:\n    {call}.backward()\n")
SAVED = (HEAD + "import argparse\ndef options():\n    args = argparse.ArgumentParser().parse_args()\n    return args\n"
         "args = options()\nmodel = nn.Linear(8, 8)\nfor batch in rows:\n    model(batch).backward()\n"
         "torch.save({{'model': model.state_dict(), 'args': {args}}}, 'last.pt')\n")
RESUMING = ("import torch\nimport train\nstate = torch.load(path({more}), map_location='cpu'{more})\n"
            "train.main(state['args'], state['model'])\n")


def said(name: str, files: dict[str, str], folder: Path) -> list[str]:
    for each, text in files.items():
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (folder / each).write_text(text, encoding="utf-8")
    where = Circumstances(software=software())
    return [finding.why for finding in BY_NAME[name].find(read_subject(folder / "train.py"), where)]


@pytest.mark.parametrize(("rule", "call"), [
    ("arguments_refused", "model(batch)"), ("arguments_refused", "model(batch, attention_mask=1)"),
    ("arguments_refused", "model(batch, 1, 2)"), ("arguments_refused", "model.step(batch, 2)"),
    ("attributes_missing", "model.stepp(batch)"), ("unpacked_wrongly", "a, b, c = model(batch, 1); a")])
def test_a_call_that_the_objects_own_class_does_not_take_ends_the_run(rule: str, call: str, tmp_path: Path) -> None:
    assert len(said(rule, {"train.py": NETWORK.format(more="", then="", call=call)}, tmp_path)) == 1


@pytest.mark.parametrize(("rule", "call", "more", "then"), [
    ("arguments_refused", "model(batch, 1)", "", ""), ("arguments_refused", "model(batch, mask=1)", "", ""),
    ("arguments_refused", "model(batch)", "", "model = wrap(model)\n"),
    ("arguments_refused", "model(batch)", "    def __call__(self, x):\n        return x\n", ""),
    ("arguments_refused", "model(batch)", "class Network(nn.Module):\n    pass\n", ""),
    ("arguments_refused", "model.step(batch)", "", ""), ("attributes_missing", "model.step(batch)", "", ""),
    ("attributes_missing", "model.parameters(batch)", "", ""),
    ("attributes_missing", "model.other(batch)", "", "model.other = 1\n"),
    ("attributes_missing", "model.stepp(batch)", "", "model = wrap(model)\n"),
    ("unpacked_wrongly", "a, b = model(batch, 1); a", "", ""),
    ("unpacked_wrongly", "a, b, c = model(batch, 1); a", "", "model = wrap(model)\n")])
def test_one_that_it_takes_or_that_another_object_may_take_does_not(rule: str, call: str, more: str, then: str,
                                                                    tmp_path: Path) -> None:
    assert said(rule, {"train.py": NETWORK.format(more=more, then=then, call=call)}, tmp_path) == []


@pytest.mark.parametrize(("args", "more", "expected"), [
    ("args", "", 1), ("vars(args)", "", 0), ("args", ", weights_only=False", 0), ("args", ")\ntorch.save(1, 'x'", 0)])
def test_another_file_cannot_load_what_is_saved_with_an_object(args: str, more: str, expected: int, tmp_path: Path) -> None:
    files = {"train.py": SAVED.format(args=args), "resume.py": RESUMING.replace("path({more})", "'last.pt'").format(more=more)}
    assert len(said("own_objects_refused", files, tmp_path)) == expected


@pytest.mark.parametrize(("key", "expected"), [("0", 1), ("'train'", 0)])
def test_a_value_is_followed_into_the_module_that_gives_it(key: str, expected: int, tmp_path: Path) -> None:
    files = {"rows.py": "from datasets import load_dataset\nparts = load_dataset('text', data_files={'train': 'a.txt'})\n",
             "train.py": HEAD + f"from rows import parts as data\nprint(data[{key}])\nTrainer(1).train()\n"}
    assert len(said("split_not_there", files, tmp_path)) == expected
