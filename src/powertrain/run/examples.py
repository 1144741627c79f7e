"""The examples of a recipe that trains a pretrained model: which tokenizer reads them, and for which kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from powertrain.data.examples.store import ExampleStore, open_examples
from powertrain.facts.software import read_software
from powertrain.models.huggingface.providers import decoder_start
from powertrain.recipe import Recipe
from powertrain.records import WrongUse
from powertrain.run.base import Base, find_base

DEFAULT_LENGTH = 2048        # tokens of an example, where the model could read more
OWN_TOKENIZERS = ("bpe", "char", "byte")     # made for training from scratch; a pretrained model has its own


def open_recipe_examples(recipe: Recipe, cache: Path, say: Callable[[str], None]) -> ExampleStore:
    """The tokenised examples of a recipe, made if they are not there yet."""
    if recipe.method == "scratch":
        raise WrongUse("`powertrain data` looks at the examples of a pretrained model, and training from scratch has none; "
                       "name a model with model.path=FOLDER")
    return examples_for(recipe, find_base(recipe, read_software()), cache, say)


def examples_for(recipe: Recipe, base: Base, cache: Path, say: Callable[[str], None]) -> ExampleStore:
    data = recipe.data
    named = None if data.tokenizer in OWN_TOKENIZERS else Path(data.tokenizer).expanduser()
    return open_examples(
        [data.source] if isinstance(data.source, str) else data.source, weights=data.weights, format=data.format,
        columns=data.columns, split=data.split, validation_source=data.validation_source, max_examples=data.max_examples,
        max_length=max_length(recipe, base), long_examples=data.long_examples, train_on=data.train_on,
        chat_template=data.chat_template, end_token=data.end_token, text_field=data.text_field,
        validation_share=data.validation_share, seed=recipe.seed, task=base.choice.task, tokenizer_folder=named or base.folder,
        decoder_start=decoder_start(base.folder) if base.choice.task == "seq2seq" else None, cache=cache, say=say)


def max_length(recipe: Recipe, base: Base) -> int:
    """Tokens of the longest example. Raises WrongUse for more than the model's positions reach."""
    wanted, context = recipe.data.max_length, base.context
    if wanted is not None and context is not None and wanted > context:
        raise WrongUse(f"data.max_length={wanted} is more than the {context} tokens that {recipe.model.path} can read; use "
                       f"data.max_length={context} or less")
    return wanted or min(context or DEFAULT_LENGTH, DEFAULT_LENGTH)
