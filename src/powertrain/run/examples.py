"""The examples of a recipe that trains a pretrained model: which tokenizer reads them, and for which kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.data.example_store import ExampleStore, open_examples
from powertrain.facts.software import read_software
from powertrain.models.folder import read_json
from powertrain.models.hub import find_model
from powertrain.models.providers import Choice, choose_provider, decoder_start
from powertrain.recipe import Recipe
from powertrain.records import Software, WrongUse
from powertrain.run import folder as run_folder

NEWEST = "recipe:"           # model.path=recipe:NAME: the newest finished run of that recipe
DEFAULT_LENGTH = 2048        # tokens of an example, where the model could read more
OWN_TOKENIZERS = ("bpe", "char", "byte")     # made for training from scratch; a pretrained model has its own


@dataclass(frozen=True)
class Base:
    """A pretrained model, found and looked at; nothing of it is loaded yet."""

    folder: Path
    name: str                                # what an adapter writes down as its base: a hub id, or the folder's path
    config: Mapping[str, Any]                # its config.json
    choice: Choice                           # who computes it, and its task

    @property
    def context(self) -> int | None:
        """Tokens that its positions reach; None where they have no end (T5)."""
        names = ("max_position_embeddings", "n_positions", "n_ctx")
        return next((int(self.config[name]) for name in names if self.config.get(name)), None) \
            if self.config.get("model_type") not in ("t5", "mt5", "bloom") else None


def find_base(recipe: Recipe, software: Software) -> Base:
    """Raises WrongUse where there is no such model, or none that can be trained as the recipe says."""
    assert recipe.model.path is not None
    path = newest_run(recipe.model.path.removeprefix(NEWEST)) if recipe.model.path.startswith(NEWEST) \
        else Path(recipe.model.path)
    if (path / "recipe.yaml").is_file():
        path = _model_of_run(path)
    local = path.is_dir()
    folder = path if local else find_model(recipe.model.path, revision=recipe.model.revision)
    if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise WrongUse(f"{folder} holds an adapter, not a model; to train it further use model.path=ITS_BASE "
                       f"model.adapter={folder}")
    config = read_json(folder / "config.json")
    choice = choose_provider(config, recipe.model.provider, recipe.model.task, software)
    return Base(folder, str(folder.resolve()) if local else recipe.model.path, config, choice)


def newest_run(recipe_name: str) -> Path:
    """The folder of the newest finished run of a recipe. Raises WrongUse if there is none."""
    finished = [run for run in run_folder.list_runs(run_folder.RUNS)
                if run.name == recipe_name and run.state == "finished" and (run.folder / "model" / "config.json").is_file()]
    if not finished:
        raise WrongUse(f"there is no finished run of the recipe {recipe_name} in {run_folder.RUNS}/; "
                       f"`powertrain train {recipe_name}` makes one")
    return finished[-1].folder


def _model_of_run(run: Path) -> Path:
    if not (run / "model").is_dir():
        raise WrongUse(f"the run {run} has no model yet; finish it by `powertrain train --resume {run}`")
    return run / "model"


def open_recipe_examples(recipe: Recipe, cache: Path, say: Callable[[str], None]) -> ExampleStore:
    """The tokenised examples of a recipe, made if they are not there yet."""
    if recipe.method == "scratch":
        raise WrongUse("training from scratch reads text, which has no examples to look at; name a pretrained model with "
                       "model.path=FOLDER")
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
