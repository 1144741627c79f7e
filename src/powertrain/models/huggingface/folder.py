"""Hugging Face folders: `config.json`, `generation_config.json` and weights as safetensors, written and read.

No pickle: a folder that only has `pytorch_model.bin` is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.families import to_hf_config, token_fields
from powertrain.models.huggingface.hub import CONFIG, GENERATION, WEIGHTS, read_config, read_model_json, weight_files
from powertrain.models.huggingface.weights import Shards, fill_weights, has_head_of_its_own, save_tensors, to_hf_weights
from powertrain.models.model import SavedTokenizer
from powertrain.records import WrongUse
from powertrain.records.json_files import write_json

HF_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
REPLACED_TOKENIZERS = ("qwen2",)             # model types whose tokenizer transformers 5 takes for its own, whatever it is


def save_folder(model: Decoder, folder: Path, tokenizer: SavedTokenizer | None = None) -> None:
    """Writes a folder that `load_folder` and transformers load, with the weights in the dtype they have.

    Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    described = to_hf_config(config) | {"dtype": HF_DTYPES[model.embedding.weight.dtype]}
    write_json(folder / CONFIG, described)
    write_json(folder / GENERATION, token_fields(config) | {"_from_model_config": True})
    save_tensors(to_hf_weights(config, state), folder / WEIGHTS, metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save(folder)
        if config.family in REPLACED_TOKENIZERS:
            keep_tokenizer_class(folder / "tokenizer_config.json")


def keep_tokenizer_class(path: Path) -> None:
    """Makes transformers.AutoTokenizer open the class that is named, not the one it expects of the model's type."""
    named = ["PreTrainedTokenizerFast", "PreTrainedTokenizerFast"]
    write_json(path, read_model_json(path) | {"auto_map": {"AutoTokenizer": named}})


def load_folder(folder: Path, *, dropout: float = 0.0, dtype: torch.dtype | None = torch.float32) -> Decoder:
    """The decoder of a Hugging Face folder, on the CPU in `dtype` (None: as it is stored). It draws no random numbers.

    `dropout` is for training on: what config.json says of it is not read. Besides the model, what is in memory at any time
    is its largest tensor as it is stored.
    Raises WrongUse for missing or damaged files, a model_type or a feature that the decoder does not have, and weights
    that are missing, left over, or of another shape than config.json says.
    """
    if not folder.is_dir():
        raise WrongUse(f"there is no folder {folder}; give a folder that holds {CONFIG} and {WEIGHTS}")
    config, stored = read_config(folder, dropout), Shards(weight_files(folder))
    if config.tied_head and has_head_of_its_own(config, stored):
        config = replace(config, tied_head=False)       # as transformers does
    with torch.device("meta"):
        model = Decoder(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(fill_weights(config, stored, shapes, dtype), assign=True)
    model.base = str(folder)
    return model.requires_grad_(True)
