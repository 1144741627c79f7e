"""An audit reads a script with the modules of its own project, and judges each way to start it."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent

import pytest

from driver import run_cli
from powertrain.audit.audit import audit, files_in, read_subject
from powertrain.audit.project import MOST_MODULES
from powertrain.records import WrongUse
from powertrain.records.findings import Audit

LOOP = ("for batch in loader:\n    loss = model(batch).mean()\n    loss.backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\n")
MAKES = "model = torch.nn.Linear(2, 2)\noptimizer = torch.optim.AdamW(model.parameters())\n"
TRAINING = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
MODEL = "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"


def project(folder: Path, **files: str) -> Path:
    """Write a project's files ("data__rows" is data/rows.py) beside a README, and return its train.py."""
    (folder / "README.md").write_text("a project\n", encoding="utf-8")
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "train.py"


def command(folder: Path, *words: str) -> tuple[int, str, str]:
    return run_cli(["audit", *words], folder / "cache", folder)


def named(found: Audit) -> dict[str, str]:
    return {finding.rule: finding.when for finding in found.findings}


def test_a_config_of_another_module_is_read_with_its_place(tmp_path: Path) -> None:
    path = project(tmp_path, config="RATE = 3e-4\nclass Config:\n    batch = 4\n", train=TRAINING + MODEL + (
        "import config\nfrom config import Config\nargs = TrainingArguments('out', learning_rate=config.RATE, "
        "per_device_train_batch_size=Config().batch)\nTrainer(model, args).train()\n"))
    subject = read_subject(path)
    assert subject.value("training.learning_rate") == 3e-4
    assert subject.value("training.per_device_train_batch_size") == 4


def test_a_loop_in_another_module_is_judged_at_its_own_lines(tmp_path: Path) -> None:
    loop = "def run(model, optimizer, loader):\n    for batch in loader:\n        loss = model(batch).mean()\n" \
        "        loss.backward()\n        optimizer.step()\n        optimizer.zero_grad()\n        print(loss.item())\n"
    path = project(tmp_path, loops__steps=loop,
                   train=f"import torch\nfrom loops.steps import run\n{MAKES}run(model, optimizer, [])\n")
    found = [finding for finding in audit(path).findings if finding.rule == "item_each_step"]
    places = [str(item.place) for finding in found for item in finding.evidence]
    assert places == [f"{tmp_path / 'loops' / 'steps.py'}:7"]


def test_arguments_of_a_trainers_subclass_are_the_trainers(tmp_path: Path) -> None:
    mine = ("from transformers import Trainer\nclass Mine(Trainer):\n    def __init__(self, *args, extra=1, **kwargs):\n"
            "        super().__init__(*args, **kwargs)\n")
    path = project(tmp_path, mine=mine, train=TRAINING + MODEL + (
        "from mine import Mine\nargs = TrainingArguments('out')\nMine(model=model, args=args, tokenizer=None).train()\n"))
    assert "removed_names" in named(audit(path))


def test_a_default_of_get_is_taken(tmp_path: Path) -> None:
    path = project(tmp_path, train=TRAINING + MODEL + (
        "import json\nimport sys\nconfig = json.load(open(sys.argv[1]))\n"
        "args = TrainingArguments('out', learning_rate=config.get('rate', 2e-5))\nTrainer(model, args).train()\n"))
    assert read_subject(path).value("training.learning_rate") == 2e-5


def test_a_finding_of_one_way_to_start_says_which(tmp_path: Path) -> None:
    path = project(tmp_path, train="import os\nimport torch\nfrom torch.utils.data.distributed import DistributedSampler\n"
                   "data, model = [], torch.nn.Linear(2, 2)\noptimizer = torch.optim.AdamW(model.parameters())\n"
                   "ddp = int(os.environ.get('RANK', -1)) != -1\nif ddp:\n    torch.distributed.init_process_group('nccl')\n"
                   "loader = torch.utils.data.DataLoader(data, sampler=DistributedSampler(data))\n" + LOOP)
    assert named(audit(path))["sampler_without_group"] == "started without torchrun"
    assert "Only when started without torchrun" in command(tmp_path, str(path), "--elsewhere")[1]


def test_an_import_of_a_name_that_a_module_lacks_is_found(tmp_path: Path) -> None:
    path = project(tmp_path, rows="def get_loaders():\n    return []\n",
                   train="import torch\nfrom rows import get_loader\nmodel = torch.nn.Linear(2, 2)\nloader = get_loader()\n"
                   "optimizer = torch.optim.AdamW(model.parameters())\n" + LOOP)
    found = next(finding for finding in audit(path).findings if finding.rule == "names_not_in_module")
    assert "get_loaders" in found.why
    project(tmp_path, rows="def get_loader():\n    return []\n")
    assert "names_not_in_module" not in named(audit(path))


def test_imports_in_a_circle_are_one_sentence(tmp_path: Path) -> None:
    path = project(tmp_path, one="import two\n", two="import one\nRATE = 1e-4\n", train=TRAINING + MODEL + (
        "from two import RATE\nargs = TrainingArguments('out', learning_rate=RATE)\nTrainer(model, args).train()\n"))
    found = audit(path)
    assert "circle (two.py -> one.py -> two.py)" in found.environment["imports"]
    assert read_subject(path).value("training.learning_rate") == 1e-4


def test_imports_that_leave_the_folder_are_one_sentence_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("RATE = 1e-4\n", encoding="utf-8")
    inner = tmp_path / "inner"
    inner.mkdir()
    path = project(inner, train=TRAINING + MODEL + "from ..outside import RATE\nimport linked\n"
                   "args = TrainingArguments('out', learning_rate=RATE)\nTrainer(model, args).train()\n")
    (inner / "linked.py").symlink_to(tmp_path / "outside.py")
    found = audit(path)
    assert found.environment["imports"].count("leaves the project's folder inner/") == 2
    assert read_subject(path).value("training.learning_rate") is None


def test_a_module_that_is_no_python_is_named_and_left_out(tmp_path: Path) -> None:
    path = project(tmp_path, broken="print 'another Python'\n" * 60, train=TRAINING + MODEL + (
        "import broken\nargs = TrainingArguments('out')\nTrainer(model, args).train()\n"))
    assert "broken.py cannot be read as Python" in audit(path).environment["imports"]


def test_a_project_without_end_is_read_in_part(tmp_path: Path) -> None:
    many = {f"part{number}": f"import part{number + 1}\n" for number in range(MOST_MODULES + 5)}
    path = project(tmp_path, **many, train=TRAINING + MODEL + (
        "import part0\nargs = TrainingArguments('out')\nTrainer(model, args).train()\n"))
    assert f"only the first {MOST_MODULES} modules" in audit(path).environment["imports"]


def test_a_folder_is_read_with_its_folders_and_a_module_belongs_to_its_script(tmp_path: Path) -> None:
    project(tmp_path, loops__steps="def run(model, optimizer, loader):\n" + indent(LOOP, "    "),
            train=f"import torch\nfrom loops.steps import run\n{MAKES}run(model, optimizer, [])\n")
    _, said, _ = command(tmp_path, str(tmp_path), "--elsewhere", "--json")
    assert [json.loads(line)["subject"] for line in said.splitlines()] == [str(tmp_path / "train.py")]


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path) -> None:
    for number in range(501):
        (tmp_path / f"{number}.py").touch()
    with pytest.raises(WrongUse, match="more than 500"):
        files_in(tmp_path)


def test_what_is_not_read_is_one_line_unless_verbose(tmp_path: Path) -> None:
    path = project(tmp_path, train=TRAINING + MODEL + (
        "import sys\nargs = TrainingArguments('out', learning_rate=float(sys.argv[1]), num_train_epochs=int(sys.argv[2]))\n"
        "Trainer(model, args).train()\n"))
    short, long = (command(tmp_path, str(path), "--elsewhere", *more)[1] for more in ((), ("--verbose",)))
    assert "--verbose lists them" in short
    assert len(short.splitlines()) < len(long.splitlines())


def test_a_refused_conversion_does_not_exit_with_zero(tmp_path: Path) -> None:
    config = tmp_path / "v1.yaml"
    text = "model: Qwen/Qwen3-0.6B\nmodel_class: llm\ntrain_dataset: someone/rows\nmicro_batch_size: 2\ncutoff_len: 512\n"
    config.write_text(text, encoding="utf-8")
    assert command(tmp_path, str(config), "--convert")[0] == 0
    config.write_text(text + "optim_config:\n  name: badam\n", encoding="utf-8")
    code, _, complaint = command(tmp_path, str(config), "--convert")
    assert code == 4
    assert "training.optim" in complaint
