"""Whatever a file holds, an audit and a conversion end in a result or in one sentence, and a converted recipe resolves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import config_examples
import pytest
import yaml

from powertrain.audit.audit import audit, read_subject
from powertrain.audit.conversion import account_json, account_rows, recipe_yaml
from powertrain.audit.convert import convert
from powertrain.recipe import resolve
from powertrain.recipe.vocabulary import rows
from powertrain.records import WrongUse

T = TypeVar("T")
ODD: list[Any] = [
    None, True, False, 0, -1, 3, 1e-4, 0.5, 1e300, float("nan"), float("inf"), "", " ", "auto", "no", "epoch", "qlora",
    "x" * 5000, "a,b", "a\nb", "~nobody/x", "\0", [], [1], ["a", "b"], [[1, [2]]], [{"path": "a"}], {"a": 1}, {}, [None],
    {"a": {"b": [1]}},
    10**30, {"_component_": 3}, "freeze", "$HOME", "${batch_size}"]
DEEP = 2000                  # two calls a level: more than the 3000 that torch's compiler lets Python go down
TEXTS = [
    "", "---\n", "- 1\n", "3", "{}", "a: &x 1\nb: *x", "a: *y", "? [1, 2]\n: 3\n", "<<: 3\na: 1", "bf16: !!bool maybe\n",
    "learning_rate: !!int word", "seed: !!int ''", "a: 1\n---\nb: 2", "a:\n\tb: 1", "%YAML 1.9\n---\na: 1", "1: 2\ntrue: 5\n",
    'model_name_or_path: "\\ud800"\nlora_r: 8\nuse_peft: true\n', "{" * DEEP, "a: " + "[" * DEEP, "\x01", "a: b: c",
    "learning_rate: 12:30:45", "seed: " + "9" * 6000, "data: []\nmethod: 3", "training: 3\nmodel: 4", "lora: []\nmodel_id: 3"]
SCRIPTS = [
    "", "import torch\n", "x = 1\n", "class A: pass\n", "bf16 = '\\ud83d'\nfp16 = True\nlearning_rate = [1]\n",
    "from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser\n"
    "parser = TrlParser((ScriptArguments, SFTConfig))\nscript, args = parser.parse_args_and_config()\n"
    "SFTTrainer(args.model, args=args).train()\n",
    "from transformers import TrainingArguments\nTrainingArguments('o', per_device_train_batch_size=0, optim={}, bf16='x')\n"]


def result(of: Callable[[], T]) -> T | None:
    """Return the result, or None for a refusal in one sentence; anything else that is raised fails the test."""
    try:
        return of()
    except WrongUse as error:
        refusal = str(error)
    assert "\n" not in refusal
    return None


def survives(path: Path) -> None:
    result(lambda: audit(path))
    conversion = result(lambda: convert(read_subject(path)))
    if conversion is None:
        return
    account_rows(conversion)
    json.dumps(account_json(conversion), default=str)
    recipe = path.parent / "converted.yaml"
    recipe.write_text(recipe_yaml(conversion), encoding="utf-8")
    assert not resolve(str(recipe)).notes


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".toml"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_text_of_any_kind_is_read_or_refused(text: str, suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"odd{suffix}").write_text(text, encoding="utf-8")
    survives(tmp_path / f"odd{suffix}")
    result(lambda: resolve(str(tmp_path / f"odd{suffix}")))


@pytest.mark.parametrize("text", SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_script_without_settings_converts_to_what_its_trainer_does(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(text, encoding="utf-8")
    survives(tmp_path / "odd.py")


@pytest.mark.parametrize("seed", range(12))
def test_keys_with_values_of_any_type_are_accounted_for(seed: int, tmp_path: Path) -> None:
    rng, keys = random.Random(seed), [row.key.replace("*", "x") for row in rows()]
    for _ in range(6):
        base = rng.choice([text for name, (text, _) in config_examples.ALL.items() if name.endswith(("yml", "yaml"))])
        config: dict[str, Any] = yaml.safe_load(base)
        for key in rng.sample(list(config), rng.randrange(1, 4)) + rng.sample(keys, rng.randrange(0, 8)):
            config[key] = rng.choice(ODD)
        as_json = rng.random() < 0.5
        path = tmp_path / ("odd.json" if as_json else "odd.yaml")
        path.write_text(json.dumps(config) if as_json else yaml.safe_dump(config), encoding="utf-8")
        survives(path)
