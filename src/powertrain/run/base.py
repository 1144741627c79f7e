"""The pretrained model that a recipe names: found, looked at, and with the task that the recipe gives it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powertrain.models.config import ModelConfig
from powertrain.models.huggingface.hub import find_model, read_config, read_model_json
from powertrain.models.huggingface.providers import REWARD, Choice, choose_provider
from powertrain.recipe import Recipe
from powertrain.records import Software, WrongUse
from powertrain.run.folder import NEWEST, newest_run
from powertrain.training.objectives import objective_of

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

    def decoder(self, recipe: Recipe) -> ModelConfig:
        """Return the config of the decoder that is trained: with a head for rewards where the task asks for one."""
        config = read_config(self.folder, recipe.model.dropout)
        return replace(config, rewards=True, tied_head=False) if self.choice.task == REWARD else config

    @property
    def context(self) -> int | None:
        """Return the tokens that its positions reach; None where they have no end (T5)."""
        if self.config.get("model_type") in ENDLESS:
            return None
        names = ("max_position_embeddings", "n_positions", "n_ctx")
        return next((int(self.config[name]) for name in names if self.config.get(name)), None)


def find_base(recipe: Recipe, software: Software) -> Base:
    """Return the model that the recipe names. Raises WrongUse for none, or one that cannot be trained as the recipe says."""
    named = recipe.model.path
    assert named is not None
    path = newest_run(named.removeprefix(NEWEST)) if named.startswith(NEWEST) else Path(named)
    if (path / "recipe.yaml").is_file():
        if not (path / "model").is_dir():
            raise WrongUse(f"the run {path} has no model yet; finish it by `powertrain train --resume {path}`")
        path = path / "model"
    local = path.is_dir()
    folder = path if local else find_model(named, revision=recipe.model.revision)
    if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise WrongUse(f"{folder} holds an adapter, not a model; to train it further use model.path=ITS_BASE "
                       f"model.adapter={folder}")
    config = read_model_json(folder / "config.json")
    choice = choose_provider(config, recipe.model.provider, _task(recipe), software)
    if choice.task == REWARD and objective_of(recipe).task != REWARD:
        raise WrongUse(f"{named} is a reward model, whose head scores texts, and objective={recipe.objective.name} trains no "
                       "such head; use objective=reward, or name its base", keys=("objective.name",),
                       cure=("objective=reward",))
    return Base(folder, str(folder.resolve()) if local else named, config, choice)


def _task(recipe: Recipe) -> str | None:
    """Return the task of the model: the objective's, where it needs a head of its own. Raises WrongUse where they differ."""
    asked, needed = recipe.model.task, objective_of(recipe).task
    if needed is not None and asked not in (None, needed):
        raise WrongUse(f"objective={recipe.objective.name} trains a model for model.task={needed}, and model.task={asked} was "
                       "asked for; leave model.task out", keys=("model.task",))
    return needed or asked
