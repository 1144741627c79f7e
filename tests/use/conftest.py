"""Models in folders, as someone would name them on the command line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from adapted_models import make_base, with_adapter
from example_folders import chat_folder
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.adapters.files import save_adapter
from powertrain.models.huggingface.folder import save_folder


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer with chatml: <|im_end|> ends a turn, <|endoftext|> is 0."""
    return chat_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def base_folder(tmp_path: Path, chat_tokenizer: Path) -> Path:
    """A tiny llama that knows chatml."""
    save_folder(make_base("llama", vocabulary=330, context=96), tmp_path / "base", open_example_tokenizer(chat_tokenizer))
    return tmp_path / "base"


@pytest.fixture
def adapter_folder(tmp_path: Path, base_folder: Path) -> Callable[..., Path]:
    """An adapter for it, with its tokenizer beside it or without."""

    def save(*, with_tokenizer: bool = True) -> Path:
        folder = tmp_path / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        model = with_adapter(make_base("llama", vocabulary=330, context=96))
        tokenizer = open_example_tokenizer(base_folder) if with_tokenizer else None
        save_adapter(model, folder, base=str(base_folder), tokenizer=tokenizer)
        return folder

    return save
