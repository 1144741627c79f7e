"""The loss of a trained model: on a run's own held-out text or examples, on any text, on any examples."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from powertrain.data.documents import read_documents
from powertrain.data.example import Blocks, Example, collate, evaluation_blocks
from powertrain.data.examples.making import ROWS_LOOKED_AT
from powertrain.data.examples.store import ExampleStore, open_examples
from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.row import Row
from powertrain.models.huggingface.providers import decoder_start
from powertrain.models.kernels.attention import sdpa_attention
from powertrain.models.model import Model
from powertrain.planner import from_json
from powertrain.recipe import Recipe
from powertrain.records import Plan, WrongUse
from powertrain.records.events import Evaluated
from powertrain.records.json_files import read_json
from powertrain.run.material import open_recipe_store
from powertrain.run.pretrained import DEFAULT_LENGTH, open_recipe_examples
from powertrain.training.evaluation import evaluate
from powertrain.training.loop import apply_plan
from powertrain.training.optimizers import plain_adamw
from powertrain.training.setup import Setup, plain_setup
from powertrain.use.opening import OpenedModel
from powertrain.use.questions import schema_for

Say = Callable[[str], None]

MICRO_BATCH_TOKENS = 4096
ROW_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")


def score(opened: OpenedModel, cache: Path, say: Say) -> tuple[Evaluated, float | None]:
    """A run's model on all that the run held out, in the run's precision; of text also gzip's bits per byte of it."""
    recipe, run = run_recipe(opened)
    plan = from_json(read_json(run / "plan.json"))
    if recipe.method != "scratch":
        store = held_out_examples(opened, recipe, cache, say)
        return evaluate_examples(opened.model, store.validation, plan), None
    say(f"reading {recipe.data.source}")
    texts = open_recipe_store(recipe, cache)
    if len(texts.validation) < 2:
        raise nothing_held_out(run, recipe)
    setup = _setup(opened.model, evaluation_blocks(texts.validation, recipe.data.block), plan)
    found = evaluate(setup, setup.examples, tokens_per_byte=len(texts.validation) / texts.validation_bytes)
    return found, 8 * texts.validation_text_gzip_bytes / texts.validation_bytes


def score_source(opened: OpenedModel, source: str, cache: Path, say: Say) -> tuple[Evaluated, float | None]:
    """Any data in fp32: rows of examples by the tokens that would be trained, everything else as text, end to end."""
    if is_examples(opened, source, cache):
        examples = examples_of(opened, source, cache, say).training
        return evaluate_examples(opened.model, examples, Plan((), ())), None
    return score_text(opened, source, cache)


def score_text(opened: OpenedModel, source: str, cache: Path) -> tuple[Evaluated, float]:
    """Any text, its documents end to end, in blocks of the model's context, in fp32; and gzip's bits per byte of it."""
    if opened.task != "causal":
        raise WrongUse(f"{source} is text, which a {opened.task} model does not continue; give rows of "
                       f"{'sources and targets' if opened.task == 'seq2seq' else 'questions with their places in a context'}")
    text = "".join(document.text for document in read_documents(source, cache=cache))
    tokens = np.asarray(opened.tokenizer.encode(text))
    if len(tokens) < 2:
        raise WrongUse(f"{source} has {len(tokens)} tokens; at least 2 are needed to predict one from another")
    setup = _setup(opened.model, evaluation_blocks(tokens, opened.context or DEFAULT_LENGTH), Plan((), ()))
    size_bytes = len(text.encode())
    found = evaluate(setup, setup.examples, tokens_per_byte=len(tokens) / size_bytes)
    return found, 8 * len(gzip.compress(text.encode(), 9, mtime=0)) / size_bytes


def evaluate_examples(model: Model, examples: Sequence[Example], plan: Plan) -> Evaluated:
    """The mean loss over the examples' targets."""
    longest = max(example.tokens for example in (examples[i] for i in range(len(examples))))
    setup = _setup(model, examples, plan, micro_batch=max(1, MICRO_BATCH_TOKENS // longest))
    return evaluate(setup, examples, tokens_per_byte=None)


# ------------------------------------------------------------------------------------------------ which examples


def run_recipe(opened: OpenedModel) -> tuple[Recipe, Path]:
    """The recipe and the folder of the run that was opened. Raises WrongUse if it is none."""
    recipe, run = opened.found.recipe, opened.found.run
    if recipe is None or run is None:
        raise WrongUse(f"{opened.found.path} is a model without a run, so it has no held-out text; name data with --data PATH")
    return recipe, run


def held_out_examples(opened: OpenedModel, recipe: Recipe, cache: Path, say: Say) -> ExampleStore:
    """The examples of a run, of which `validation` was held out. Its base is where it was found now."""
    model = recipe.model.model_copy(update={"path": str(opened.found.folder)})
    store = open_recipe_examples(recipe.model_copy(update={"model": model}), cache, say)
    if not len(store.validation):
        raise nothing_held_out(opened.found.path, recipe)
    return store


def nothing_held_out(run: Path, recipe: Recipe) -> WrongUse:
    return WrongUse(f"the run {run} held nothing out (data.validation_share={recipe.data.validation_share:g}); name data with "
                    "--data PATH")


def is_examples(opened: OpenedModel, source: str, cache: Path) -> bool:
    """Whether `source` is rows that mean something to the model, and not text."""
    recipe = opened.found.recipe
    if recipe is not None and recipe.method != "scratch":
        return True
    if Path(source).suffix.lower() not in ROW_FILES:
        return False
    rows = [row for row in read_rows(source, cache=cache, most=ROWS_LOOKED_AT) if isinstance(row, Row)]
    return schema_for(opened, rows)[0].kind != "text"


def examples_of(opened: OpenedModel, source: str, cache: Path, say: Say) -> ExampleStore:
    """The examples in `source`, read as the run's own were if there is a run, all of them in `training`."""
    recipe, folder = opened.found.recipe or Recipe(), opened.found.tokenizer_folder
    data = recipe.data
    rows = [row for row in read_rows(source, cache=cache, split=data.split, most=ROWS_LOOKED_AT) if isinstance(row, Row)]
    schema, _ = schema_for(opened, rows)
    length = min(opened.context or DEFAULT_LENGTH, data.max_length or DEFAULT_LENGTH)
    return open_examples(
        [source], format=schema.name, columns=data.columns, split=data.split, text_field=data.text_field, max_length=length,
        long_examples=data.long_examples or "cut", train_on=data.train_on, chat_template=data.chat_template,
        end_token=data.end_token, validation_share=0.0, task=opened.task, tokenizer_folder=folder, cache=cache, say=say,
        decoder_start=decoder_start(opened.found.folder) if opened.task == "seq2seq" else None)


def _setup(model: Model, examples: Sequence[Example], plan: Plan, *, micro_batch: int | None = None) -> Setup:
    """A setup to evaluate with: of the plan only what forward passes feel, so the run's figure comes out again."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if micro_batch is None:
        assert isinstance(examples, Blocks)
        micro_batch = max(1, MICRO_BATCH_TOKENS // examples.block)
    setup = plain_setup(model.to(device), examples, collate, train_batch_size=micro_batch, seed=0,
                        optimizer=plain_adamw(0.0, (0.9, 0.95), 1e-8))
    setup = replace(setup, attention=sdpa_attention)
    forward = Plan(tuple(step for step in plan.steps if step.technique.touches & {"precision", "attention"}), ())
    return apply_plan(setup, forward)
