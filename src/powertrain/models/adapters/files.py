"""A trained model's files, and adapters': PEFT's `adapter_config.json` and `adapter_model.safetensors`, written and read.

Names and layouts are Hugging Face's, so PEFT puts what is written here on the transformers model, and what PEFT wrote is put
on ours. Kinds that PEFT does not have are in the same two files under a type of their own, such as LSLORA. Nothing is
unpickled. What a file asks for and is not computed here is refused, not passed over.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.models.adapters.attached import adapter_config, adapters_of, add_adapters, has_adapters
from powertrain.models.adapters.targets import KINDS, AdapterConfig, Slot, find_slots, find_targets
from powertrain.models.bridge.model import BridgedModel
from powertrain.models.config import ModelConfig
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.families import REWARD_HEAD
from powertrain.models.huggingface.folder import Shards, rearrange, save_folder, save_tensors
from powertrain.models.huggingface.hub import ADAPTER_CONFIG as CONFIG
from powertrain.models.huggingface.hub import ADAPTER_WEIGHTS as WEIGHTS
from powertrain.models.huggingface.hub import adapter_weights, read_adapter_json
from powertrain.models.model import Model, SavedTokenizer
from powertrain.records import WrongUse
from powertrain.records.json_files import read_json, write_json

PREFIX = "base_model.model."
SCORES = "SEQ_CLS"                           # PEFT's task type of a reward model
HEAD = PREFIX + REWARD_HEAD                  # which PEFT trains and saves whole, beside the adapters
BY_ROW = ("lora_B.weight", "lora_magnitude_vector")          # tensors with one row for each row of the module's output

# keys of adapter_config.json that are read, and those that change nothing once the weights are there
READ = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "sigma", "regularisation",
        "bias", "init_lora_weights")
HARMLESS = ("base_model_name_or_path", "revision", "task_type", "inference_mode", "fan_in_fan_out", "auto_mapping",
            "peft_version", "layers_to_transform", "layers_pattern", "exclude_modules", "loftq_config", "eva_config",
            "corda_config", "lora_ga_config", "megatron_core", "runtime_config", "ensure_weight_tying", "note")
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")      # the others change the base's weights as well


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


def save_adapter(model: Decoder, folder: Path, *, base: str, tokenizer: SavedTokenizer | None = None) -> None:
    """Write the adapters of `model`; `base` is the folder or hub id that they belong on.

    Raises WrongUse if there are none, OSError if the folder cannot be written.
    """
    config = adapter_config(model)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for slot, adapter in adapters_of(model):
        order = row_order(slot, model.config)
        for name, parameter in adapter.tensors().items():
            tensor = parameter.detach().cpu()
            tensors[f"{PREFIX}{slot.theirs}.{name}"] = (tensor[order] if name in BY_ROW else tensor).contiguous()
    if model.config.rewards:
        tensors[HEAD] = model.head_weight.detach().cpu()
    save_tensors(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, describe(config, model.config, base))
    if tokenizer is not None:
        tokenizer.save(folder)


def row_order(slot: Slot, config: ModelConfig) -> Tensor:
    """Return which of our rows each row of Hugging Face's module is: (rows,) int64.

    Where a base is stored transposed that changes nothing: PEFT's A and B are not.
    """
    return rearrange(torch.arange(slot.last - slot.first), slot.layout, config)


def describe(config: AdapterConfig, base_config: ModelConfig, base: str) -> dict[str, Any]:
    """Return what adapter_config.json holds: module names in place of `all-linear`, which some readers do not know."""
    targets = config.target_modules
    if not isinstance(targets, tuple):
        slots = find_targets(base_config, targets)
        names = {slot.name for slot in slots}
        targets = tuple(names) if set(slots) == set(find_targets(base_config, tuple(names))) else tuple(s.theirs for s in slots)
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    described = {"peft_type": config.kind.upper(), "task_type": SCORES if base_config.rewards else "CAUSAL_LM",
                 "base_model_name_or_path": base, "revision": None, "inference_mode": True, "r": config.r, "lora_alpha": alpha,
                 "lora_dropout": config.dropout, "target_modules": sorted(targets), "bias": "none",
                 "fan_in_fan_out": base_config.family == "gpt2",
                 "use_rslora": config.use_rslora, "use_dora": config.use_dora, "init_lora_weights": True,
                 "modules_to_save": ["score"] if base_config.rewards else None}
    if config.kind != "lora":
        described |= {"sigma": config.sigma, "regularisation": config.regularisation,
                      "note": "a kind of adapter that PEFT does not have; powertrain loads it"}
    return described


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return the config of the adapters in `folder`. Raises WrongUse for missing or damaged files and unsupported adapters."""
    given = read_adapter_json(folder)
    refuse_unsupported(folder / CONFIG, given)
    weights = adapter_weights(folder)
    try:
        return AdapterConfig(
            kind=given["peft_type"].lower(), r=given["r"], alpha=float(given["lora_alpha"]),
            dropout=float(given.get("lora_dropout") or 0), target_modules=read_targets(given, by_module(weights)),
            use_rslora=bool(given.get("use_rslora")), use_dora=bool(given.get("use_dora")),
            sigma=float(given.get("sigma") or 1), regularisation=float(given.get("regularisation") or 0))
    except (KeyError, TypeError) as error:
        raise WrongUse(f"{folder / CONFIG} is not an adapter's ({type(error).__name__}: {error}); save the adapter anew with "
                       f"PEFT or powertrain") from error


def read_targets(given: Mapping[str, Any], modules: Iterable[str]) -> str | tuple[str, ...]:
    """Return the given targets that match a module; or the modules' full names, if targets matched only some layers."""
    targets = given["target_modules"]
    if given.get("layers_to_transform") is not None or given.get("exclude_modules"):
        return tuple(sorted(modules))
    if isinstance(targets, str):
        return targets
    return tuple(sorted(name for name in targets if any(f".{module}".endswith(f".{name}") for module in modules)))


def refuse_unsupported(file: Path, given: Mapping[str, Any]) -> None:
    """Raise WrongUse for anything in the file that would change what the adapters compute."""
    cure = "load it with model.provider=transformers"
    types = [kind.upper() for kind in KINDS]
    if given.get("peft_type") not in types:
        raise WrongUse(f"{file} describes an adapter of type {given.get('peft_type')!r}; the decoder has "
                       f"{', '.join(types)}, so {cure}")
    if given.get("bias", "none") != "none":
        raise WrongUse(f"{file} trains biases as well (bias={given['bias']!r}), and the decoder's adapters are matrices only; "
                       f"{cure}")
    start = given.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise WrongUse(f"{file} says init_lora_weights={start!r}, which changes the base's weights too; convert it with PEFT's "
                       f"save_pretrained(path_initial_model_for_weight_conversion=...), or {cure}")
    for key, value in given.items():
        if key == "modules_to_save" and given.get("task_type") == SCORES and {*(value or ())} <= {"score", "classifier"}:
            continue
        # a number on its own, such as qalora_group_size, is the setting of something that a switch beside it turns on
        is_asked = value is True or (value and not isinstance(value, (int, float)))
        if is_asked and key not in (*READ, *HARMLESS):
            raise WrongUse(f"{file} asks for {key}={value!r}, which the decoder's adapters do not have; {cure}")


def load_adapter(model: Decoder, folder: Path) -> AdapterConfig:
    """Put the adapters in `folder` on the model, ready to train further. Draws no random numbers.

    Raises WrongUse for missing or damaged files, what is not supported, and adapters of another base.
    """
    config = read_adapter_config(folder)
    tensors = by_module(folder / WEIGHTS)
    if not model.config.rewards and HEAD in Shards([folder / WEIGHTS]):
        raise WrongUse(f"the adapter in {folder} is a reward model's, whose head scores texts; use it with objective=reward")
    origin = read_json(folder / CONFIG).get("base_model_name_or_path")
    refuse_other_base(model.config, tensors, config, f"{folder}" + (f", made for {origin}," if origin else ""))
    with torch.random.fork_rng(devices=[]):
        add_adapters(model, config)
    for slot, adapter in adapters_of(model):
        fill(adapter.tensors(), tensors[slot.theirs], slot, model.config, folder / WEIGHTS)
    if HEAD in (stored := Shards([folder / WEIGHTS])):
        with torch.no_grad():
            model.head_weight.copy_(stored.read(HEAD))
    return config


def by_module(file: Path) -> dict[str, dict[str, Tensor]]:
    """Return module -> end of the tensor's name -> tensor. Raises WrongUse for a damaged file and for other tensors."""
    stored = Shards([file])
    modules: dict[str, dict[str, Tensor]] = {}
    for key in stored:
        if key == HEAD:
            continue
        module, found, name = key.removeprefix(PREFIX).partition(".lora_")
        if not found or not key.startswith(PREFIX):
            raise WrongUse(f"{file} holds {key}, which is no part of a LoRA adapter; load it with model.provider=transformers")
        modules.setdefault(module, {})[f"lora_{name}"] = stored.read(key)
    return modules


def refuse_other_base(model_config: ModelConfig, tensors: Mapping[str, Mapping[str, Tensor]], config: AdapterConfig,
                      who: str) -> None:
    """Raise WrongUse, naming what differs, if the adapters do not fit a model of this config."""
    slots = {slot.theirs for slot in find_slots(model_config)}
    this = f"this {model_config.family} of {model_config.layers} layers"
    if lacking := [name for name in tensors if name not in slots]:
        more = f" and {len(lacking) - 1} more modules" if len(lacking) > 1 else ""
        first = min(lacking, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(6), name))
        raise WrongUse(f"the adapter in {who} belongs to another base: it adapts {first}{more}, which {this} does not "
                       f"have; load the base that it was trained on")
    named = {slot.theirs: slot for slot in find_targets(model_config, config.target_modules)}
    if unnamed := [name for name in tensors if name not in named]:
        raise WrongUse(f"the adapter in {who} has weights for {unnamed[0]}, which its {CONFIG} does not name; check that both "
                       f"come from the same adapter")
    if unfilled := [name for name in named if name not in tensors]:
        raise WrongUse(f"the adapter in {who} belongs to another base: {this} has {unfilled[0]} too, which its {CONFIG} "
                       f"names and its {WEIGHTS} does not hold; load the base that it was trained on")
    for name, slot in named.items():
        a, b = tensors[name].get("lora_A.weight"), tensors[name].get("lora_B.weight")
        if a is None or b is None or a.dim() != 2 or b.dim() != 2:
            raise WrongUse(f"the adapter in {who} lacks one of the two matrices of {name}; copy or save it again")
        theirs, ours = (b.shape[0], a.shape[1]), (slot.last - slot.first, slot.in_features)
        if theirs != ours:
            raise WrongUse(f"the adapter in {who} belongs to another base: its {name} is {theirs[0]} x {theirs[1]}, and in "
                           f"{this} it is {ours[0]} x {ours[1]}; load the base that it was trained on")
        if a.shape[0] != config.r or b.shape[1] != config.r:
            raise WrongUse(f"the adapter in {who} has r={a.shape[0]} in {name} and r={config.r} in its {CONFIG}; one r for all "
                           f"modules is supported, so load it with model.provider=transformers")


@torch.no_grad()
def fill(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], slot: Slot, config: ModelConfig,
         file: Path) -> None:
    """Copy the file's tensors into one adapter. Raises WrongUse if they are not the ones it has."""
    found, wanted = ({name: tuple(tensor.shape) for name, tensor in sorted(some.items())} for some in (tensors, parameters))
    if found != wanted:
        raise WrongUse(f"{file} has {found} for {slot.theirs}, and its {CONFIG} makes them {wanted}; check that both come from "
                       f"the same adapter")
    order = row_order(slot, config).to(next(iter(parameters.values())).device)
    for name, parameter in parameters.items():
        given = tensors[name].to(parameter)
        if name in BY_ROW:
            parameter[order] = given
        else:
            parameter.copy_(given)
