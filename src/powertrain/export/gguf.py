"""GGUF: one file with weights, settings, tokenizer and chat template, which llama.cpp and Ollama open.

Tensors are written one at a time, so that memory holds one besides the model. The file is opened again by the `gguf`
package's reader and every tensor and setting in it compared; where llama-cpp-python is installed llama.cpp itself computes
a text with it, which is compared too.

llama.cpp has one computation graph for each architecture. A model is refused if the graph of its architecture computes
something else than the model does.
The file's tensors are ours, split and renamed, with three exceptions:

  llama, mistral   rotate neighbouring dimensions of a head, where we rotate dimension i and i + half: q and k are reordered
  gemma            norms multiply by their weight and not by 1 + weight: 1 is added
  gpt_neox         has a head of its own, also where ours is the embedding

Source: llama.cpp, src/models/*.cpp and conversion/*.py, as of llama-cpp-python 0.3.36; equal logits were seen there.
"""

import importlib.util
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from powertrain.data.publishing import new_folder
from powertrain.export.gguf_vocabulary import read_vocabulary
from powertrain.export.modelfile import Render, write_modelfile
from powertrain.models.config import ModelConfig, RotaryScaling
from powertrain.models.decoder import Decoder, inverse_frequencies
from powertrain.models.huggingface.families import map_weights
from powertrain.models.model import SavedTokenizer
from powertrain.records import IGNORE, Batch, RunFailed, WrongUse

# Largest error of a stored weight against the fp32 one, as a share of it: half of the last bit. In q8_0 it is a share of
# the largest weight of its block: half a step of 127, and the block's own scale is a float16.
ROUNDING = {"F32": 0.0, "F16": 2.0 ** -11, "BF16": 2.0 ** -8, "Q8_0": 0.5 / 127 + 2.0 ** -11}
SMALLEST_HALF = 2.0 ** -25                   # half of float16's smallest step: numbers near 0 are off by that, not by a share
Q8_BLOCK = 32                                # weights of one row that share a scale
# The largest allowed difference of llama.cpp's logits, as a share of their spread: llama.cpp keeps keys and values in float16
# and rounds activations to the weights' type. Over all families with random weights the difference was at most 0.02, and 0.09
# with q8_0; a tensor in the wrong order gives more than 1.
LLAMA_CPP_DIFFERENCE, Q8_DIFFERENCE = 0.1, 0.3
ASKED_TOKENS = 64


def check_tensors(file: Path, expected: Iterable[tuple[str, npt.NDArray[Any], npt.NDArray[Any], Any]]) -> int:
    """Compare every tensor, and return how many there are. `expected`: name, fp32 values, stored values and their type.

    Raises RunFailed where the file is not what was to be written, or further from the fp32 values than its type rounds.
    """
    import gguf

    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    count = len(found)
    for name, values, stored, kind in expected:
        read = found.pop(name, None)
        if read is None:
            raise broken(file, f"it lacks the tensor {name}")
        if not (read.tensor_type == kind and list(read.shape) == list(reversed(values.shape))
                and read.data.tobytes() == stored.tobytes()):
            raise broken(file, f"the tensor {name} differs from the one that was written")
        if not is_rounded(values, gguf.dequantize(read.data, kind).reshape(values.shape), kind.name):
            raise broken(file, f"the tensor {name} is further from the model's than {kind.name} rounds")
    if found:
        raise broken(file, f"it has {len(found)} tensors that the model has not: {', '.join(sorted(found)[:4])}")
    return count


def is_rounded(values: npt.NDArray[Any], stored: npt.NDArray[Any], kind: str) -> bool:
    """Return whether each stored value differs from its fp32 value by no more than `kind` rounds."""
    scale = np.abs(values)
    if kind == "Q8_0":
        blocks = scale.reshape(-1, Q8_BLOCK)
        scale = np.broadcast_to(blocks.max(axis=1, keepdims=True), blocks.shape).reshape(values.shape)
    allowed = ROUNDING[kind] * scale * (1 + 1e-6) + (0.0 if kind in ("F32", "BF16") else SMALLEST_HALF * 128)
    return bool(np.all(np.abs(values - stored) <= allowed))


def check_settings(file: Path, metadata: Mapping[str, Any]) -> None:
    """Compare every setting. Raises RunFailed where one differs."""
    import gguf

    reader = gguf.GGUFReader(file)
    for key, value in metadata.items():
        field = reader.get_field(key)
        read = None if field is None else field.contents()
        is_float = isinstance(value[0] if isinstance(value, list) else value, float)
        same = np.array_equal(np.float32(read), np.float32(value)) if is_float and read is not None else read == value
        if not same:
            raise broken(file, f"the setting {key} differs from the one that was written")


def broken(file: Path, because: str) -> RunFailed:
    return RunFailed(f"the GGUF file {file.name} was written, opened again and is not right: {because}; it was removed. Try "
                     "again, and report it if it stays so")


def ask_llama_cpp(file: Path, model: Decoder, text: Sequence[int], dtype: str) -> str:
    """Return in one phrase how far llama.cpp's own logits for `text` are from ours, or why llama.cpp was not asked.

    Raises RunFailed where it cannot open the file, or computes something else.
    """
    if not text:
        return "llama.cpp was not asked: there is no text to compute"
    if importlib.util.find_spec("llama_cpp") is None:
        return "llama.cpp was not asked: llama-cpp-python is not installed"
    ids = list(text[:min(ASKED_TOKENS, model.config.context)])
    tokens = torch.tensor(ids, device=model.embedding.weight.device)
    batch = Batch(tokens, torch.full_like(tokens, IGNORE), torch.arange(len(ids), device=tokens.device), (len(ids),), 0)
    with torch.no_grad():
        ours = model(batch).float().cpu().numpy()            # (tokens, V)
    difference = spread_difference(ours, llama_cpp_logits(file, ids))
    allowed = Q8_DIFFERENCE if dtype == "q8_0" else LLAMA_CPP_DIFFERENCE
    if difference > allowed:
        raise broken(file, f"llama.cpp's logits differ from the model's by {difference:.1%} of their spread; its precision "
                           f"explains at most {allowed:.0%}")
    return f"llama.cpp opens it, and its logits differ by {difference:.2%} of their spread"


def llama_cpp_logits(file: Path, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return llama.cpp's logits, (tokens, V) fp32. Raises RunFailed if it cannot open the file."""
    library: Any = importlib.import_module("llama_cpp")
    try:
        opened = library.Llama(str(file), n_ctx=len(ids), n_batch=len(ids), logits_all=True, verbose=False)
    except ValueError as error:
        raise broken(file, f"llama.cpp cannot open it ({error})") from error
    with closing(opened):
        opened.eval(list(ids))
        return np.array(opened.scores[:len(ids)], dtype=np.float32)


def spread_difference(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> float:
    """Return the root mean square of the difference, each row less its mean, as a share of our logits' own: 0 is equal."""
    ours, theirs = (logits - logits.mean(axis=1, keepdims=True) for logits in (ours, theirs))
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(ours ** 2)))


# ------------------------------------------------------------------------------------------------ writing

# our name -> the package's type, the number that llama.cpp has for a file mostly of it
STORED = {"float32": ("F32", 0), "float16": ("F16", 1), "bfloat16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
LARGEST_HALF = 65_504.0
QUANTISATION_VERSION = 2                     # of ggml's block formats; files without blocks have none


@dataclass(frozen=True)
class GGUFReport:
    file: Path
    file_bytes: int
    tensors: int
    notes: tuple[str, ...]
    llama_cpp: str                           # how far llama.cpp's logits are from ours, or why it was not asked
    ollama: str                              # how the Modelfile renders conversations


def export_gguf(model: Decoder, folder: Path, tokenizer: SavedTokenizer, *, name: str, dtype: str = "float16",
                stops: Collection[int] = (), chat_template: str | None = None, render: Render | None = None,
                text: Sequence[int] = ()) -> GGUFReport:
    """Write `folder`/NAME-DTYPE.gguf and a Modelfile. llama.cpp, if it is installed, computes the logits of the tokens `text`.

    `render` is what `chat_template` renders.

    Raises WrongUse where llama.cpp would compute something else than the model, and RunFailed if the disk refuses or the
    written file is not right.
    """
    if importlib.util.find_spec("gguf") is None:
        raise WrongUse("GGUF files need the gguf package, which is not installed; pip install gguf")
    architecture, notes = find_architecture(model.config)
    vocabulary = read_vocabulary(tokenizer, model.config.vocabulary, stops=stops, chat_template=chat_template)
    metadata = {"general.type": "model", "general.name": name, "general.file_type": STORED[dtype][1],
                **({"general.quantization_version": QUANTISATION_VERSION} if dtype == "q8_0" else {}), **vocabulary.metadata(),
                **{f"{architecture.name}.{key}": value for key, value in architecture_metadata(model.config).items()}}
    with new_folder(folder) as building:
        file = building / f"{name}-{STORED[dtype][0]}.gguf"
        write_file(file, model, architecture.name, metadata, dtype)
        tensors = check_tensors(file, ((name, tensor.numpy(), *as_stored(name, tensor, dtype))
                                       for name, tensor in all_tensors(model)))
        check_settings(file, metadata)
        said = ask_llama_cpp(file, model, text, dtype)
        size_bytes = file.stat().st_size
        # llama.cpp puts the beginning of sequence before a prompt by itself
        begins = vocabulary.tokens[vocabulary.special["bos"]] if vocabulary.add_bos else ""
        modelfile, ollama = write_modelfile(file.name, render, stops=[vocabulary.tokens[stop] for stop in stops],
                                            context=metadata[f"{architecture.name}.context_length"], begin_token=begins)
        (building / "Modelfile").write_text(modelfile, encoding="utf-8")
    return GGUFReport(folder / file.name, size_bytes, tensors, (*notes, *vocabulary.notes), said, ollama)


def write_file(file: Path, model: Decoder, architecture: str, metadata: dict[str, Any], dtype: str) -> None:
    """Write the file. Raises OSError if the disk refuses, and WrongUse for a weight that the dtype cannot hold."""
    import gguf

    # the types in which llama.cpp reads settings: counts are uint32, shares and scores float32
    adders = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
    with closing(gguf.GGUFWriter(file, architecture)) as writer:
        for key, value in metadata.items():
            getattr(writer, adders[type(value)])(key, value)
        for name, tensor in all_tensors(model):              # once for the sizes, once for the data: none is kept
            stored, kind = as_stored(name, tensor, dtype)
            writer.add_tensor_info(name, stored.shape, stored.dtype, stored.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in all_tensors(model):
            writer.write_tensor_data(as_stored(name, tensor, dtype)[0])
        writer.flush()


def as_stored(name: str, tensor: Tensor, dtype: str) -> tuple[Any, Any]:
    """Return the bytes of a tensor, and the package's name for their type.

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


# ------------------------------------------------------------------------------------------------ llama.cpp's graphs

Metadata = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's graphs, as far as our families differ in it."""

    name: str
    activations: tuple[str, ...]
    biases: bool | None                  # True: in all linears; None: where the file has them; False: in q, k and v at most
    half_rotation: bool = True           # False: neighbours are rotated, so that q and k lie in another order
    scalings: tuple[str, ...] = ("linear", "yarn")
    part_rotation: bool = False          # may rotate a share of the head


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", ("silu",), None, half_rotation=False, scalings=("linear", "llama3", "yarn")),
    "mistral": Architecture("llama", ("silu",), None, half_rotation=False, scalings=("linear", "llama3", "yarn")),
    "qwen2": Architecture("qwen2", ("silu",), False),
    "qwen3": Architecture("qwen3", ("silu",), False),
    "phi3": Architecture("phi3", ("silu",), False, scalings=("linear", "yarn", "longrope"), part_rotation=True),
    "gemma": Architecture("gemma", ("gelu_tanh",), False),
    "gpt2": Architecture("gpt2", ("gelu_tanh",), True, scalings=()),
    "gpt_neox": Architecture("gptneox", ("gelu", "gelu_tanh"), True, part_rotation=True),
}


def find_architecture(config: ModelConfig) -> tuple[Architecture, tuple[str, ...]]:
    """Return the graph that computes this model, and notes for the user. Raises WrongUse where there is none."""
    found = ARCHITECTURES.get(config.family)
    if found is None:
        raise refusal(config, f"has no {config.family} architecture here")
    if config.activation not in found.activations:
        raise refusal(config, f"computes its {found.name} models with {found.activations[0]} and this one has "
                              f"{config.activation}")
    if found.biases is False and (config.output_bias or config.mlp_bias):
        raise refusal(config, f"has biases in its {found.name} models' q, k and v at most and this one has more")
    if config.family == "gemma" and not config.tied_head:
        raise refusal(config, "ties the head of its gemma models to the embedding and this one's is not")
    if config.rotary_width not in (0, config.head_width) and not found.part_rotation:
        raise refusal(config, f"rotates whole heads in its {found.name} models and this one {config.rotary_share:g} of each")
    scaling = config.rotary_scaling
    if scaling is not None and (scaling.kind not in found.scalings or not scaling.whole_dimensions):
        raise refusal(config, f"does not scale the rotary positions of its {found.name} models by {scaling.kind} in this way")
    return found, tuple(_notes(config))


def refusal(config: ModelConfig, because: str) -> WrongUse:
    return WrongUse(f"this {config.family} model cannot be a GGUF file: llama.cpp {because}; use --to merged, which "
                    "transformers and vLLM open")


def _notes(config: ModelConfig) -> Iterator[str]:
    if config.window is not None and config.window < config.context:
        yield (f"llama.cpp has no sliding window for {config.family}, so the file's context is the window's "
               f"{config.window:,} tokens instead of {config.context:,}: within it both compute the same")
    if config.family == "gpt_neox" and config.activation == "gelu":
        yield "llama.cpp approximates gpt_neox's exact GELU by a tanh, so logits differ in the third digit"
    if config.positions_change_at is not None:
        yield (f"llama.cpp turns positions by longrope's long factors whenever its context is set above "
               f"{config.positions_change_at:,} tokens, however short the text")


def architecture_metadata(config: ModelConfig) -> Metadata:
    """Return the settings of the graph, under llama.cpp's keys without the architecture's prefix."""
    norm = "layer_norm_rms_epsilon" if config.norm == "rms" else "layer_norm_epsilon"
    found: Metadata = {
        "vocab_size": config.vocabulary, "context_length": min(config.context, config.window or config.context),
        "embedding_length": config.width, "block_count": config.layers, "feed_forward_length": config.mlp_width,
        "attention.head_count": config.heads, "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_width, "attention.value_length": config.head_width,
        f"attention.{norm}": float(config.norm_epsilon)}
    if config.rotary_width:
        found |= {"rope.dimension_count": config.rotary_width, "rope.freq_base": float(config.rotary_base)}
    if config.family == "gpt_neox":
        found["use_parallel_residual"] = config.parallel_residual
    return found | (scaling_metadata(config.rotary_scaling) if config.rotary_scaling else {})


def scaling_metadata(scaling: RotaryScaling) -> Metadata:
    """Return the settings of scaled positions; llama3's factors are a tensor, longrope's are two tensors."""
    if scaling.kind == "llama3":
        return {}
    if scaling.kind == "longrope":
        return {"rope.scaling.original_context_length": scaling.original_context,
                "rope.scaling.attn_factor": scaling.attention_factor}
    found: Metadata = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "yarn":
        sharpened = 1 + 0.1 * math.log(max(scaling.factor, 1))      # what llama.cpp does by itself, as the paper has it
        found |= {"rope.scaling.original_context_length": scaling.original_context,
                  "rope.scaling.attn_factor": scaling.attention_factor / sharpened,
                  "rope.scaling.yarn_beta_fast": scaling.fast_turns, "rope.scaling.yarn_beta_slow": scaling.slow_turns}
    return found


def extra_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Return rotary factors, each (rotary width / 2,) fp32: the divisors of the pairs' frequencies."""
    scaling = config.rotary_scaling
    if scaling is None:
        return {}
    if scaling.kind == "llama3":
        plain = inverse_frequencies(replace(config, rotary_scaling=None))
        return {"rope_freqs.weight": plain / inverse_frequencies(config)}
    if scaling.kind == "longrope":
        return {"rope_factors_long.weight": torch.tensor(scaling.long_factors),
                "rope_factors_short.weight": torch.tensor(scaling.short_factors)}
    return {}


def all_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the file with llama.cpp's name, fp32 on the CPU, made when it is asked for."""
    import gguf

    config, state = model.config, dict(model.named_parameters())
    yield from extra_tensors(config).items()
    architecture = ARCHITECTURES[config.family]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, config.layers)
    for row in map_weights(config):
        # gpt2 without biases: the graph adds zeros
        ours = state[row.ours].detach().float().cpu() if row.ours in state else \
            torch.zeros(state[row.ours.removesuffix("bias") + "weight"].shape[0])
        parts = ours.split(row.sizes) if row.sizes else (ours,) * len(row.theirs)  # type: ignore[no-untyped-call]
        for theirs, tensor in zip(row.theirs, parts, strict=True):
            name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert name is not None, theirs
            if not architecture.half_rotation and (".attn_q." in name or ".attn_k." in name):
                heads = config.heads if ".attn_q." in name else config.kv_heads
                # (head, half, dimension) -> (head, dimension, half)
                tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            yield name, (tensor + 1 if config.norm_offset and name.endswith("norm.weight") else tensor).contiguous()
    if config.family == "gpt_neox" and config.tied_head:
        yield "output.weight", state["embedding.weight"].detach().float().cpu().contiguous()
