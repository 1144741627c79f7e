"""GGUF: one file with weights, settings, tokenizer and chat template, which llama.cpp and Ollama open.

Tensors are written one at a time, so that memory holds one besides the model. The file is opened again by the `gguf`
package's reader and every tensor and setting in it compared; where llama-cpp-python is installed llama.cpp itself computes
a text with it, which is compared too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from powertrain.export.gguf_check import ask_llama_cpp, check_settings, check_tensors
from powertrain.export.gguf_vocabulary import read_vocabulary
from powertrain.export.llama_cpp import (
    Architecture,
    architecture_metadata,
    extra_tensors,
    find_architecture,
    places,
    to_llama_cpp,
)
from powertrain.export.output import new_folder
from powertrain.models.decoder import Decoder
from powertrain.models.model import SavedTokenizer
from powertrain.records import WrongUse

# our name -> the package's type, the number that llama.cpp has for a file mostly of it
STORED = {"float32": ("F32", 0), "float16": ("F16", 1), "bfloat16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
Q8_BLOCK = 32                                # weights that share a scale, of one row
LARGEST_HALF = 65_504.0
QUANTISATION_VERSION = 2                     # of ggml's block formats; files without blocks have none


@dataclass(frozen=True)
class GGUFReport:
    file: Path
    file_bytes: int
    tensors: int
    notes: tuple[str, ...]
    llama_cpp: str                           # what llama.cpp itself said, or why it was not asked


def export_gguf(model: Decoder, folder: Path, tokenizer: SavedTokenizer, *, name: str, dtype: str = "float16",
                stops: Collection[int] = (), chat_template: str | None = None, text: Sequence[int] = ()) -> GGUFReport:
    """Writes `folder`/NAME-DTYPE.gguf. `text` is tokens that llama.cpp, if it is installed, is asked to continue.

    Raises WrongUse where llama.cpp would compute something else than the model, and RunFailed if the disk refuses or the
    file is not what was to be written.
    """
    if importlib.util.find_spec("gguf") is None:
        raise WrongUse("GGUF files need the gguf package, which is not installed; pip install gguf")
    architecture, notes = find_architecture(model.config)
    vocabulary = read_vocabulary(tokenizer, model.config.vocabulary, stops=stops, chat_template=chat_template)
    metadata = general_metadata(name, dtype) | vocabulary.metadata() | {
        f"{architecture.name}.{key}": value for key, value in architecture_metadata(model.config).items()}
    with new_folder(folder) as building:
        file = building / f"{name}-{STORED[dtype][0]}.gguf"
        write_file(file, model, architecture, metadata, dtype)
        tensors = check_tensors(file, ((name, tensor.numpy(), *as_stored(name, tensor, dtype))
                                       for name, tensor in all_tensors(model)))
        check_settings(file, metadata)
        said = ask_llama_cpp(file, model, text, dtype)
        size_bytes = file.stat().st_size
    return GGUFReport(folder / file.name, size_bytes, tensors, (*notes, *vocabulary.notes), said)


def general_metadata(name: str, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {"general.type": "model", "general.name": name, "general.file_type": STORED[dtype][1]}
    return found | ({"general.quantization_version": QUANTISATION_VERSION} if dtype == "q8_0" else {})


def write_file(file: Path, model: Decoder, architecture: Architecture, metadata: dict[str, Any], dtype: str) -> None:
    """Raises OSError if the disk refuses, and WrongUse for a weight that the dtype cannot hold."""
    import gguf

    writer = gguf.GGUFWriter(file, architecture.name)
    try:
        for key, value in metadata.items():
            add(writer, key, value)
        for name, tensor in all_tensors(model):              # once for the sizes, once for the data: none is kept
            stored, kind = as_stored(name, tensor, dtype)
            writer.add_tensor_info(name, stored.shape, stored.dtype, stored.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in all_tensors(model):
            writer.write_tensor_data(as_stored(name, tensor, dtype)[0])
        writer.flush()
    finally:
        writer.close()


def add(writer: Any, key: str, value: Any) -> None:
    """A setting in the type that llama.cpp reads it in: counts are uint32, shares and scores float32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def all_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file, fp32, made when it is asked for."""
    yield from extra_tensors(model.config).items()
    for place in places(model.config):
        yield place.name, to_llama_cpp(model, place)


def as_stored(name: str, tensor: Tensor, dtype: str) -> tuple[Any, Any]:
    """The bytes of a tensor, and the package's name for their type.

    Vectors and positions stay fp32, as llama.cpp wants them. A row that q8_0's blocks do not divide becomes float16.
    """
    import gguf

    if tensor.dim() < 2 or name == "position_embd.weight":
        dtype = "float32"
    elif dtype == "q8_0" and tensor.shape[-1] % Q8_BLOCK:
        dtype = "float16"
    if dtype == "float16" and (largest := float(tensor.abs().max())) > LARGEST_HALF:
        raise WrongUse(f"the weight {name} holds {largest:.3g}, and float16 ends at {LARGEST_HALF:,.0f}; use --dtype bfloat16 "
                       "or float32")
    kind = gguf.GGMLQuantizationType[STORED[dtype][0]]
    return gguf.quantize(tensor.numpy(), kind), kind
