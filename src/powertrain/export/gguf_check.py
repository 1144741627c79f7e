"""A GGUF file opened again: by the `gguf` package's reader, and by llama.cpp itself where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from powertrain.models.decoder import Decoder
from powertrain.records import IGNORE, Batch, RunFailed

# Largest error of a stored weight against the fp32 one, as a share of it: half of the last bit. In q8_0 it is a share of
# the largest weight of its block: half a step of 127, and the block's own scale is a float16.
ROUNDING = {"F32": 0.0, "F16": 2.0 ** -11, "BF16": 2.0 ** -8, "Q8_0": 0.5 / 127 + 2.0 ** -11}
SMALLEST_HALF = 2.0 ** -25                   # half of float16's smallest step: numbers near 0 are off by that, not by a share
Q8_BLOCK = 32
# What llama.cpp's logits may differ by, as a share of their spread: it keeps keys and values in float16 and rounds
# activations to the weights' type. Over all families with random weights 0.02 and, with q8_0, 0.09 was seen; a tensor in the
# wrong order gives more than 1.
LLAMA_CPP_DIFFERENCE, Q8_DIFFERENCE = 0.1, 0.3
ASKED_TOKENS = 64


def check_tensors(file: Path, expected: Iterable[tuple[str, npt.NDArray[Any], npt.NDArray[Any], Any]]) -> int:
    """Compares every tensor; how many there are. `expected`: name, fp32 values, stored values and their type.

    Raises RunFailed where the file is not what was to be written, or further from the fp32 values than its type rounds.
    """
    import gguf

    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    count = len(found)
    for name, values, stored, kind in expected:
        read = found.pop(name, None)
        if read is None:
            raise broken(file, f"it lacks the tensor {name}")
        same = (read.tensor_type == kind and list(read.shape) == list(reversed(values.shape))
                and np.array_equal(_bytes(read.data), _bytes(stored)))
        if not same:
            raise broken(file, f"the tensor {name} is not what was written")
        if not is_rounded(values, gguf.dequantize(read.data, kind).reshape(values.shape), kind.name):
            raise broken(file, f"the tensor {name} is further from the model's than {kind.name} rounds")
    if found:
        raise broken(file, f"it has {len(found)} tensors that the model has not: {', '.join(sorted(found)[:4])}")
    return count


def is_rounded(values: npt.NDArray[Any], stored: npt.NDArray[Any], kind: str) -> bool:
    """Whether each stored value is its fp32 value rounded to `kind`, at most."""
    scale = np.abs(values)
    if kind == "Q8_0":
        blocks = scale.reshape(-1, Q8_BLOCK)
        scale = np.broadcast_to(blocks.max(axis=1, keepdims=True), blocks.shape).reshape(values.shape)
    allowed = ROUNDING[kind] * scale * (1 + 1e-6) + (0.0 if kind in ("F32", "BF16") else SMALLEST_HALF * 128)
    return bool(np.all(np.abs(values - stored) <= allowed))


def check_settings(file: Path, metadata: Mapping[str, Any]) -> None:
    """Compares every setting. Raises RunFailed where one differs."""
    import gguf

    reader = gguf.GGUFReader(file)
    for key, value in metadata.items():
        field = reader.get_field(key)
        read = None if field is None else field.contents()
        is_float = isinstance(value[0] if isinstance(value, list) else value, float)
        same = np.array_equal(np.float32(read), np.float32(value)) if is_float and read is not None else read == value
        if not same:
            raise broken(file, f"the setting {key} is not what was written")


def broken(file: Path, because: str) -> RunFailed:
    return RunFailed(f"the GGUF file {file.name} was written, opened again and is not right: {because}; it was removed. Try "
                     "again, and report it if it stays so")


def ask_llama_cpp(file: Path, model: Decoder, text: Sequence[int], dtype: str) -> str:
    """What llama.cpp's own logits for `text` come to, in one phrase; why it was not asked, where it is not installed.

    Raises RunFailed where it cannot open the file, or computes something else.
    """
    if not text:
        return "llama.cpp was not asked: there is no text to compute"
    if importlib.util.find_spec("llama_cpp") is None:
        return "llama.cpp was not asked: llama-cpp-python is not installed"
    ids = list(text[:min(ASKED_TOKENS, model.config.context)])
    difference = spread_difference(our_logits(model, ids), llama_cpp_logits(file, ids))
    allowed = Q8_DIFFERENCE if dtype == "q8_0" else LLAMA_CPP_DIFFERENCE
    if difference > allowed:
        raise broken(file, f"llama.cpp's logits differ from the model's by {difference:.1%} of their spread, and {allowed:.0%} "
                           "is what its precision explains")
    return f"llama.cpp opens it, and its logits differ by {difference:.2%} of their spread"


def our_logits(model: Decoder, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """(tokens, V) fp32."""
    device = model.embedding.weight.device
    tokens = torch.tensor(ids, device=device)
    batch = Batch(tokens, torch.full_like(tokens, IGNORE), torch.arange(len(ids), device=device), (len(ids),), 0)
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(batch).float().cpu().numpy()
    return logits


def llama_cpp_logits(file: Path, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """(tokens, V) fp32, as llama.cpp computes them. Raises RunFailed if it cannot open the file."""
    library: Any = importlib.import_module("llama_cpp")
    try:
        opened = library.Llama(str(file), n_ctx=len(ids), n_batch=len(ids), logits_all=True, verbose=False)
    except ValueError as error:
        raise broken(file, f"llama.cpp cannot open it ({error})") from error
    try:
        opened.eval(list(ids))
        return np.array(opened.scores[:len(ids)], dtype=np.float32)
    finally:
        opened.close()


def spread_difference(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> float:
    """The root mean square of what logits differ by, each row less its mean, as a share of their own: 0 is equal."""
    ours, theirs = (logits - logits.mean(axis=1, keepdims=True) for logits in (ours, theirs))
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(ours ** 2)))


def _bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).ravel()
