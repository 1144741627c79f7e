"""The text that a run writes at its evaluations, to look at."""

from __future__ import annotations

from powertrain.run.prepare import Prepared
from powertrain.training.setup import Setup
from powertrain.use.generation import generate


def write_sample(prepared: Prepared, setup: Setup, tokens: int) -> str:
    """What the model writes after the recipe's prompt, at most so many tokens of it."""
    wanted, material = prepared.recipe.sample, prepared.material
    with setup.precision.context(setup.device):
        return "".join(generate(setup.model, material.tokenizer, material.as_prompt(wanted.prompt), tokens=tokens,
                                temperature=wanted.temperature, top_k=wanted.top_k, seed=prepared.recipe.seed))
