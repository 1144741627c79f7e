"""The loss of a trained model on text: a run's own held-out text, or any other."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from powertrain.data.blocks import EvaluationBlocks
from powertrain.data.collate import collate
from powertrain.data.reading import read_documents
from powertrain.data.tokenizers import Tokenizer
from powertrain.models.attention import sdpa_attention
from powertrain.models.decoder import Decoder
from powertrain.planner import from_json
from powertrain.recipe import resolve
from powertrain.records import Evaluation, Plan, WrongUse
from powertrain.run.folder import existing
from powertrain.run.scratch import open_recipe_store
from powertrain.training.evaluation import evaluate
from powertrain.training.loop import apply_plan
from powertrain.training.setup import Setup, plain_adamw, plain_setup

MICRO_BATCH_TOKENS = 4096


def score(model: Decoder, run: Path, cache: Path, say: Callable[[str], None]) -> tuple[Evaluation, float]:
    """A run's model on all of the run's held-out text, in the run's precision; and gzip's bits per byte of that text."""
    if not (run / "recipe.yaml").is_file():
        raise WrongUse(f"{run} is a model without a run, so it has no held-out text; name a text with --data PATH")
    recipe = resolve(str(existing(run).recipe)).recipe
    say(f"reading {recipe.data.source}")
    store = open_recipe_store(recipe, cache)
    if len(store.validation) < 2:
        raise WrongUse(f"the run {run} held no text out (data.validation_share={recipe.data.validation_share:g}); name a "
                       "text with --data PATH")
    plan = from_json(json.loads((run / "plan.json").read_text(encoding="utf-8")))
    setup = _setup(model, EvaluationBlocks(store.validation, recipe.data.block), plan)
    found = evaluate(setup, setup.examples, tokens_per_byte=len(store.validation) / store.validation_bytes)
    return found, 8 * store.validation_text_gzip_bytes / store.validation_bytes


def score_text(model: Decoder, tokenizer: Tokenizer, source: str, cache: Path) -> tuple[Evaluation, float]:
    """Any text, its documents end to end, in blocks of the model's context, in fp32; and gzip's bits per byte of it."""
    text = "".join(document.text for document in read_documents(source, cache=cache))
    tokens = np.asarray(tokenizer.encode(text))
    if len(tokens) < 2:
        raise WrongUse(f"{source} has {len(tokens)} tokens; at least 2 are needed to predict one from another")
    setup = _setup(model, EvaluationBlocks(tokens, model.config.context), Plan((), ()))
    size_bytes = len(text.encode())
    found = evaluate(setup, setup.examples, tokens_per_byte=len(tokens) / size_bytes)
    return found, 8 * len(gzip.compress(text.encode(), 9, mtime=0)) / size_bytes


def _setup(model: Decoder, blocks: EvaluationBlocks, plan: Plan) -> Setup:
    """A setup to evaluate with: of the plan only what forward passes feel, so the run's figure comes out again."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    micro_batch = max(1, MICRO_BATCH_TOKENS // blocks.block)
    setup = plain_setup(model.to(device), blocks, collate, train_batch_size=micro_batch, seed=0,
                        optimizer=plain_adamw(0.0, (0.9, 0.95), 1e-8))
    setup = replace(setup, attention=sdpa_attention)
    forward = Plan(tuple(step for step in plan.steps if step.technique.touches & {"precision", "attention"}), ())
    return apply_plan(setup, forward)

