"""What a run works on: its data and its model.

From scratch, the data is text in blocks, and the model a decoder of the recipe's shape. Otherwise the recipe names a pretrained
model, whose weights are trained whole or beside adapters, and the data is examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from powertrain.data.documents import SHAKESPEARE, corpus_file
from powertrain.data.example import Blocks, Example, collate, collate_padded, evaluation_blocks
from powertrain.data.examples.store import ExampleStore, open_examples, shard_examples
from powertrain.data.rows.schemas import ANSWERS
from powertrain.data.shards import Shard
from powertrain.data.store import TokenStore, open_store, shard_text
from powertrain.data.tokenizers import check_tokenizer
from powertrain.facts.data import data_facts, example_facts
from powertrain.facts.model import model_facts
from powertrain.facts.software import read_software
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import ModelConfig, make_config
from powertrain.models.huggingface.hub import digest_weights
from powertrain.models.huggingface.providers import CAUSAL, REWARD, availability, decoder_start
from powertrain.recipe import DataRecipe, Recipe, Resolved, flat
from powertrain.recipe.schema import OWN_TOKENIZERS
from powertrain.records import Batch, DataFacts, ModelFacts, Software, WrongUse
from powertrain.records.phases import ReadingModel, Tell
from powertrain.run.base import Base, find_base
from powertrain.run.folder import NEWEST
from powertrain.training.objectives import objective_of
from powertrain.training.optimizers import selection_of

if TYPE_CHECKING:
    from powertrain.models.decoder import Decoder
    from powertrain.models.model import Model

PRETRAINED_KEYS = {"path", "revision", "provider", "task", "adapter", "trust_remote_code"}  # of model: say nothing here
PIPED_KEYS = {"family", "vocabulary", "context"}         # of model: passed to make_config by other names
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
SHAPE_KEYS = ("family", "layers", "width", "heads", "kv_heads", "mlp_width", "context", "vocabulary", "activation", "tied_head")
DEFAULT_LENGTH = 2048        # tokens of an example, where the model could read more
ANY_VOCABULARY = 256         # tokens: for a shape that is checked before its tokenizer is made


class TextTokenizer(Protocol):
    """What a run needs of a tokenizer: to write samples, and to save it beside the model."""

    @property
    def end_of_text(self) -> int | None: ...
    def encode(self, text: str) -> Any: ...
    def save(self, folder: Path) -> Any: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Material:
    resolved: Resolved                       # the recipe, its open values derived from model and data
    model: ModelFacts
    data: DataFacts
    training: Sequence[Example]              # one epoch, in the order of the store
    held_out: Sequence[Example]              # may be empty
    collate: Callable[[Sequence[Example]], Batch]        # the plain one, without any technique
    tokenizer: TextTokenizer
    build: Callable[[], Model]               # on the CPU, with what is trained in fp32; draws numbers: seed first
    tokens_per_byte: float | None = None     # of the held-out text; None where bytes are no measure
    gzip_bits_per_byte: float | None = None  # of the held-out text at gzip's level 9
    config: ModelConfig | None = None        # of a model that Powertrain computes itself
    adapters: AdapterConfig | None = None    # that it gets
    providers: Mapping[str, str | None] = field(default_factory=dict)    # of a pretrained model: why each cannot compute it
    as_prompt: Callable[[str], str] = str    # a user's words as the model is to read them
    said: tuple[str, ...] = ()               # what was found by looking at model and data


# ------------------------------------------------------------------------------------------------ from scratch


def scratch_material(resolved: Resolved, cache: Path) -> Material:
    """Return data and model of training from scratch. Raises WrongUse for whatever cannot be trained."""
    check_shape(resolved.recipe)
    store = open_store(resolved.recipe.data, seed=resolved.recipe.seed, cache=cache)
    try:
        store.tokenizer.encode(resolved.recipe.sample.prompt)        # fails now, not at the first evaluation
    except WrongUse as error:
        raise WrongUse(f"sample.prompt={resolved.recipe.sample.prompt!r} cannot be used: {error}") from None
    config, derived = _config(resolved.recipe, store)
    resolved = resolved.with_planned(derived)
    recipe = resolved.recipe
    block, stride = recipe.data.block, recipe.data.stride or recipe.data.block
    has_held_out = len(store.validation) > 1
    return Material(
        resolved, model_facts(config, selection=selection_of(recipe)),
        data_facts(store, block=block, stride=stride, train_batch_size=recipe.train_batch_size),
        training=Blocks(store.train, block, stride), held_out=evaluation_blocks(store.validation, block), collate=collate,
        tokenizer=store.tokenizer, build=partial(_build, config), config=config,
        tokens_per_byte=len(store.validation) / store.validation_bytes if has_held_out else None,
        gzip_bits_per_byte=8 * store.validation_text_gzip_bytes / store.validation_bytes if has_held_out else None)


def check_shape(recipe: Recipe) -> None:
    """Raise WrongUse where training from scratch can have no such objective, tokenizer or model, whatever the text is."""
    if objective_of(recipe).rows != ANSWERS:
        raise WrongUse(f"objective={recipe.objective.name} compares answers of a trained model; name one with "
                       "model.path=FOLDER", keys=("objective.name",))
    if "/" not in recipe.data.tokenizer:     # a folder may be on the machine that trains
        check_tokenizer(recipe.data.tokenizer, recipe.data.vocabulary)
    wanted = recipe.model
    if wanted.context is not None and wanted.context < recipe.data.block:
        raise WrongUse(f"model.context={wanted.context} is shorter than data.block={recipe.data.block}: the model could "
                       "not read an example; raise model.context or lower data.block")
    _decoder(recipe, ANY_VOCABULARY)


def _decoder(recipe: Recipe, tokens: int) -> tuple[ModelConfig, dict[str, str]]:
    """Return the decoder's config, and the reasons of what the recipe leaves open. `tokens`: of the tokenizer."""
    wanted = recipe.model
    return make_config(wanted.family, vocabulary=wanted.vocabulary or tokens, context=wanted.context or recipe.data.block,
                       **wanted.model_dump(exclude=PRETRAINED_KEYS | PIPED_KEYS))


def _build(config: ModelConfig) -> Decoder:
    from powertrain.models.decoder import Decoder

    return Decoder(config)


def _config(recipe: Recipe, store: TokenStore) -> tuple[ModelConfig, dict[str, tuple[Any, str]]]:
    """Return the decoder's config, and the recipe's open values as derived: dotted key -> (value, reason)."""
    wanted, tokens = recipe.model, store.tokenizer.vocabulary
    if wanted.vocabulary is not None and wanted.vocabulary < tokens:
        raise WrongUse(f"model.vocabulary={wanted.vocabulary} is smaller than the tokenizer's {tokens} tokens; leave it "
                       f"out, or use {tokens} or more")
    config, reasons = _decoder(recipe, tokens)
    config = replace(config, end_of_text=store.tokenizer.end_of_text)
    reasons = {"vocabulary": "the tokenizer's tokens", "context": "data.block", **reasons}
    open_keys = [key for key in type(wanted).model_fields if getattr(wanted, key) is None and key in reasons]
    derived: dict[str, tuple[Any, str]] = {
        f"model.{key}": (getattr(config, key), reasons[key]) for key in open_keys if hasattr(config, key)}
    if recipe.data.stride is None:
        derived["data.stride"] = (recipe.data.block, "data.block, so that an epoch reads every token once")
    return config, derived


# ------------------------------------------------------------------------------------------------ a pretrained model


def open_recipe_examples(recipe: Recipe, cache: Path, tell: Tell) -> ExampleStore:
    """Return the tokenised examples of a recipe, made if they are not there yet. Raises WrongUse for one from scratch."""
    if recipe.method == "scratch":
        raise WrongUse("`powertrain data check` and `show` need a recipe that fine-tunes a model, and this recipe trains from "
                       "scratch; name a model with model.path=FOLDER")
    return _examples(recipe, find_base(recipe, read_software()), cache, tell)


def prepare_shard(recipe: Recipe, shard: Shard, cache: Path, tell: Tell) -> Path:
    """Return the folder of one shard of a recipe's data, tokenised now unless the cache has it."""
    if recipe.method == "scratch":
        return shard_text(recipe.data, shard, seed=recipe.seed, cache=cache)
    base = find_base(recipe, read_software())
    return shard_examples(_with_length(recipe, base), shard, tokenizer_folder=_tokenizer_folder(recipe, base), cache=cache,
                          task=base.choice.task, learns=objective_of(recipe).rows, tell=tell)


def _examples(recipe: Recipe, base: Base, cache: Path, tell: Tell) -> ExampleStore:
    return open_examples(_with_length(recipe, base), tokenizer_folder=_tokenizer_folder(recipe, base), cache=cache,
                         seed=recipe.seed, task=base.choice.task, learns=objective_of(recipe).rows,
                         decoder_start=decoder_start(base.folder) if base.choice.task == "seq2seq" else None, tell=tell)


def _with_length(recipe: Recipe, base: Base) -> DataRecipe:
    return recipe.data.model_copy(update={"max_length": _max_length(recipe, base)})


def _tokenizer_folder(recipe: Recipe, base: Base) -> Path:
    return base.folder if recipe.data.tokenizer in OWN_TOKENIZERS else Path(recipe.data.tokenizer).expanduser()


def _max_length(recipe: Recipe, base: Base) -> int:
    """Return the tokens of the longest example. Raises WrongUse for more than the model's positions reach."""
    wanted, context = recipe.data.max_length, base.context
    if wanted is not None and context is not None and wanted > context:
        raise WrongUse(f"data.max_length={wanted} is more than the {context} tokens that {recipe.model.path} can read; use "
                       f"data.max_length={context} or less")
    return wanted or min(context or DEFAULT_LENGTH, DEFAULT_LENGTH)


def pretrained_material(resolved: Resolved, software: Software, cache: Path, tell: Tell) -> Material:
    """Return data and model of training a pretrained model. Raises WrongUse for whatever cannot be trained."""
    base = find_base(resolved.recipe, software)
    tell(ReadingModel(path=str(resolved.recipe.model.path), because=base.choice.because))
    adapters = _adapters(resolved.recipe, base)
    facts = replace(_model_facts(resolved.recipe, base, adapters),
                    digest="" if resolved.recipe.method == "full" and not resolved.recipe.weights.freeze else
                    digest_weights(base.folder))
    store = _examples(resolved.recipe, base, cache, tell)
    if (tokens := store.tokenizer.vocabulary) > facts.vocabulary:
        raise WrongUse(f"the tokenizer has {tokens:,} tokens and the model's embedding {facts.vocabulary:,} rows, too few by "
                       f"{tokens - facts.vocabulary:,}; use the model's own (data.tokenizer=FOLDER)")
    resolved = resolved.with_planned(_derived(resolved, base, facts, adapters))
    recipe = resolved.recipe
    padded = base.choice.task in (CAUSAL, REWARD) and base.is_native
    return Material(
        resolved, facts, example_facts(store, train_batch_size=recipe.train_batch_size),
        training=store.training, held_out=store.validation, collate=collate_padded if padded else collate,
        tokenizer=store.tokenizer, build=partial(_load, recipe, base, adapters), said=store.said, adapters=adapters,
        config=base.decoder(recipe) if base.is_native else None,
        providers=availability(base.config, base.choice.task, software), as_prompt=store.as_prompt)


def _adapters(recipe: Recipe, base: Base) -> AdapterConfig | None:
    """Return the adapters to train: new ones, or those of the folder that the recipe names. On the bridge, PEFT reads them."""
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
                             selection=selection_of(recipe), **_bridge_options(recipe, base))
    stored = "fp32" if recipe.method == "full" else DTYPES.get(str(base.config.get("dtype") or base.config.get("torch_dtype")),
                                                              "fp32")
    return model_facts(base.decoder(recipe), method=recipe.method, path=base.name, adapters=adapters,
                       frozen_dtype=recipe.quantisation.type if recipe.method == "qlora" else stored,
                       unquantised_dtype=stored if recipe.method == "qlora" else "", selection=selection_of(recipe))


def _bridge_options(recipe: Recipe, base: Base) -> dict[str, Any]:
    """Return the keywords for the bridge, to count a model or to load it."""
    return {"task": base.choice.task, "method": recipe.method, "dropout": recipe.model.dropout,
            "quantisation": (recipe.quantisation.type, recipe.quantisation.double) if recipe.method == "qlora" else None,
            "adapter_folder": Path(recipe.model.adapter) if recipe.model.adapter else None,
            "trust_remote_code": recipe.model.trust_remote_code, "revision": recipe.model.revision}


def _derived(resolved: Resolved, base: Base, facts: ModelFacts, adapters: AdapterConfig | None) -> dict[str, tuple[Any, str]]:
    """Return the values that the model's folder and data decide. Raises WrongUse where the recipe asks for another shape."""
    recipe, found = resolved.recipe, f"{base.name}/config.json"
    derived: dict[str, tuple[Any, str]] = {}
    if base.is_native:
        config = base.decoder(recipe)
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
    derived["data.max_length"] = (_max_length(recipe, base), "what the model can read, at most 2048")
    if adapters is not None and recipe.model.adapter is not None:
        targets = adapters.target_modules
        values = {**adapters.__dict__, "target_modules": targets if isinstance(targets, str) else list(targets)}
        derived |= {f"lora.{key}": (value, f"{recipe.model.adapter}/adapter_config.json") for key, value in values.items()
                    if key in type(recipe.lora).model_fields}
    said = dict(flat(recipe.model_dump()))   # what a recipe says already keeps its own origin
    return {key: (value, reason) for key, (value, reason) in derived.items() if said[key] != value}


def _load(recipe: Recipe, base: Base, adapters: AdapterConfig | None) -> Model:
    """Load the model that is trained, with its adapters."""
    if not base.is_native:
        from powertrain.models.bridge.loading import load_bridged

        return load_bridged(base.folder, adapters=adapters, provider=base.choice.provider, base=base.name,
                            max_length=_max_length(recipe, base), **_bridge_options(recipe, base))
    import torch

    from powertrain.models.adapters.attached import add_adapters
    from powertrain.models.adapters.files import load_adapter
    from powertrain.models.huggingface.folder import load_folder
    from powertrain.models.kernels.quantised import quantise_base

    model = load_folder(base.folder, dropout=recipe.model.dropout, dtype=torch.float32 if recipe.method == "full" else None,
                        rewards=base.choice.task == REWARD)
    model.base = base.name
    if recipe.method == "qlora":
        quantise_base(model, type=recipe.quantisation.type, double=recipe.quantisation.double)
    if recipe.model.adapter is not None:
        load_adapter(model, Path(recipe.model.adapter))
    elif adapters is not None:
        add_adapters(model, adapters)
    return model


# ------------------------------------------------------------------------------------------------ downloads


class NotFetched(WrongUse):
    """A plan was asked for, and the recipe needs `downloads` that are not on this machine. A plan downloads nothing."""

    def __init__(self, downloads: tuple[str, ...], keys: tuple[str, ...]):
        missing = " and ".join(downloads)
        super().__init__(f"a plan downloads nothing, and this machine does not have {missing} yet; `powertrain data prepare` "
                         "with the same arguments downloads this, and so does `powertrain train`", keys=keys)
        self.downloads = downloads


def refuse_downloads(recipe: Recipe, cache: Path) -> None:
    """Raise NotFetched if a run of the recipe would have to download a text, a dataset or a model first."""
    missing = dict(_missing(recipe, cache))
    if missing:
        raise NotFetched(tuple(missing.values()), tuple(missing))


def _missing(recipe: Recipe, cache: Path) -> Iterator[tuple[str, str]]:
    """Yield the recipe's key and what it names, for each download."""
    if recipe.method == "scratch":
        if "shakespeare" in recipe.data.sources and not corpus_file(SHAKESPEARE, cache).is_file():
            yield "data.source", "the text shakespeare"
        return
    path = recipe.model.path or ""
    if path and not path.startswith(NEWEST) and not Path(path).expanduser().exists():
        from powertrain.models.huggingface.hub import HUB_ID, find_cached, missing_files

        if HUB_ID.fullmatch(path):
            cached = find_cached(path, recipe.model.revision)
            if cached is None or missing_files(cached):
                yield "model.path", f"the model {path}"
    for source in recipe.data.sources:
        if not Path(source).expanduser().exists() and _is_new_dataset(source):
            yield "data.source", f"the dataset {source}"


def _is_new_dataset(source: str) -> bool:
    """Return whether `source` names a dataset of the hub that the library's cache does not have."""
    from powertrain.data.rows.reading import is_hub_id

    if not is_hub_id(source):
        return False
    try:
        from datasets.config import HF_DATASETS_CACHE
    except ImportError:
        return False                         # reading the data says what is missing
    return not (Path(HF_DATASETS_CACHE) / source.partition(":")[0].replace("/", "___")).is_dir()
