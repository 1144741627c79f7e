"""Hugging Face folders: `config.json`, `generation_config.json` and weights as safetensors, written and read.

No pickle: a folder that only has `pytorch_model.bin` is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from powertrain.models.config import ModelConfig
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.families import from_hf_config, to_hf_config, token_fields, token_ids
from powertrain.models.huggingface.shards import Shards
from powertrain.models.huggingface.weights import fill_weights, has_head_of_its_own, to_hf_weights
from powertrain.models.model import SavedTokenizer
from powertrain.records import WrongUse

WEIGHTS, SHARDS, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION = "generation_config.json"
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


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """safetensors' file of `tensors`. Raises OSError where the disk refuses."""
    with disk_errors(path):
        save_file(tensors, path, metadata=metadata)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises OSError where the disk refuses; safetensors has its own error for that."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code), str(path)) from None


def keep_tokenizer_class(path: Path) -> None:
    """Makes transformers.AutoTokenizer open the class that is named, not the one it expects of the model's type."""
    write_json(path, read_json(path) | {"auto_map": {"AutoTokenizer": ["PreTrainedTokenizerFast", "PreTrainedTokenizerFast"]}})


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


def read_config(folder: Path, dropout: float = 0.0) -> ModelConfig:
    """The config of a Hugging Face folder. Raises WrongUse if it is missing, or not one that the decoder computes.

    The tokens that end an answer are also read from generation_config.json, which is where chat models name them all.
    """
    config = from_hf_config(read_json(folder / CONFIG), dropout)
    if not (folder / GENERATION).exists():
        return config
    ends = token_ids(read_json(folder / GENERATION) | {"vocab_size": config.vocabulary}, "eos_token_id")
    known = (config.end_of_text, *config.other_ends)
    added = tuple(token for token in dict.fromkeys(ends) if token not in known)
    return replace(config, other_ends=config.other_ends + added) if config.end_of_text is not None else config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the folder's weights, there or not. Raises WrongUse if there are none to name."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / SHARDS).exists():
        pickled = any(folder.glob("pytorch_model*.bin"))
        cure = (f"it has pickled weights, which are never loaded: save the model anew as {WEIGHTS}" if pickled
                else "check the path")
        raise WrongUse(f"{folder} has neither {WEIGHTS} nor {SHARDS}; {cure}")
    where = read_json(folder / SHARDS).get("weight_map")
    if not isinstance(where, dict):
        raise WrongUse(f"{folder / SHARDS} does not say which file holds which weight; copy or download it again")
    return [folder / name for name in sorted({Path(str(file)).name for file in where.values()})]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises WrongUse if the file is missing or is not one."""
    if not file.exists():
        if file.name == CONFIG and (file.parent / "adapter_config.json").exists():
            raise WrongUse(f"{file.parent} holds an adapter, not a model; give it as model.adapter, and its base as model.path")
        raise WrongUse(f"there is no {file}; a model's folder holds {CONFIG} and {WEIGHTS}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WrongUse(f"{file} is not JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise WrongUse(f"{file} holds a {type(value).__name__} where an object belongs; copy or download it again")
    return value


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
