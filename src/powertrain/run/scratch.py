"""Training from scratch: text in blocks, and a decoder of the recipe's shape."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.data.collate import collate
from powertrain.data.example import Blocks, EvaluationBlocks
from powertrain.data.store import TokenStore, open_store
from powertrain.facts.data import data_facts
from powertrain.facts.model import model_facts
from powertrain.models.config import ModelConfig, make_config
from powertrain.recipe import Recipe, Resolved
from powertrain.records import WrongUse
from powertrain.run.material import Material

if TYPE_CHECKING:
    from powertrain.models.decoder import Decoder

PRETRAINED_KEYS = {"path", "revision", "provider", "task", "adapter", "trust_remote_code"}  # of model: say nothing here
PIPED_KEYS = {"family", "vocabulary", "context"}         # of model: passed to make_config by other names


def scratch_material(resolved: Resolved, cache: Path) -> Material:
    """Raises WrongUse for whatever cannot be trained."""
    store = open_recipe_store(resolved.recipe, cache)
    _check_prompt(resolved.recipe, store)
    config, derived = _config(resolved.recipe, store)
    resolved = resolved.with_planned(derived)
    recipe = resolved.recipe
    block, stride = recipe.data.block, recipe.data.stride or recipe.data.block
    has_held_out = len(store.validation) > 1
    return Material(
        resolved, model_facts(config),
        data_facts(store, block=block, stride=stride, train_batch_size=recipe.train_batch_size),
        training=Blocks(store.train, block, stride), held_out=EvaluationBlocks(store.validation, block), collate=collate,
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
    """The decoder's config, and the recipe's open values as derived: dotted key -> (value, reason)."""
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


def _check_prompt(recipe: Recipe, store: TokenStore) -> None:
    """A prompt that the tokenizer cannot read fails now, not at the first evaluation."""
    try:
        store.tokenizer.encode(recipe.sample.prompt)
    except WrongUse as error:
        raise WrongUse(f"sample.prompt={recipe.sample.prompt!r} cannot be used: {error}") from None
