"""Hugging Face folders: `config.json`, `generation_config.json` and weights as safetensors, written and read.

No pickle: a folder that only has `pytorch_model.bin` is refused. safetensors files are mapped: a tensor that is read is a view
of its file, and the pages that were looked at stay in memory as long as the mapping does. So the mappings are dropped every
few megabytes; opening a file again takes less than a millisecond, and a tensor that is still in use keeps its own mapping.
Loading fills our tensors from theirs, as families.py pairs them, part by part, and lets go of each part, so that one copy of
the model is in memory.
"""

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from powertrain.models.config import ModelConfig
from powertrain.models.decoder import Decoder, give_reward_head
from powertrain.models.huggingface.families import FORMATS, REWARD_HEAD, Row, map_weights, to_hf_config, token_fields
from powertrain.models.huggingface.hub import CONFIG, GENERATION, WEIGHTS, read_config, read_model_json, weight_files
from powertrain.models.model import SavedTokenizer
from powertrain.records import WrongUse
from powertrain.records.json_files import refuse_special, write_json

HF_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
REPLACED_TOKENIZERS = ("qwen2",)             # model types whose tokenizer transformers 5 takes for its own, whatever it is
RELEASE_BYTES = 8 << 20      # read from the mappings before they are dropped: little beside any model worth the care
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}    # by safetensors' names
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
NAMES_SHOWN = 4              # of missing or left-over weights in an error: more would hide the sentence


def save_folder(model: Decoder, folder: Path, tokenizer: SavedTokenizer | None = None) -> None:
    """Write a folder that `load_folder` and transformers load, with the weights in the dtype they have.

    Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    save_tensors(to_hf_weights(model.config, state), folder / WEIGHTS, metadata={"format": "pt"})
    save_description(model, folder, tokenizer)


def save_description(model: Decoder, folder: Path, tokenizer: SavedTokenizer | None = None) -> None:
    """Write what a folder has besides weights: the config, the tokens that end a text, the tokenizer."""
    config = model.config
    described = to_hf_config(config) | {"dtype": HF_DTYPES[model.embedding.weight.dtype]}
    write_json(folder / GENERATION, token_fields(config) | {"_from_model_config": True})
    if tokenizer is not None:
        tokenizer.save(folder)
        if config.family in REPLACED_TOKENIZERS:     # AutoTokenizer then opens the class that is named
            path, named = folder / "tokenizer_config.json", ["PreTrainedTokenizerFast", "PreTrainedTokenizerFast"]
            write_json(path, read_model_json(path) | {"auto_map": {"AutoTokenizer": named}})
    write_json(folder / CONFIG, described | ({"pad_token_id": _padding(folder, config)} if config.rewards else {}))


def _padding(folder: Path, config: ModelConfig) -> int | None:
    """Return the padding token of the tokenizer in `folder`, by which transformers finds the last token of a text to score.

    None where there is none that ends no text: then transformers scores texts one by one, and refuses a padded batch.
    """
    settings, library = ({} if not (folder / name).is_file() else read_model_json(folder / name)
                         for name in ("tokenizer_config.json", "tokenizer.json"))
    named = settings.get("pad_token")
    text = named.get("content") if isinstance(named, dict) else named
    found = next((token["id"] for token in library.get("added_tokens") or () if token.get("content") == text), None)
    return None if found in (config.end_of_text, *config.other_ends) else found


def load_folder(folder: Path, *, dropout: float = 0.0, dtype: torch.dtype | None = torch.float32,
                rewards: bool = False) -> Decoder:
    """Return the decoder of a Hugging Face folder, on the CPU in `dtype` (None: as stored).

    Draws no random numbers, except where `rewards` asks for a head for rewards that the folder does not hold.
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
    if rewards and not config.rewards:
        give_reward_head(model)
    return model.requires_grad_(True)


# ------------------------------------------------------------------------------------------------ safetensors


class Shards:
    """The tensors of some files by their names. Raises WrongUse for files that are missing or damaged."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.opened: dict[Path, Any] = {}
        self.read_bytes = 0
        self.files = {name: file for file in files for name in self.open(file).keys()}  # noqa: SIM118

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def open(self, file: Path) -> Any:
        """Return the open file, mapped into memory."""
        if file not in self.opened:
            if not file.exists():
                raise WrongUse(f"there is no {file}, which the folder's index names; the download may be incomplete")
            refuse_special(file)
            try:
                self.opened[file] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise WrongUse(f"{file} is damaged ({error}); copy or download it again") from error
        return self.opened[file]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.open(self.files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype. Raises WrongUse for a dtype that no weights are trained in, such as 8 bits."""
        stored = self.open(self.files[name]).get_slice(name).get_dtype()
        if stored not in DTYPES:
            raise WrongUse(f"{name} is stored as {stored}, and weights are read as {', '.join(DTYPES)} only; give the "
                           f"unquantised model that it was made from")
        return DTYPES[stored]

    def read(self, name: str) -> Tensor:
        """Return the tensor as a view of the file, to be used or copied at once."""
        tensor_bytes = math.prod(self.shape(name)) * self.dtype(name).itemsize
        if self.read_bytes + tensor_bytes > RELEASE_BYTES:
            self.opened, self.read_bytes = {}, 0
        self.read_bytes += tensor_bytes
        tensor: Tensor = self.open(self.files[name]).get_tensor(name)
        return tensor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` as a safetensors file. Raises OSError where the disk refuses."""
    path.touch()                             # with the permissions of any new file: the library's own are 0600
    mode = path.stat().st_mode
    with disk_errors(path):
        save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise OSError where the disk refuses; safetensors has its own error for that."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code), str(path)) from None

# ------------------------------------------------------------------------------------------------ ours and theirs


def to_hf_weights(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a decoder's state under Hugging Face's names and in its layouts, each tensor contiguous."""
    given: dict[str, Tensor] = {}
    for row in map_weights(config):
        if row.ours in state:
            tensor = state[row.ours]
        else:               # only gpt2 without biases comes here
            weight = state[row.ours.removesuffix("bias") + "weight"]
            tensor = weight.new_zeros(weight.shape[0])
        tensor = rearrange(tensor, row.layout, config)
        parts = torch.split(tensor, list(row.sizes)) if row.sizes else (tensor,)
        given |= {name: part.contiguous() for name, part in zip(row.theirs, parts, strict=True)}
    return given


def rearrange(tensor: Tensor, layout: str, config: ModelConfig) -> Tensor:
    """Return the tensor, given in our layout, in Hugging Face's layout; `put` is the way back."""
    if layout == "transposed" and tensor.dim() == 2:
        return tensor.t()
    if layout != "interleaved":
        return tensor
    return torch.unflatten(tensor, 0, (3, config.heads, config.head_width)).transpose(0, 1).flatten(0, 2)


def put(ours: Tensor, theirs: Tensor, layout: str, config: ModelConfig) -> None:
    """Write Hugging Face's tensor into ours, in our layout, with no copy between."""
    if layout == "interleaved":
        ours, theirs = (torch.unflatten(tensor, 0, (outer, inner, config.head_width))
                        for tensor, outer, inner in ((ours, 3, config.heads), (theirs, config.heads, 3)))
        theirs = theirs.transpose(0, 1)
    ours.copy_(theirs.t() if layout == "transposed" and theirs.dim() == 2 else theirs)


def name_weights(config: ModelConfig, stored: Shards) -> dict[str, str]:
    """Return the family's name of each tensor -> its name in the folder, which lacks the prefix if the head was not saved."""
    prefix, head = FORMATS[config.family].prefix, _head(config)
    return {name if name.startswith(prefix) or name == head else prefix + name: name
            for name in stored if not name.endswith(BUFFERS)}


def has_head_of_its_own(config: ModelConfig, stored: Shards) -> bool:
    """Return whether the folder holds a head that differs from the embedding: then its config.json is wrong to tie them."""
    named, embedding, head = name_weights(config, stored), map_weights(config)[0].theirs[0], _head(config)
    return {embedding, head} <= named.keys() and not torch.equal(stored.read(named[embedding]), stored.read(named[head]))


def _head(config: ModelConfig) -> str:
    return REWARD_HEAD if config.rewards else f"{FORMATS[config.family].names['head']}.weight"


def fill_weights(config: ModelConfig, stored: Shards, shapes: Mapping[str, tuple[int, ...]],
                 dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return a decoder's state in `dtype`, or in the stored dtypes where that is None.

    Raises WrongUse for weights that are missing, left over, or not of `shapes`, and for dtypes that are not of training.
    """
    rows, named = map_weights(config), name_weights(config, stored)
    if config.tied_head and _head(config) in named:
        named.setdefault(rows[0].theirs[0], named.pop(_head(config)))
    expected = {name for row in rows for name in row.theirs}
    refuse("the folder lacks {} weights of the model that its config.json describes", expected - named.keys())
    refuse("the model of config.json has no place for {} weights of the folder", named.keys() - expected)
    for row in rows:
        shape = tuple(reversed(shapes[row.ours])) if row.layout == "transposed" else shapes[row.ours]
        for name, rows_of_it in zip(row.theirs, row.sizes or shape[:1], strict=True):
            if (theirs := stored.shape(named[name])) != (ours := (rows_of_it, *shape[1:])):
                raise WrongUse(f"{name} is {theirs} in the folder, and its config.json makes it {ours}; check that both come "
                               f"from the same model")
    return {row.ours: fill(row, config, stored, [named[name] for name in row.theirs], shapes[row.ours], dtype) for row in rows}


def refuse(what: str, names: set[str]) -> None:
    """Raise WrongUse if there are any names; `what` has a gap for how many."""
    if names:
        shown = ", ".join(sorted(names)[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
        raise WrongUse(f"{what.format(len(names))}: {shown}; check that both come from the same model")


def fill(row: Row, config: ModelConfig, stored: Shards, names: list[str], shape: tuple[int, ...],
         dtype: torch.dtype | None) -> Tensor:
    """Return our tensor, filled from its counterparts, which are converted to `dtype`, or to one that holds them all."""
    if dtype is None:
        dtype = functools.reduce(torch.promote_types, map(stored.dtype, names))
        dtype = torch.float32 if dtype == torch.float64 else dtype       # nothing here trains in fp64
    filled = torch.empty(shape, dtype=dtype, device="cpu")
    pieces = torch.split(filled, list(row.sizes)) if row.sizes else (filled,)
    for piece, name in zip(pieces, names, strict=True):
        put(piece, stored.read(name), row.layout, config)
    return filled
