"""Notebooks are read as they are: their code, with the lines of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from powertrain.audit.audit import audit, files_in, read_subject
from powertrain.audit.convert import convert
from powertrain.audit.parsing import LARGEST_BYTES
from powertrain.records import WrongUse

SETTINGS = "args = TrainingArguments('out', evaluation_strategy='no')\n"
CELLS = ["# Tuning", "!pip install trl\n%matplotlib inline\npip install -q wandb\nfrom transformers import *",
         "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
         "model = AutoModelForCausalLM.from_pretrained('gpt2')\n" + SETTINGS, "%%bash\nfor each in a b; do ls $each; done",
         "", "%%time\nTrainer(model, args, train_dataset=rows).train()"]


def notebook(*cells: str, language: str = "python") -> dict[str, Any]:
    made = [{"cell_type": "markdown" if cell.startswith("# T") else "code", "execution_count": None, "metadata": {},
             "outputs": [{"data": {"text/plain": ["\"source\": [\n", "    x"]}, "output_type": "display_data"}],
             "source": cell.splitlines(keepends=True)} for cell in cells]
    return {"cells": made, "metadata": {"kernelspec": {"language": language}}, "nbformat": 4}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "train.ipynb"
    file.write_text(json.dumps(notebook(*CELLS), indent=1), encoding="utf-8")
    return file


def test_findings_name_the_lines_of_the_file(path: Path) -> None:
    found = {one.rule: one for one in audit(path).findings}
    place = found["removed_names"].evidence[0].place
    assert place is not None
    assert "evaluation_strategy" in path.read_text(encoding="utf-8").splitlines()[place.line - 1]
    assert not {"refused_by_python", "undefined_names"} & set(found)
    assert not any(one.cure.edits for one in found.values())             # a line of Python is no line of JSON


LOOP = ("import torch\nimport torch.nn as nn\nfrom torch.utils.data import DataLoader\nmodel = nn.Linear(3, 3)\n"
        "opt = torch.optim.AdamW(model.parameters(), lr=1e-3)\nfor batch in DataLoader(range(9)):\n    opt.zero_grad()\n"
        "    loss = model(batch).mean()\n    loss.backward()\n    opt.step()")


@pytest.mark.parametrize("cell", [
    'print("loss %.3f"\n      % loss.detach())', "!pip install torch \\\n    transformers\nx = 1",
    "files = !ls\nhere = %pwd\nmodel?\n"
    "?nn.Linear\nnn.Linear??\nif files: !mkdir x\nx = 1; !ls\npip list", "await torch.f()", "    x = 1\n    y = 2",
    "from __future__ import annotations", "%time net = nn.Linear(3, 3)\nprint(net)", "%%capture cap\nx = 1",
    "%%capture --no-stderr cap\nprint(cap)",
    "%%wandb\nq = 1", "# note\n\n%%bash\nls -l", "x = (1,", "try:\n    z = 1", "from utils import helper", "%run other.ipynb"])
def test_what_ipython_runs_ends_no_notebook(path: Path, cell: str) -> None:
    path.write_text(json.dumps(notebook(LOOP, cell, "print(opt)"), indent=1), encoding="utf-8")
    found = audit(path).findings
    assert [one.rule for one in found if one.severity == "critical"] == []
    assert "never_saved" in {one.rule for one in found} or "(1," in cell        # the training is seen


@pytest.mark.parametrize("source", ['"a = 1\\n", "b = 2\\n"', '"a = 1\\nb = 2\\n"', '"a = 1\\n",\n"b = 2\\n"'])
def test_a_notebook_may_be_written_in_other_ways(path: Path, source: str) -> None:
    path.write_text(f'{{"cells": [{{"cell_type": "code",\n"source": [\n{source}\n]}}], "metadata": null}}', encoding="utf-8")
    script = read_subject(path).script
    assert script is not None
    assert [script.words(node) for node in script.tree.body] == ["a = 1", "b = 2"]


def test_code_of_a_notebook_is_as_long_as_a_scripts(path: Path) -> None:
    path.write_text(json.dumps(notebook("x = 1\n" * (LARGEST_BYTES // 6 + 1)), indent=1), encoding="utf-8")
    with pytest.raises(WrongUse, match="bytes of code"):
        read_subject(path)


@pytest.mark.parametrize("indent", [None, 4])
def test_a_notebook_that_jupyter_has_not_written_is_read_too(path: Path, indent: int | None) -> None:
    cells = notebook(*CELLS)
    for cell in cells["cells"]:
        cell["source"] = "".join(cell["source"])
    path.write_text(json.dumps(cells, indent=indent), encoding="utf-8")
    assert "removed_names" in {one.rule for one in audit(path).findings}


def test_a_folder_has_its_notebooks_audited(path: Path) -> None:
    assert files_in(path.parent) == [path]


def test_a_notebook_gives_a_recipe(path: Path) -> None:
    assert convert(read_subject(path)).values["model.path"] == "gpt2"


@pytest.mark.parametrize(("text", "says"), [
    ("{", "is no notebook of nbformat 4"), ("[]", "is no notebook"), ('{"cells": 3}', "is no notebook"),
    (json.dumps({**notebook("x"), "metadata": {"language_info": {"name": "julia"}}}), "is a notebook in julia"),
    (json.dumps(notebook("x <- 1", language="R")), "is a notebook in R; an audit reads Python")])
def test_what_is_no_notebook_in_python_is_said_in_one_sentence(path: Path, text: str, says: str) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WrongUse, match=says):
        read_subject(path)
