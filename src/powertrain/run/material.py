"""What a run works on, its data and its model: the value, and how training from scratch makes it (pretrained.py does the rest).

From scratch, the data is text in blocks, and the model a decoder of the recipe's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from powertrain.data.documents import SHAKESPEARE, corpus_file
from powertrain.data.example import Blocks, Example, collate, evaluation_blocks
from powertrain.data.store import TokenStore, open_store
from powertrain.facts.data import data_facts
from powertrain.facts.model import model_facts
from powertrain.models.config import ModelConfig, make_config
from powertrain.recipe import Recipe, Resolved
from powertrain.records import Batch, DataFacts, ModelFacts, WrongUse
from powertrain.run.folder import NEWEST

if TYPE_CHECKING:
    from powertrain.models.decoder import Decoder
    from powertrain.models.model import Model

PRETRAINED_KEYS = {"path", "revision", "provider", "task", "adapter", "trust_remote_code"}  # of model: say nothing here
PIPED_KEYS = {"family", "vocabulary", "context"}         # of model: passed to make_config by other names


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
    providers: Mapping[str, str | None] = field(default_factory=dict)    # of a pretrained model: why each cannot compute it
    as_prompt: Callable[[str], str] = str    # a user's words as the model is to read them
    said: tuple[str, ...] = ()               # what was found by looking at model and data


# ------------------------------------------------------------------------------------------------ from scratch


def scratch_material(resolved: Resolved, cache: Path) -> Material:
    """Return data and model of training from scratch. Raises WrongUse for whatever cannot be trained."""
    store = open_recipe_store(resolved.recipe, cache)
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
        resolved, model_facts(config),
        data_facts(store, block=block, stride=stride, train_batch_size=recipe.train_batch_size),
        training=Blocks(store.train, block, stride), held_out=evaluation_blocks(store.validation, block), collate=collate,
        tokenizer=store.tokenizer, build=partial(_build, config),
        tokens_per_byte=len(store.validation) / store.validation_bytes if has_held_out else None,
        gzip_bits_per_byte=8 * store.validation_text_gzip_bytes / store.validation_bytes if has_held_out else None)


def _build(config: ModelConfig) -> Decoder:
    from powertrain.models.decoder import Decoder

    return Decoder(config)


def open_recipe_store(recipe: Recipe, cache: Path) -> TokenStore:
    data = recipe.data
    if not isinstance(data.source, str):
        raise WrongUse(f"data.source lists {len(data.source)} sources, and training from scratch reads one; name a folder or "
                       "a glob that holds them all")
    return open_store(data.source, tokenizer=data.tokenizer, vocabulary=data.vocabulary, text_field=data.text_field,
                      max_chars=data.max_chars, validation_share=data.validation_share,
                      validation_split=data.validation_split, seed=recipe.seed, cache=cache)


def _config(recipe: Recipe, store: TokenStore) -> tuple[ModelConfig, dict[str, tuple[Any, str]]]:
    """Return the decoder's config, and the recipe's open values as derived: dotted key -> (value, reason)."""
    wanted, tokens = recipe.model, store.tokenizer.vocabulary
    if wanted.vocabulary is not None and wanted.vocabulary < tokens:
        raise WrongUse(f"model.vocabulary={wanted.vocabulary} is smaller than the tokenizer's {tokens} tokens; leave it "
                       f"out, or use {tokens} or more")
    if wanted.context is not None and wanted.context < recipe.data.block:
        raise WrongUse(f"model.context={wanted.context} is shorter than data.block={recipe.data.block}: the model could "
                       "not read an example; raise the one or lower the other")
    given = wanted.model_dump(exclude=PRETRAINED_KEYS | PIPED_KEYS)
    config, reasons = make_config(wanted.family, vocabulary=wanted.vocabulary or tokens,
                                  context=wanted.context or recipe.data.block, **given)
    config = replace(config, end_of_text=store.tokenizer.end_of_text)
    reasons = {"vocabulary": "the tokenizer's tokens", "context": "data.block", **reasons}
    open_keys = [key for key in type(wanted).model_fields if getattr(wanted, key) is None and key in reasons]
    derived: dict[str, tuple[Any, str]] = {
        f"model.{key}": (getattr(config, key), reasons[key]) for key in open_keys if hasattr(config, key)}
    if recipe.data.stride is None:
        derived["data.stride"] = (recipe.data.block, "data.block: every token once an epoch")
    return config, derived


# ------------------------------------------------------------------------------------------------ downloads


class NotFetched(WrongUse):
    """A plan was asked for, and the recipe needs `downloads` that are not on this machine. A plan downloads nothing."""

    def __init__(self, downloads: tuple[str, ...], keys: tuple[str, ...]):
        missing = " and ".join(downloads)
        super().__init__(f"a plan downloads nothing, and this machine does not have {missing} yet; `powertrain data prepare` "
                         "with the same words downloads this, and so does `powertrain train`", keys=keys)
        self.downloads = downloads


def refuse_downloads(recipe: Recipe, cache: Path) -> None:
    """Raises NotFetched if a run of the recipe would have to download a text, a dataset or a model first."""
    missing = dict(_missing(recipe, cache))
    if missing:
        raise NotFetched(tuple(missing.values()), tuple(missing))


def _missing(recipe: Recipe, cache: Path) -> Iterator[tuple[str, str]]:
    """Yield the recipe's key and what it names, for each download."""
    sources = [recipe.data.source] if isinstance(recipe.data.source, str) else recipe.data.source
    if recipe.method == "scratch":
        if "shakespeare" in sources and not corpus_file(SHAKESPEARE, cache).is_file():
            yield "data.source", "the text shakespeare"
        return
    path = recipe.model.path or ""
    if path and not path.startswith(NEWEST) and not Path(path).expanduser().exists():
        from powertrain.models.huggingface.hub import HUB_ID, find_cached, missing_files

        if HUB_ID.fullmatch(path):
            cached = find_cached(path, recipe.model.revision)
            if cached is None or missing_files(cached):
                yield "model.path", f"the model {path}"
    for source in sources:
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
