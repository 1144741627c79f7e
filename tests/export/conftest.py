"""Tiny trained-looking models with adapters and tokenizers, in folders as people have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapted_models import make_base
from powertrain.data.example import Example
from powertrain.data.examples.tokenizer import ExampleTokenizer, open_example_tokenizer
from powertrain.data.tokenizers import make_tokenizer
from powertrain.models.adapters.files import save_adapter
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import save_folder

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"

@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ExampleTokenizer:
    """A byte-level BPE with a chat template, as a fine-tuning run has it."""
    text = "def f(x):\n    return x + 1  # naïve\nThe quick brown fox is 12 years old.\n"
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer("bpe", [text * 30, text[::-1] * 30], 300).save(folder)
    return replace(open_example_tokenizer(folder), template=TEMPLATE)


@pytest.fixture
def examples() -> list[Example]:
    draws = np.random.default_rng(0)
    return [Example(ids, ids) for ids in (draws.integers(0, 300, length) for length in (5, 31, 64))]


@pytest.fixture
def saved_base(tmp_path: Path, tokenizer: ExampleTokenizer) -> Callable[..., Path]:
    """The folder of a base of a family."""

    def save(family: str, dtype: torch.dtype = torch.float32, **asked: Any) -> Path:
        save_folder(make_base(family, **asked).to(dtype), tmp_path / "base", tokenizer)
        return tmp_path / "base"

    return save


@pytest.fixture
def saved_adapter(tmp_path: Path, tokenizer: ExampleTokenizer) -> Callable[..., Path]:
    """The folder of an adapter for a base."""

    def save(base: Path, model: Decoder) -> Path:
        save_adapter(model, tmp_path / "adapter", base=str(base), tokenizer=tokenizer)
        return tmp_path / "adapter"

    return save
