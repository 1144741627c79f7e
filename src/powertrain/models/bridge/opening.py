"""A model of transformers from its folder: what may run, what is filled in, and what is wrong with it, said before training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from powertrain.models.bridge.adapters import first_line, head_names
from powertrain.models.bridge.model import quietly
from powertrain.models.huggingface.hub import weight_files
from powertrain.models.huggingface.providers import AUTO_CLASSES
from powertrain.records import WrongUse
from powertrain.shapes import QUANTISED_BLOCK

COMMIT = re.compile(r"[0-9a-f]{40}")         # a full hash names one content for ever; a branch or a tag may be moved
DROPOUT_FIELD = re.compile(r"dropout|layerdrop|pdrop$|_drop$|drop_rate$")
PROBED_TOKENS = 6


def remote_code(folder: Path, config: Mapping[str, Any], trusted: bool, revision: str | None) -> dict[str, Any]:
    """What is handed to transformers about Python that comes with a model.

    Raises WrongUse where the model needs such code and nobody allowed it, and where it is allowed without being pinned.
    """
    named = {str(value) for value in (config.get("auto_map") or {}).values() if isinstance(value, str)}
    if not trusted:
        if named and not _is_known(config):
            raise WrongUse(f"transformers has no model of type {config.get('model_type')!r}, and {folder} would have it run "
                           f"its own Python ({', '.join(sorted(named))}); read that code, then allow it with "
                           "model.trust_remote_code=true model.revision=<the 40 digits of its commit>")
        return {"trust_remote_code": False}
    if revision is None or not COMMIT.fullmatch(revision):
        raise WrongUse(f"model.trust_remote_code=true runs Python that comes with {folder} "
                       f"({', '.join(sorted(named)) or 'none is named'}), and model.revision={revision} may stand for other "
                       "code tomorrow; name the commit by all its 40 hexadecimal digits")
    if elsewhere := sorted(name for name in named if "--" in name):
        raise WrongUse(f"{folder} runs Python of another repository ({', '.join(elsewhere)}), which model.revision={revision} "
                       "does not pin; put that code beside the weights and name it without the repository in config.json")
    return {"trust_remote_code": trusted, "code_revision": revision}


def _is_known(config: Mapping[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return config.get("model_type") in CONFIG_MAPPING


def refuse_quantised(folder: Path, config: Mapping[str, Any], method: str) -> None:
    """Raises WrongUse for a quantised base that is to be trained in full, or to be quantised once more."""
    stored = config.get("quantization_config")
    if stored and method in ("full", "qlora"):
        kind = stored.get("quant_method", "some way") if isinstance(stored, Mapping) else stored
        cure = "use method=lora, which trains adapters beside it" if method == "qlora" else \
            "use method=lora, or the unquantised model that it was made from"
        raise WrongUse(f"method={method} was asked for, and the weights in {folder} are quantised already ({kind}); {cure}")


# ------------------------------------------------------------------------------------------------ opening


def open_network(folder: Path, task: str, dropout: float, four_bits: tuple[str, bool] | None, code: Mapping[str, Any]) -> Any:
    """transformers' model, its weights in fp32, those of its blocks in 4 bits if that is asked for: (type, double).

    Raises WrongUse for files that are missing, damaged or pickled, and for weights that are missing, left over or of
    another shape; only a head for spans may be new, and then it is drawn with torch's global generator.
    """
    for file in weight_files(folder):
        if not file.exists():
            raise WrongUse(f"there is no {file}, which the folder's index names; the download may be incomplete")
    with quietly(), library_errors(folder):
        settings = _settings(folder, task, dropout, code)
        more = {} if four_bits is None else {"quantization_config": _four_bits(*four_bits)}
        network, notes = _auto_class(task).from_pretrained(
            folder, config=settings, dtype=torch.float32, local_files_only=True, use_safetensors=True,
            ignore_mismatched_sizes=True, output_loading_info=True, **more, **code)
    refuse_other_weights(network, notes, folder, task)
    silence_dropout(network, dropout)
    if four_bits is not None:
        _settle_four_bits(network, folder)
    return network.train()


def open_empty(folder: Path, task: str, dropout: float, code: Mapping[str, Any]) -> Any:
    """The same model without weights, on torch's meta device, where nothing is drawn."""
    pinned = {key: value for key, value in code.items() if key == "trust_remote_code"}
    with torch.device("meta"), quietly(), library_errors(folder):
        return _auto_class(task).from_config(_settings(folder, task, dropout, code), **pinned)


def _auto_class(task: str) -> Any:
    import transformers

    return getattr(transformers, AUTO_CLASSES[task])


def _settings(folder: Path, task: str, dropout: float, code: Mapping[str, Any]) -> Any:
    """The folder's config with the recipe's dropout, and for spans with the two scores of a place."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, **code)
    set_dropout(config, dropout)
    if task == "span":
        config.num_labels = 2
    return config


def set_dropout(config: Any, dropout: float) -> None:
    """Every share that the config drops becomes `dropout`, and no whole layers are dropped. Parts have configs of their own."""
    for name, value in list(vars(config).items()):
        if DROPOUT_FIELD.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, name, 0.0 if "layerdrop" in name else dropout)
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            set_dropout(part, dropout)


def silence_dropout(network: nn.Module, dropout: float) -> None:
    """Where nothing is to be dropped, also what a model drops without asking its config."""
    for module in network.modules():
        if dropout == 0 and isinstance(module, nn.Dropout):
            module.p = 0.0


@contextmanager
def library_errors(folder: Path) -> Iterator[None]:
    """What transformers raises for a folder that it cannot load, as one sentence."""
    try:
        yield
    except WrongUse:
        raise
    except SafetensorError as error:
        raise WrongUse(f"the weights in {folder} are damaged ({error}); copy or download them again") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError, RuntimeError) as error:
        raise WrongUse(f"transformers cannot load the model in {folder} ({type(error).__name__}: {first_line(error)}); check "
                       "that its files come from one model, and what else it needs installed") from error


# ------------------------------------------------------------------------------------------------ checks


def refuse_other_weights(network: Any, notes: Mapping[str, Any], folder: Path, task: str) -> None:
    """Raises WrongUse for weights that are missing, left over or of another shape. A span head may be new, others dropped."""
    if mismatched := sorted(notes["mismatched_keys"]):
        name, theirs, ours = mismatched[0]
        raise WrongUse(f"{name} is {tuple(theirs)} in {folder}, and its config.json makes it {tuple(ours)}; check that both "
                       "come from the same model")
    heads = tuple(f"{name}." for name in head_names(network)) if task == "span" else ()
    missing = sorted(name for name in notes["missing_keys"] if not name.startswith(heads or ("\0",)))
    if missing:
        raise WrongUse(f"{folder} lacks {len(missing)} weights of {type(network).__name__}, {missing[0]} the first; it may be "
                       "incomplete, or hold a model for another task")
    left = sorted(name for name in notes["unexpected_keys"] if task != "span")
    if left:
        raise WrongUse(f"{type(network).__name__} has no place for {len(left)} weights of {folder}, {left[0]} the first; check "
                       "that config.json and weights come from the same model")


@torch.no_grad()
def refuse_looking_ahead(network: Any, folder: Path) -> None:
    """Raises WrongUse for a model whose score of a token moves with the tokens after it: it would read what it is to predict.

    Tried, because config.json need not say it: an encoder loaded as a decoder trains without a complaint.
    """
    vocabulary = network.get_input_embeddings().num_embeddings
    tokens = torch.arange(1, PROBED_TOKENS + 1, device=network.device)[None] % vocabulary
    changed = tokens.clone()
    changed[0, -1] = 0
    network.eval()
    first, second = (network(input_ids=ids).logits[0, :-1].float() for ids in (tokens, changed))
    network.train()
    if not torch.allclose(first, second, atol=1e-4, rtol=1e-4):
        raise WrongUse(f"{type(network).__name__} in {folder} sees the tokens that it is to predict, so it would learn "
                       "nothing; use a decoder, or train this one for model.task=span")


# ------------------------------------------------------------------------------------------------ 4 bits


def _four_bits(kind: str, double: bool) -> Any:
    """bitsandbytes' settings; its products are computed in the best type of the device (fp32 on a CPU)."""
    from powertrain.models.kernels.quantised import load_bitsandbytes

    load_bitsandbytes()
    from transformers import BitsAndBytesConfig

    dtype = torch.float32
    if torch.cuda.is_available():
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(0) >= (8, 0) else torch.float16
    make: Any = BitsAndBytesConfig
    return make(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=dtype)


def _settle_four_bits(network: Any, folder: Path) -> None:
    """Keeps the 4-bit linears' products as asked: bitsandbytes changes their dtype at the first pass, and on some CPUs
    repacks the weights for bf16 at the first evaluation, after which training goes on in bf16 as well.

    Raises WrongUse on a CPU for widths that its kernel unpacks wrongly (bitsandbytes 0.50: it looks for scales row by row).
    """
    from bitsandbytes.nn.modules import Linear4bit

    linears = {name: module for name, module in network.named_modules() if isinstance(module, Linear4bit)}
    if not linears:
        raise WrongUse(f"bitsandbytes found no linear to quantise in {folder}; use method=lora")
    for name, module in linears.items():
        module.compute_type_is_set, module.support_avx512bf16_for_cpu = True, False
        if not torch.cuda.is_available() and module.in_features % QUANTISED_BLOCK:
            raise WrongUse(f"{name} in {folder} is {module.in_features} wide, which bitsandbytes unpacks wrongly on a CPU "
                           f"unless it is a multiple of {QUANTISED_BLOCK}; use method=lora, or a CUDA GPU")
