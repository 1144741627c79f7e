"""Hugging Face folders: `config.json`, `generation_config.json` and weights as safetensors, written and read.

No pickle: a folder that only has `pytorch_model.bin` is refused.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from powertrain.models.decoder import Decoder
from powertrain.models.families import from_hf_config, to_hf_config
from powertrain.models.model import SavedTokenizer
from powertrain.models.weights import from_hf_weights, to_hf_weights
from powertrain.records import WrongUse

WEIGHTS, SHARDS, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
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
    write_json(folder / "generation_config.json",
               {"bos_token_id": config.end_of_text, "eos_token_id": config.end_of_text, "_from_model_config": True})
    save_tensors(to_hf_weights(config, state), folder / WEIGHTS, metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save(folder)
        if config.family in REPLACED_TOKENIZERS:
            keep_tokenizer_class(folder / "tokenizer_config.json")


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """safetensors' file of `tensors`. Raises OSError where the disk refuses; safetensors has its own error for that."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code), str(path)) from None


def keep_tokenizer_class(path: Path) -> None:
    """Makes transformers.AutoTokenizer open the class that is named, not the one it expects of the model's type."""
    write_json(path, read_json(path) | {"auto_map": {"AutoTokenizer": ["PreTrainedTokenizerFast", "PreTrainedTokenizerFast"]}})


def load_folder(folder: Path, *, dropout: float = 0.0) -> Decoder:
    """The decoder of a Hugging Face folder, on the CPU in fp32. It draws no random numbers.

    `dropout` is for training on: what config.json says of it is not read.
    Raises WrongUse for missing or damaged files, a model_type or a feature that the decoder does not have, and weights
    that are missing, left over, or of another shape than config.json says.
    """
    if not folder.is_dir():
        raise WrongUse(f"there is no folder {folder}; give a folder that holds {CONFIG} and {WEIGHTS}")
    config = from_hf_config(read_json(folder / CONFIG), dropout)
    state = from_hf_weights(config, read_weights(folder))
    with torch.device("meta"):
        model = Decoder(config)
    refuse_other_shapes(model, state)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    return model.requires_grad_(True)


def refuse_other_shapes(model: Decoder, state: dict[str, Tensor]) -> None:
    """Raises WrongUse for a weight that has not the shape that the config gives it."""
    for name, expected in model.state_dict().items():
        if state[name].shape != expected.shape:
            raise WrongUse(f"{name} is {tuple(state[name].shape)} in the folder, and its {CONFIG} makes it "
                           f"{tuple(expected.shape)}; check that both come from the same model")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder, under Hugging Face's names, from one file or from shards."""
    if (folder / WEIGHTS).exists():
        return read_shard(folder / WEIGHTS)
    if not (folder / SHARDS).exists():
        pickled = any(folder.glob("pytorch_model*.bin"))
        cure = (f"it has pickled weights, which are never loaded: save the model anew as {WEIGHTS}" if pickled
                else "check the path")
        raise WrongUse(f"{folder} has neither {WEIGHTS} nor {SHARDS}; {cure}")
    index = read_json(folder / SHARDS)
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        tensors |= read_shard(folder / Path(name).name)
    return tensors


def read_shard(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file. Raises WrongUse if it is missing or damaged."""
    if not file.exists():
        raise WrongUse(f"there is no {file}, which {SHARDS} names; the download may be incomplete")
    try:
        return dict(load_file(file))
    except SafetensorError as error:
        raise WrongUse(f"{file} is damaged ({error}); copy or download it again") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises WrongUse if the file is missing or is not one."""
    if not file.exists():
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
