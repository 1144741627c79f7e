"""What an audit takes for a library's default is what the installed library has, and stands where its source says."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from peft.tuners.lora import config as lora_config
from torch.utils.data import dataloader
from transformers import training_args
from transformers.utils import quantization_config

from powertrain.audit import subject

LIBRARIES = yaml.safe_load(Path(str(subject.__file__)).with_name("defaults.yaml").read_text(encoding="utf-8"))["libraries"]
# our vocabulary -> the name in the library's own signature, where it is another
SPELLED = {"training.activation_checkpointing": "gradient_checkpointing"}
SOURCES: dict[str, tuple[ModuleType, str]] = {
    f"transformers {'.'.join(transformers.__version__.split('.')[:2])}, training_args.py": (training_args, "TrainingArguments"),
    f"transformers {'.'.join(transformers.__version__.split('.')[:2])}, utils/quantization_config.py": (
        quantization_config, "BitsAndBytesConfig"),
    f"peft {'.'.join(peft.__version__.split('.')[:2])}, tuners/lora/config.py": (lora_config, "LoraConfig"),
    f"torch {'.'.join(torch.__version__.split('.')[:2])}, utils/data/dataloader.py": (dataloader, "DataLoader"),
    f"torch {'.'.join(torch.__version__.split('.')[:2])}, optim/adamw.py": (inspect.getmodule(torch.optim.AdamW), "AdamW"),
}
# libraries that need not be installed: the version that is meant, and what holds the arguments
OPTIONAL: dict[str, tuple[str, str, str]] = {
    "TRL 1.16, trainer/base_config.py": ("trl", "trl.trainer.base_config", "_BaseConfig"),
    "TRL 1.16, trainer/sft_config.py": ("trl", "trl.trainer.sft_config", "SFTConfig"),
    "Accelerate 1.15, accelerator.py": ("accelerate", "accelerate.accelerator", "Accelerator"),
    "Accelerate 1.15, utils/dataclasses.py": ("accelerate", "accelerate.utils.dataclasses", "DataLoaderConfiguration"),
}
# what the constructor makes of None, not its signature
MADE_LATER = {"quantisation.bnb_4bit_compute_dtype": "float32"}


@dataclass(frozen=True)
class Default:
    value: Any
    source: str                              # "transformers 5.23, training_args.py:812"


def rows(*, optional: bool) -> Iterator[tuple[str, Default]]:
    """Every default of a library that may be absent, or of one that is installed here."""
    for source, table in LIBRARIES.items():
        if source.startswith(("TRL", "Accelerate")) == optional:
            yield from ((key, Default(value, f"{source}:{line}")) for key, (value, line) in table.items())


def installed(source: str) -> tuple[ModuleType, type]:
    """The module and class of a source; the test is skipped where the library is absent or of another version."""
    distribution, module, name = OPTIONAL[source]
    if importlib.util.find_spec(distribution) is None:
        pytest.skip(f"{distribution} is not installed: what the audit takes for its defaults is not compared here")
    meant, here = source.split(",")[0].split()[1], importlib.metadata.version(distribution)
    if here.split(".")[:2] != meant.split("."):
        pytest.skip(f"{distribution} {here} is installed, and the defaults are those of {meant}")
    loaded = importlib.import_module(module)
    return loaded, getattr(loaded, name)


def in_library(key: str, owner: type) -> Any:
    """The default of an argument, of a dataclass's field or of a constructor."""
    name = SPELLED.get(key, key.partition(".")[2])
    for field in fields(owner) if hasattr(owner, "__dataclass_fields__") else ():
        if field.name == name:
            return field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    return inspect.signature(owner.__init__).parameters[name].default


ROWS = list(rows(optional=False))


def test_the_sources_are_the_versions_that_are_installed() -> None:
    unknown = {default.source.rpartition(":")[0] for _, default in ROWS} - set(SOURCES)
    assert not unknown, f"read the defaults again from the installed version, instead of {unknown}"


@pytest.mark.parametrize(("key", "default"), ROWS, ids=[key for key, _ in ROWS])
def test_a_default_is_the_library_s(key: str, default: Default) -> None:
    module, name = SOURCES[default.source.rpartition(":")[0]]
    found = in_library(key, getattr(module, name))
    if key in MADE_LATER:
        made = getattr(getattr(module, name)(load_in_4bit=True), key.partition(".")[2])
        assert str(made).removeprefix("torch.") == MADE_LATER[key] == default.value
        return
    plain = getattr(found, "value", found)           # of an enum
    assert plain == default.value or (not plain and not default.value), f"{key}: {default.source}"


@pytest.mark.parametrize(("key", "default"), ROWS, ids=[key for key, _ in ROWS])
def test_the_source_line_names_the_argument(key: str, default: Default) -> None:
    source, _, line = default.source.rpartition(":")
    module, _ = SOURCES[source]
    text = Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert SPELLED.get(key, key.partition(".")[2]) in text


OPTIONAL_ROWS = list(rows(optional=True))


def test_of_every_optional_library_it_is_said_where_to_look() -> None:
    assert {default.source.rpartition(":")[0] for _, default in OPTIONAL_ROWS} == set(OPTIONAL)


@pytest.mark.parametrize(("key", "default"), OPTIONAL_ROWS, ids=[f"{one.source[:3]} {key}" for key, one in OPTIONAL_ROWS])
def test_a_default_of_an_optional_library_is_what_it_has_and_stands_there(key: str, default: Default) -> None:
    source, _, line = default.source.rpartition(":")
    module, owner = installed(source)
    text = Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert SPELLED.get(key, key.partition(".")[2]) in text
    if key == "training.bf16":                       # None, of which __post_init__ makes bf16 unless fp16 is asked for
        assert "not (self.fp16) if self.bf16 is None" in text
        assert default.value is True
        return
    found = in_library(key, owner)
    assert found == default.value or (not found and not default.value), f"{key}: {default.source}"
