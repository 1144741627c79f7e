"""Arguments that a release took out reach a class through a config: however the project's own code reads and hands it on."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_projects import project
from test_version_rules import BY_NAME, TODAY

from powertrain.audit.audit import read_subject

CONFIG = "training:\n  output_dir: out\n  warmup_ratio: 0.1\n"
HEAD = ("import copy, os, yaml\nfrom dataclasses import asdict, dataclass\nfrom pathlib import Path\n"
        "from omegaconf import OmegaConf\nfrom pydantic import BaseModel\n"
        "from transformers import Trainer, TrainingArguments\n")
END = "\nTrainer(model=None, args=TrainingArguments(**{given})).train()\n"
MERGING = """
def merge(base, other):
    out = dict(base)
    for key, value in other.items():
        if key in out and isinstance(out[key], dict) and isinstance(value, dict):
            out[key] = merge(out[key], value)
        else:
            out[key] = value
    return out
def load(path):
    path = Path(path)
    with path.open() as file:
        config = yaml.safe_load(file)
    if "extends" in config:
        config = merge(load(path.parent / config.pop("extends")), config)
    return config
"""
FIELDS = """
@dataclass
class Training:
    output_dir: str = "o"
    warmup_ratio: float = 0.0
    @classmethod
    def load(cls, path):
        with open(path) as file:
            return cls(**yaml.safe_load(file)["training"])
"""
MODEL = FIELDS.replace("\n@dataclass", "").replace("class Training", "class Training(BaseModel)")
STATIC = "\nclass Reader:\n    @staticmethod\n    def load(path):\n        return yaml.safe_load(open(path))\n"
SINGLE = """
told = yaml.safe_load(open("config.yaml"))["training"]
given = {}
for key in ("output_dir",):
    given[key] = told[key]
given["warmup_ratio"] = told["warmup_ratio"]
"""


@pytest.mark.parametrize(("code", "given"), [
    ("config = yaml.safe_load(Path('config.yaml').read_text())", "config['training']"),
    ("config = yaml.safe_load(Path('config.yaml').open().read())", "config['training']"),
    ("config = yaml.safe_load(open(Path(__file__).resolve().parent / 'config.yaml'))", "config['training']"),
    ("config = yaml.safe_load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'config.yaml')))",
     "copy.deepcopy(config['training'])"),
    ("config = OmegaConf.load('config.yaml')", "OmegaConf.to_container(config.training, resolve=True)"),
    ("config = OmegaConf.merge(OmegaConf.load('config.yaml'), OmegaConf.load('child.yaml'), OmegaConf.from_cli())",
     "config.training"),
    (MERGING + "config = load('child.yaml')", "config['training']"), (FIELDS, "asdict(Training.load('config.yaml'))"),
    (MODEL, "Training.load('config.yaml').model_dump()"), (STATIC, "Reader().load('config.yaml')['training']"),
    (STATIC, "Reader.load('config.yaml')['training']"), (SINGLE, "given")])
def test_a_config_is_followed_to_the_class_that_it_is_for(code: str, given: str, tmp_path: Path) -> None:
    path = project(tmp_path, train=HEAD + code + END.format(given=given))
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "child.yaml").write_text("extends: config.yaml\ntraining:\n  learning_rate: 0.1\n")
    told = [each.why for each in BY_NAME["removed_names"].find(read_subject(path), TODAY)]
    assert [each.split(":")[0] for each in told] == ["warmup_ratio (now warmup_steps)"]
    project(tmp_path, train=path.read_text().replace("warmup_ratio", "warmup_steps"))
    (tmp_path / "config.yaml").write_text(CONFIG.replace("warmup_ratio", "warmup_steps"))
    assert [*BY_NAME["removed_names"].find(read_subject(path), TODAY)] == []


def test_what_is_left_out_if_the_class_does_not_take_it_is_not_said(tmp_path: Path) -> None:
    kept = "{key: each for key, each in config['training'].items() if key in TrainingArguments.__dataclass_fields__}"
    path = project(tmp_path, train=HEAD + "config = yaml.safe_load(open('config.yaml'))" + END.format(given=kept))
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert [*BY_NAME["removed_names"].find(read_subject(path), TODAY)] == []


ROWS = ("class Rows:\n    def __init__(self, tokenizer):\n        self.tokenizer = tokenizer\n"
        "    def __getitem__(self, at):\n        return self.tokenizer.{method}(['a'])\n"
        "def made(tokenizer):\n    return Rows(tokenizer)\n")
USING = ("import torch\nfrom transformers import AutoTokenizer\n{imports}\ntokenizer = AutoTokenizer.from_pretrained('gpt2')\n"
         "rows = {made}(tokenizer)\nfor batch in torch.utils.data.DataLoader(rows):\n    batch.sum().backward()\n")


@pytest.mark.parametrize(("imports", "made"), [
    ("import rows", "rows.Rows"), ("import rows as data", "data.Rows"), ("import rows", "rows.made"),
    ("from rows import *", "Rows"), ("from others import *", "Rows")])
def test_a_class_of_a_module_is_made_under_any_name(imports: str, made: str, tmp_path: Path) -> None:
    for method, fires in (("batch_encode_plus", True), ("__call__", False)):
        path = project(tmp_path, rows=ROWS.format(method=method), others="from rows import *\n",
                       train=USING.format(imports=imports, made=made))
        assert bool([*BY_NAME["attributes_missing"].find(read_subject(path), TODAY)]) is fires


def test_a_class_of_the_same_name_in_a_module_that_is_not_imported_whole_is_not_made(tmp_path: Path) -> None:
    path = project(tmp_path, rows=ROWS.format(method="batch_encode_plus"), others="import rows\n",
                   train=USING.format(imports="from others import *\nfrom torch import Rows", made="Rows"))
    assert [*BY_NAME["attributes_missing"].find(read_subject(path), TODAY)] == []
