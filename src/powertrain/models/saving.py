"""A trained model on disk: the files that others load, for each kind of model."""

from __future__ import annotations

from pathlib import Path

from powertrain.models.adapters.attached import has_adapters
from powertrain.models.adapters.files import save_adapter
from powertrain.models.bridge.model import BridgedModel
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import save_folder
from powertrain.models.model import Model, SavedTokenizer


def save_model(model: Model, folder: Path, tokenizer: SavedTokenizer | None = None) -> None:
    """Write the adapters' files of a model that has adapters, else a whole Hugging Face folder. Raises OSError."""
    if isinstance(model, BridgedModel):
        model.save(folder, tokenizer)
        return
    assert isinstance(model, Decoder)
    if has_adapters(model):
        save_adapter(model, folder, base=model.base, tokenizer=tokenizer)
    else:
        save_folder(model, folder, tokenizer)
