"""Folders of tiny models as transformers saves them, and what the bridge makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from library_models import CONFIGS, VOCABULARY

from powertrain.models.bridge.loading import load_bridged
from powertrain.models.bridge.model import BridgedModel
from powertrain.models.huggingface.providers import AUTO_CLASSES


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny random models as transformers saves them; those of encoders have the head that masked words need."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            task, kind, sizes = CONFIGS[name]
            torch.manual_seed(0)
            auto = transformers.AutoModelForMaskedLM if task == "span" else getattr(transformers, AUTO_CLASSES[task])
            model = auto.from_config(kind(vocab_size=VOCABULARY, **sizes))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return folder


@pytest.fixture
def load(folders: Callable[[str], Path]) -> Callable[..., BridgedModel]:
    def make(name: str, method: str = "full", seed: int = 0, **asked: Any) -> BridgedModel:
        folder = folders(name)               # before the seed, as making it draws too
        torch.manual_seed(seed)
        return load_bridged(folder, task=CONFIGS[name][0], method=method, **asked)

    return make
