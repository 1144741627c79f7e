"""Adapters on a model of transformers: PEFT's own, put on, taken up again from a folder, written and merged."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.huggingface.folder import Shards, save_tensors
from powertrain.models.huggingface.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_weights, read_adapter_json
from powertrain.models.kernels.quantised import load_library
from powertrain.records import WrongUse
from powertrain.records.errors import first_line

TASK_TYPES = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "span": "QUESTION_ANS"}
ALL_LINEAR, NATIVE_ONLY = "all-linear", "LSLORA"
QA_HEAD = "qa_outputs"                       # what PEFT trains and saves by itself in a model for spans


def load_peft() -> Any:
    """Return the module peft. Raises WrongUse if it is not installed."""
    return load_library("peft", "adapters on a model of transformers need", "pip install peft, or use method=full")


def put_adapters(network: Any, config: AdapterConfig, task: str) -> nn.Module:
    """Return the model with new adapters; only these are trained, and in a model for spans also the head that answers.

    Draws from torch's global generator. Raises WrongUse for kinds and modules that are not here.
    """
    peft = load_peft()
    if config.kind != "lora":
        raise WrongUse(f"lora.kind={config.kind} was asked for, which only the native decoder computes, and this model is "
                       "computed by transformers; use lora.kind=lora")
    head = head_names(network) if task == "span" else []
    has_transposed = any(is_linear(module) and not isinstance(module, nn.Linear) for module in network.modules())
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    wanted = peft.LoraConfig(
        task_type=TASK_TYPES[task], r=config.r, lora_alpha=alpha, lora_dropout=config.dropout, bias="none",
        target_modules=find_targets(network, config.target_modules, head), use_rslora=config.use_rslora,
        use_dora=config.use_dora, fan_in_fan_out=has_transposed,
        modules_to_save=None if head == [QA_HEAD] or not head else head)
    try:
        return _wrapped(network, wanted)
    except ValueError as error:              # such as modules whose weights the model's kernels read past the adapter
        raise WrongUse(f"peft puts no such adapters on {network.config.model_type} ({first_line(error)}); name other modules "
                       "with lora.target_modules") from error


def _wrapped(network: Any, config: Any) -> nn.Module:
    with warnings.catch_warnings():
        # where a model has both kinds of linear, PEFT corrects the flag for each and says so
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")       # PEFT asks for it
        wrapped: nn.Module = load_peft().get_peft_model(network, config)
    return wrapped


def head_names(network: Any) -> list[str]:
    """Return the names of the modules that a model for spans adds to its base; nobody has trained these yet."""
    if not hasattr(network, network.base_model_prefix):
        return [QA_HEAD]
    return [name for name, module in network.named_children()
            if name != network.base_model_prefix and any(True for _ in module.parameters())]


def find_targets(network: Any, wanted: str | tuple[str, ...], head: list[str]) -> str | list[str]:
    """Return the modules that PEFT adapts, without the head. Raises WrongUse for a name that no module has: PEFT ignores it."""
    output, modules = network.get_output_embeddings(), [name for name, _ in network.named_modules()]
    linears = [name for name, module in network.named_modules() if is_linear(module)
               and module is not output and name.partition(".")[0] not in head]
    short = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    if wanted == ALL_LINEAR:                 # short names, where they name these modules and no other
        meant = {name for name in modules if name and name.rpartition(".")[2] in short}
        return sorted(short) if meant == set(linears) else linears
    is_pattern = isinstance(wanted, str) and not re.fullmatch(r"[\w.]+", wanted)
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if not any(re.fullmatch(name, module) if is_pattern else f".{module}".endswith(f".{name}") for module in modules):
            raise WrongUse(f"{network.config.model_type} has no module {name!r} that can have an adapter; its modules are "
                           f"{', '.join(short)}, and {ALL_LINEAR} is all of them")
    return names[0] if is_pattern else names


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is a linear, or one of GPT-2's, which hold their weight the other way round."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


# ------------------------------------------------------------------------------------------------ files


def read_peft_config(folder: Path, task: str) -> Any:
    """Return PEFT's config of the adapter in `folder`. Raises WrongUse if it is no adapter, or not supported by the bridge."""
    peft = load_peft()
    given = read_adapter_json(folder)
    if given.get("peft_type") == NATIVE_ONLY:
        raise WrongUse(f"{folder} holds an LS-LoRA adapter, which only the native decoder computes; use it with its own base")
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except (KeyError, TypeError, ValueError) as error:
        raise WrongUse(f"{folder / ADAPTER_CONFIG} is not an adapter's that peft {peft.__version__} reads "
                       f"({type(error).__name__}: {error}); save the adapter anew with PEFT or powertrain") from error
    if config.is_prompt_learning:
        raise WrongUse(f"{folder} holds an adapter of type {given['peft_type']}, which learns tokens and not weights; "
                       "powertrain trains adapters in the model's modules, such as LORA")
    if config.task_type not in (None, TASK_TYPES[task]):
        raise WrongUse(f"the adapter in {folder} is for {config.task_type}, and the task here is {task}, which is "
                       f"{TASK_TYPES[task]}; use a model for its task, or another adapter")
    config.task_type, config.inference_mode = TASK_TYPES[task], False
    config.base_model_name_or_path = None    # PEFT fills in where the base is now, and would warn of another name
    return config


def wrap_saved(network: Any, folder: Path, task: str) -> nn.Module:
    """Return the model with an adapter like the one in `folder`, not filled yet. Draws no random numbers.

    Raises WrongUse for missing files and for an adapter whose modules the model does not have.
    """
    config = read_peft_config(folder, task)
    try:
        with torch.random.fork_rng(devices=[]):
            return _wrapped(network, config)
    except ValueError as error:
        raise WrongUse(f"the adapter in {folder} belongs to another base ({first_line(error)}); load the base that it was "
                       "trained on") from error


def continue_adapter(network: Any, folder: Path, task: str) -> nn.Module:
    """Return the model with the adapter of `folder` on it, to be trained further. Draws no random numbers.

    Raises WrongUse for missing files and for an adapter of another base, naming what differs.
    """
    wrapped, stored = wrap_saved(network, folder, task), Shards([adapter_weights(folder)])
    tensors = {name: stored.read(name) for name in stored}
    refuse_other_base(adapter_tensors(wrapped), tensors, folder)
    load_peft().set_peft_model_state_dict(wrapped, tensors)
    return wrapped


def refuse_other_base(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], folder: Path) -> None:
    """Raise WrongUse, naming what differs, if the adapter in `folder` was made for a model of another shape."""
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            where = "which this base has no place for" if name in theirs else "which it lacks and this base needs"
            raise WrongUse(f"the adapter in {folder} belongs to another base: {name}, {where}; load the base that it was "
                           "trained on")
        if ours[name].shape != theirs[name].shape:
            raise WrongUse(f"the adapter in {folder} belongs to another base: its {name} is {tuple(theirs[name].shape)}, and "
                           f"here it is {tuple(ours[name].shape)}; load the base that it was trained on")


def adapter_tensors(library: Any) -> dict[str, Tensor]:
    """Return the tensors of an adapter's file, under PEFT's names; for a model for spans they include its head."""
    found: dict[str, Tensor] = load_peft().get_peft_model_state_dict(library, save_embedding_layers=False)
    return found


def save_adapter_files(library: Any, folder: Path, *, base: str) -> None:
    """Write PEFT's two files. Raises OSError."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in adapter_tensors(library).items()}
    save_tensors(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = library.peft_config["default"]
    was, config.inference_mode = config.inference_mode, True
    config.base_model_name_or_path = base or config.base_model_name_or_path
    try:
        config.save_pretrained(str(folder))
    finally:
        config.inference_mode = was
