"""How projects start their scripts: names of scripts and modules that are not there, options that nothing reads, teams."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF
from test_paths import TRAINED, project
from test_trl_rules import found


@pytest.mark.parametrize(("line", "fires"), [
    ("python code/05_train.py", True), ("nohup python3 code/05_train.py > log &", True), ("python -m code.run_train", True),
    ("accelerate launch --num_processes 1 -m code.run_train --rate 1", True), ("git clone x\npython code/run_train.py", True),
    ("torchrun --nproc_per_node 2 code/run_train.py", True), ("python code/05_other.py", False),
    ("Some python users want code/run_train.py", False), ("python -m pip.run_train", False), ("python -m code.train", False),
    ("git clone x\npython run_train.py", False), ("python other/run_train.py", False)])
def test_a_command_names_the_script_by_another_name(line: str, fires: bool, tmp_path: Path) -> None:
    project(tmp_path, **{"code__test_it.py": "", "sh__run.sh": f"{line}\n", "other__x.py": ""})
    assert bool(found("script_missing", HEAD + TRAINED, tmp_path / "code")) == fires


@pytest.mark.parametrize(("line", "before", "fires"), [
    ("python train.py --mode teacher", "", True), ("python train.py", "", False),
    ("deepspeed train.py --local_rank 0", "", False),
    ("python train.py --mode teacher", "import sys\nprint(sys.argv)\n", False),
    ("python train.py --mode teacher", "import fire\n", False),
    ("python train.py --mode teacher", "from told import parse_args\n", False)])
def test_options_that_a_script_does_not_read_are_ignored(line: str, before: str, fires: bool, tmp_path: Path) -> None:
    made = found("command_line_ignored", before + HEAD + TRAINED, project(tmp_path, **{"run.sh": f"{line}\n"}))
    assert [each.severity for each in made] == ["critical"] * fires


@pytest.mark.parametrize(("line", "more", "fires"), [
    ("from sizes import x\n", {}, True), ("from kit.sizes import x\n", {}, False), ("from .sizes import x\n", {}, False),
    ("from sizes import x\n", {"sizes.py": "x = 1\n"}, False),
    ("import sys\nsys.path.append('kit')\nfrom sizes import x\n", {}, False),
    ("try:\n    from sizes import x\nexcept ImportError:\n    pass\n", {}, False),
    ("from sizes import x\n", {"setup.py": ""}, False)])
def test_a_module_imports_its_neighbour_as_the_script_does(line: str, more: dict[str, str], fires: bool,
                                                           tmp_path: Path) -> None:
    project(tmp_path, **{"kit__made.py": line + "y = x\n", "kit__sizes.py": "x = 1\n", **more})
    made = found("modules_out_of_reach", "from kit.made import y\n" + HEAD + TRAINED, tmp_path)
    assert [each.severity for each in made] == ["critical"] * fires
    assert not found("modules_out_of_reach", HEAD + TRAINED, tmp_path)


ADDED = "import sys\nsys.path.insert(0, '.')\n"


@pytest.mark.parametrize(("line", "there", "fires"), [
    ("from kit.agent.maths import x\n", "kit__sizes.py", True),
    ("from kit.agent.maths import x\n", "kit__agent__maths.py", False),
    ("from other.agent import x\n", "kit__sizes.py", False), ("from agent import x\n", "kit__sizes.py", False)])
def test_of_a_package_that_is_found_all_is_there(line: str, there: str, fires: bool, tmp_path: Path) -> None:
    project(tmp_path, **{"kit__sizes.py": "y = 1\n", "kit____init__.py": "", there: "x = y = 1\n"})
    (tmp_path / "kit" / "__init__.py").write_text("")
    text = ADDED + "from kit.sizes import y\n" + line + HEAD + TRAINED
    assert bool(found("modules_missing", text, tmp_path)) == fires
    tried = text.replace("from kit.sizes import y",
                         "try:\n    from kit.sizes import y\nexcept ImportError:\n    from sizes import y")
    assert not found("modules_missing", tried, tmp_path)                # which may fail where the other one does
    (tmp_path / "kit" / "__init__.py").unlink()          # other folders may belong to it
    assert not found("modules_missing", text, tmp_path)


@pytest.mark.parametrize(("others", "fires"), [
    ({}, False), ({"show.py": "import os\n"}, True), ({"show.py": "from train import trainer\n"}, False),
    ({"show.py": "from code import train\n"}, False), ({"show.ipynb": '"import train\\n"'}, False)])
def test_a_trainer_that_no_other_file_imports_trains_nothing(others: dict[str, str], fires: bool, tmp_path: Path) -> None:
    text = HEAD + HF + ARGUMENTS + "trainer = Trainer(model, args)\n"
    assert bool(found("trainer_never_trains", text, project(tmp_path, **others))) == fires
    assert not found("trainer_never_trains", text + "trainer.train()\n", tmp_path)


INIT = "import os, wandb\nfrom accelerate import Accelerator\naccelerator = Accelerator(log_with='wandb')\n"
STARTED = "wandb.init(project='x', entity='{team}'{more})\n"
TRACKED = "accelerator.init_trackers('x', init_kwargs={'wandb': {'name': 'a', 'entity': 'eleutherai'}})\n"


@pytest.mark.parametrize(("text", "fires"), [
    (STARTED.format(team="anna-lab", more=""), True), (TRACKED, True), (TRACKED.replace("'entity'", "'group'"), False),
    ("if accelerator.is_main_process:\n    " + STARTED.format(team="anna-lab", more=""), True),
    ("if told:\n    " + STARTED.format(team="anna-lab", more=""), False),
    ("try:\n    " + STARTED.format(team="anna-lab", more="") + "except Exception:\n    pass\n", False),
    (STARTED.format(team="anna-lab", more=", mode='offline'"), False), (STARTED.format(team="your-team", more=""), False),
    ("wandb.init(project='x', entity=os.environ.get('TEAM'))\n", False), ("wandb.init(project='x')\n", False)])
def test_a_team_has_members(text: str, fires: bool, tmp_path: Path) -> None:
    made = found("team_of_author", HEAD + INIT + text + TRAINED, tmp_path)
    assert [each.severity for each in made] == ["critical"] * fires


@pytest.mark.parametrize(("name", "text", "severities"), [
    ("setup.py", "setup(install_requires=['torch', 'trl'])\n", ["moderate"]),
    ("pyproject.toml", "[project]\ndependencies = [\n'torch', 'trl']\n", ["moderate"]),
    ("pyproject.toml", "[project]\ndependencies = [\n'torch', 'trl', 'opencv-python']\n", []),
    ("pyproject.toml", "[tool.ruff]\nline-length = 100\n# torch, trl\n", []),
    ("setup.py", "setup(install_requires=read('torch.txt'))\n", [])])
def test_a_package_lists_what_it_needs(name: str, text: str, severities: list[str], tmp_path: Path) -> None:
    said = "import cv2\n" + HEAD + TRAINED
    assert [each.severity for each in found("packages_unlisted", said, project(tmp_path, **{name: text}))] == severities
    told = found("packages_unlisted", said, project(tmp_path, **{"README.md": "pip install -e .\n"}))
    assert [each.severity for each in told] == ["critical"] * len(severities)
