"""The pretrained model that a recipe names: found and looked at, nothing of it loaded yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.models.huggingface.hub import find_model, read_model_json
from powertrain.models.huggingface.providers import Choice, choose_provider
from powertrain.recipe import Recipe
from powertrain.records import Software, WrongUse
from powertrain.run.folder import NEWEST, newest_run

ENDLESS = ("t5", "mt5", "umt5", "bloom")     # model types whose positions have no end


@dataclass(frozen=True)
class Base:
    """A pretrained model, found and looked at; nothing of it is loaded yet."""

    folder: Path
    name: str                                # what an adapter writes down as its base: a hub id, or the folder's path
    config: Mapping[str, Any]                # its config.json
    choice: Choice                           # who computes it, and its task

    @property
    def is_native(self) -> bool:
        return self.choice.provider == "native"

    @property
    def context(self) -> int | None:
        """Tokens that its positions reach; None where they have no end (T5)."""
        names = ("max_position_embeddings", "n_positions", "n_ctx")
        return next((int(self.config[name]) for name in names if self.config.get(name)), None) \
            if self.config.get("model_type") not in ENDLESS else None


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
    config = read_model_json(folder / "config.json")
    choice = choose_provider(config, recipe.model.provider, recipe.model.task, software)
    return Base(folder, str(folder.resolve()) if local else recipe.model.path, config, choice)


def _model_of_run(run: Path) -> Path:
    if not (run / "model").is_dir():
        raise WrongUse(f"the run {run} has no model yet; finish it by `powertrain train --resume {run}`")
    return run / "model"
