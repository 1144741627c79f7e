"""Training a pretrained model: examples instead of text, and weights that are there already, whole or beside adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.data.collate import collate, collate_padded
from powertrain.data.examples.store import ExampleStore
from powertrain.facts.data import example_facts
from powertrain.facts.model import model_facts
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.huggingface.hub import read_config
from powertrain.models.huggingface.providers import availability
from powertrain.recipe import Recipe, Resolved
from powertrain.records import ModelFacts, Software, WrongUse
from powertrain.run.base import Base, find_base
from powertrain.run.examples import examples_for, max_length
from powertrain.run.material import Material

if TYPE_CHECKING:
    from powertrain.models.model import Model

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
SHAPE_KEYS = ("family", "layers", "width", "heads", "kv_heads", "mlp_width", "context", "vocabulary", "activation", "tied_head")


def pretrained_material(resolved: Resolved, software: Software, cache: Path, say: Callable[[str], None]) -> Material:
    """Raises WrongUse for whatever cannot be trained."""
    base = find_base(resolved.recipe, software)
    say(f"{resolved.recipe.model.path}: {base.choice.because}")
    adapters = _adapters(resolved.recipe, base)
    facts = _model_facts(resolved.recipe, base, adapters)
    store = examples_for(resolved.recipe, base, cache, say)
    _check_vocabulary(store, facts)
    resolved = resolved.with_planned(_derived(resolved, base, facts, adapters))
    recipe = resolved.recipe
    padded = base.choice.task == "causal" and base.is_native
    return Material(
        resolved, facts, example_facts(store, train_batch_size=recipe.train_batch_size),
        training=store.training, held_out=store.validation, collate=collate_padded if padded else collate,
        tokenizer=store.tokenizer, build=partial(_build, recipe, base, adapters), said=store.said,
        providers=availability(base.config, base.choice.task, software), as_prompt=store.as_prompt)


def _adapters(recipe: Recipe, base: Base) -> AdapterConfig | None:
    """The adapters to train: new ones, or those of the folder that the recipe names. On the bridge PEFT reads its own."""
    if recipe.method == "full":
        if recipe.model.adapter is not None:
            raise WrongUse(f"method=full trains the model's own weights, and model.adapter={recipe.model.adapter} names an "
                           "adapter; merge it first (powertrain export --to merged), or use method=lora")
        return None
    if recipe.model.adapter is not None:
        from powertrain.models.adapters.files import read_adapter_config

        return read_adapter_config(Path(recipe.model.adapter)) if base.is_native else None
    wanted = recipe.lora.model_dump()
    targets = wanted["target_modules"]
    return AdapterConfig(**{**wanted, "target_modules": targets if isinstance(targets, str) else tuple(targets)})


def _model_facts(recipe: Recipe, base: Base, adapters: AdapterConfig | None) -> ModelFacts:
    if not base.is_native:
        from powertrain.models.bridge.loading import bridged_facts

        return bridged_facts(base.folder, adapters=adapters, provider=base.choice.provider, path=base.name,
                             **_bridge_options(recipe, base))
    stored = "fp32" if recipe.method == "full" else DTYPES.get(str(base.config.get("dtype") or base.config.get("torch_dtype")),
                                                              "fp32")
    return model_facts(read_config(base.folder, recipe.model.dropout), method=recipe.method, path=base.name, adapters=adapters,
                       frozen_dtype=recipe.quantisation.type if recipe.method == "qlora" else stored,
                       unquantised_dtype=stored if recipe.method == "qlora" else "")


def _bridge_options(recipe: Recipe, base: Base) -> dict[str, Any]:
    """What the bridge is told of a recipe, to count a model or to load it."""
    return {"task": base.choice.task, "method": recipe.method, "dropout": recipe.model.dropout,
            "quantisation": (recipe.quantisation.type, recipe.quantisation.double) if recipe.method == "qlora" else None,
            "adapter_folder": Path(recipe.model.adapter) if recipe.model.adapter else None,
            "trust_remote_code": recipe.model.trust_remote_code, "revision": recipe.model.revision}


def _check_vocabulary(store: ExampleStore, facts: ModelFacts) -> None:
    tokens = store.tokenizer.vocabulary
    if tokens > facts.vocabulary:
        raise WrongUse(f"the tokenizer has {tokens:,} tokens and the model's embedding {facts.vocabulary:,} rows, too few by "
                       f"{tokens - facts.vocabulary:,}; use the model's own (data.tokenizer=FOLDER)")


def _derived(resolved: Resolved, base: Base, facts: ModelFacts, adapters: AdapterConfig | None) -> dict[str, tuple[Any, str]]:
    """What the model's folder and data decided. Raises WrongUse for a shape that was asked for and is another."""
    recipe, found = resolved.recipe, f"{base.name}/config.json"
    derived: dict[str, tuple[Any, str]] = {}
    if base.is_native:
        config = read_config(base.folder, recipe.model.dropout)
        shape: dict[str, Any] = {key: getattr(config, key) for key in SHAPE_KEYS}
    else:
        shape = {"family": facts.family, "layers": facts.layers, "width": facts.width}
    for key, value in shape.items():
        asked = resolved.origin(f"model.{key}")
        if not asked.is_default and getattr(recipe.model, key) not in (None, value):
            raise WrongUse(f"model.{key}={getattr(recipe.model, key)} was asked for ({asked}), and {recipe.model.path} has "
                           f"{value}; leave it out")
        derived[f"model.{key}"] = (value, found)
    derived["model.path"] = (base.name, "where it was found")
    derived["model.provider"] = (base.choice.provider, base.choice.because)
    derived["model.task"] = (base.choice.task, "config.json")
    derived["data.max_length"] = (max_length(recipe, base), "what the model can read, at most 2048")
    if adapters is not None and recipe.model.adapter is not None:
        targets = adapters.target_modules
        values = {**adapters.__dict__, "target_modules": targets if isinstance(targets, str) else list(targets)}
        derived |= {f"lora.{key}": (value, f"{recipe.model.adapter}/adapter_config.json") for key, value in values.items()
                    if key in type(recipe.lora).model_fields}
    return {key: (value, reason) for key, (value, reason) in derived.items() if _is_open(resolved, key, value)}


def _is_open(resolved: Resolved, key: str, value: Any) -> bool:
    """Whether the value is news: what a recipe says already keeps its own origin."""
    section, _, leaf = key.partition(".")
    return bool(getattr(getattr(resolved.recipe, section), leaf) != value)


def _build(recipe: Recipe, base: Base, adapters: AdapterConfig | None) -> Model:
    """Load the model that is trained, with its adapters."""
    if not base.is_native:
        from powertrain.models.bridge.loading import load_bridged

        return load_bridged(base.folder, adapters=adapters, provider=base.choice.provider, base=base.name,
                            max_length=max_length(recipe, base), **_bridge_options(recipe, base))
    import torch

    from powertrain.models.adapters.attached import add_adapters
    from powertrain.models.adapters.files import load_adapter
    from powertrain.models.huggingface.folder import load_folder
    from powertrain.models.kernels.quantised import quantise_base

    model = load_folder(base.folder, dropout=recipe.model.dropout, dtype=torch.float32 if recipe.method == "full" else None)
    model.base = base.name
    if recipe.method == "qlora":
        quantise_base(model, type=recipe.quantisation.type, double=recipe.quantisation.double)
    if recipe.model.adapter is not None:
        load_adapter(model, Path(recipe.model.adapter))
    elif adapters is not None:
        add_adapters(model, adapters)
    return model
