"""The frozen reference of objectives that compare answers: its scores of all examples, computed once and kept in the cache.

They are computed by the run's own model before its first step, with the plan in force: until then the model is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from powertrain import planner
from powertrain.data.example import Example
from powertrain.data.examples.store import Examples, ExampleStore
from powertrain.data.publishing import key_of
from powertrain.data.rows.folders import digests_of
from powertrain.models.huggingface.hub import digest_weights
from powertrain.records.phases import ScoringReference
from powertrain.training.comparing import Comparing, StoredReference

if TYPE_CHECKING:
    from powertrain.recipe import Recipe
    from powertrain.records import Facts, Plan
    from powertrain.run.material import Material
    from powertrain.training.setup import Setup

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
FORMAT = 1                                   # of the scores, and of what decides them
CHUNK_STEPS = 8                              # optimizer steps' worth of examples whose passes are arranged together


def with_reference(setup: Setup, material: Material, facts: Facts, plan: Plan, cache: Path | None,
                   tell: Callable[[ScoringReference], None]) -> Setup:
    """Return the setup with its objective's reference: stored scores, or the weights as they are now."""
    objective = setup.objective
    if not isinstance(objective, Comparing) or not isinstance(objective.reference, StoredReference):
        return replace(setup, objective=objective.for_model(setup.model))
    examples = material.training
    assert isinstance(examples, Examples)
    store = examples.store
    folder = None if cache is None else cache / "reference" / key_of(_key(material.resolved.recipe, facts, plan, store))
    if folder is None or not store.scores.open(folder):
        tell(ScoringReference(examples=len(store)))
        everything = Examples(store, np.arange(len(store)))
        store.scores.keep(scored(setup, everything), folder)
    return replace(setup, objective=replace(objective, reference=StoredReference(is_ready=True)))


def scored(setup: Setup, compared: Sequence[Example]) -> npt.NDArray[np.float32]:
    """Return the log-probabilities of each example's two documents (examples, 2) by the setup's model, as it is."""
    import torch

    from powertrain.models.model import evaluating

    assert isinstance(setup.objective, Comparing)
    count, chunk = len(compared), CHUNK_STEPS * setup.train_batch_size
    values = np.empty((count, 2), dtype=np.float32)
    with torch.no_grad(), evaluating(setup.model), setup.in_its_precision():
        for first in range(0, count, chunk):
            examples = [compared[index] for index in range(first, min(first + chunk, count))]
            places = {id(example): first + number for number, example in enumerate(examples)}
            for part in setup.arrange(examples, setup.micro_batch):
                batch = setup.batch_of(part).to(setup.device)
                found = setup.objective.scores_by(setup.model, batch, setup.kernels, setup.loss)
                values[[places[id(example)] for example in part]] = found.float().cpu().numpy()
    return values


def _key(recipe: Recipe, facts: Facts, plan: Plan, store: ExampleStore) -> dict[str, object]:
    """Return all that decides the scores."""
    model, adapter = facts.model, recipe.model.adapter
    return {
        "format": FORMAT, "examples": [part.folder.name for part in store.parts], "max_length": store.max_length,
        "model": model.digest or digest_weights(Path(model.path)) or model.path, "provider": model.provider,
        "revision": recipe.model.revision,
        "adapter": adapter and digests_of([Path(adapter) / name for name in ADAPTER_FILES]),
        "frozen": [model.frozen_dtype, recipe.quantisation.model_dump() if recipe.method == "qlora" else None],
        "dtype": planner.workload_of(facts, plan).dtype, "rows": store.kind}
