"""The loss of a trained model on a run's held-out data or on any data, and real examples to compare two models on."""

import gzip
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from powertrain.data.documents import read_documents
from powertrain.data.example import Compared, Example, collate, evaluation_blocks
from powertrain.data.examples.making import ROWS_LOOKED_AT
from powertrain.data.examples.store import ExampleStore, open_examples
from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.row import BadRow, Message, Row, Span
from powertrain.data.store import open_store
from powertrain.facts.hardware import read_hardware
from powertrain.facts.model import facts_from_json
from powertrain.facts.software import read_software
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.providers import REWARD, decoder_start
from powertrain.models.kernels.attention import sdpa_attention
from powertrain.models.model import Model
from powertrain.planner import from_json, make_plan
from powertrain.recipe import Recipe
from powertrain.recipe.schema import ObjectiveRecipe
from powertrain.records import IGNORE, Plan, WrongUse
from powertrain.records.events import Evaluated
from powertrain.records.json_files import read_json
from powertrain.records.phases import Phase, ReadingData, ScoringReference, Tell
from powertrain.records.plan import PinError
from powertrain.run.material import DEFAULT_LENGTH, open_recipe_examples
from powertrain.run.prepare import is_like
from powertrain.run.reference import scored
from powertrain.training.loop import apply_plan, evaluate
from powertrain.training.objective import Objective
from powertrain.training.objectives import NEXT_TOKEN, objective_of
from powertrain.training.optimizers import plain_adamw
from powertrain.training.setup import Setup, plain_setup
from powertrain.use.opening import OpenedModel, open_model
from powertrain.use.questions import schema_for, windows_of

MICRO_BATCH_TOKENS = 4096
MOST = 8                     # examples; enough to see a difference
LONGEST = 256                # tokens of each
TEXTS = (
    "The old lighthouse keeper climbed the stairs every evening, and when the lamp was lit he wrote the day's weather into "
    "a book: wind from the north-west, 17 knots, clear until midnight.",
    "def mean(values):\n    \"\"\"The arithmetic mean of some numbers.\"\"\"\n    if not values:\n"
    "        raise ValueError(\"nothing to average\")\n    return sum(values) / len(values)\n",
    "A train leaves at 9:40 and arrives at 12:05. It travels 290 km. How fast is it on average? It takes 145 minutes, so it "
    "travels 2 km a minute, which is 120 km/h.",
)
QUESTION, ANSWER = "How fast is the train on average?", "120 km/h"
ROW_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")


def score(opened: OpenedModel, cache: Path, tell: Tell) -> tuple[Evaluated, float | None]:
    """Return the loss of a run's model on all its held-out data, in the run's precision; for text also gzip's bits per byte."""
    recipe, run = run_recipe(opened)
    plan = plan_here(run, recipe, cache)
    if recipe.method != "scratch":
        store = held_out_examples(opened, recipe, cache, tell)
        return _evaluate(opened.model, _with_reference(recipe, store.validation, plan, tell), plan,
                         objective=objective_of(recipe)), None
    tell(ReadingData(source=", ".join(recipe.data.sources)))
    texts = open_store(recipe.data, seed=recipe.seed, cache=cache)
    if len(texts.validation) < 2:
        raise nothing_held_out(run, recipe)
    blocks = evaluation_blocks(texts.validation, recipe.data.block)
    found = _evaluate(opened.model, blocks, plan, len(texts.validation) / texts.validation_bytes)
    return found, 8 * texts.validation_text_gzip_bytes / texts.validation_bytes


def score_source(opened: OpenedModel, source: str, cache: Path, tell: Tell) -> tuple[Evaluated, float | None]:
    """Return the loss on any data in fp32: of examples over their trained tokens; of text in blocks of the model's context.

    For text the second value is gzip's bits per byte.
    """
    examples = examples_in(opened, source, cache, tell)
    if examples is not None:
        recipe = recipe_for(opened)
        compared = _with_reference(recipe, examples, Plan((), ()), tell)
        return _evaluate(opened.model, compared, Plan((), ()), objective=objective_of(recipe)), None
    if opened.task == REWARD:
        raise WrongUse(f"{source} is text, which a reward model cannot compare; give rows with prompt, chosen and rejected")
    if opened.task != "causal":
        raise WrongUse(f"{source} is text, which a {opened.task} model does not continue; give rows of "
                       f"{'sources and targets' if opened.task == 'seq2seq' else 'questions with their places in a context'}")
    text = "".join(document.text for document in read_documents(source, cache=cache))
    tokens = np.asarray(opened.tokenizer.encode(text))
    if len(tokens) < 2:
        raise WrongUse(f"{source} has {len(tokens)} tokens; at least 2 are needed to predict one from another")
    blocks, size_bytes = evaluation_blocks(tokens, opened.context or DEFAULT_LENGTH), len(text.encode())
    found = _evaluate(opened.model, blocks, Plan((), ()), len(tokens) / size_bytes)
    return found, 8 * len(gzip.compress(text.encode(), 9, mtime=0)) / size_bytes


def plan_here(run: Path, recipe: Recipe, cache: Path) -> Plan:
    """Return the run's plan; on another kind of device than the run's, the plan that its model and data get here."""
    stored, found = from_json(read_json(run / "plan.json")), read_json(run / "facts.json", having="hardware")
    hardware = read_hardware(cache, measure=False)
    if is_like(hardware, found["hardware"]):
        return stored
    facts = replace(facts_from_json(found), hardware=hardware, software=read_software(hardware))
    try:
        return make_plan(facts, recipe, 1)
    except PinError:                         # of a technique that this device does not have
        return make_plan(facts, recipe.model_copy(update={"techniques": {}}), 1)


# ------------------------------------------------------------------------------------------------ which examples


def run_recipe(opened: OpenedModel) -> tuple[Recipe, Path]:
    """Return the recipe and the folder of the run that was opened. Raises WrongUse if it is not a run."""
    recipe, run = opened.found.recipe, opened.found.run
    if recipe is None or run is None:
        raise WrongUse(f"{opened.found.path} is a model without a run, so it has no held-out text; name data with --data PATH")
    return recipe, run


def held_out_examples(opened: OpenedModel, recipe: Recipe, cache: Path, tell: Tell) -> ExampleStore:
    """Return the examples of a run, of which `validation` was held out. The base is read from where it was found now."""
    model = recipe.model.model_copy(update={"path": str(opened.found.folder)})
    store = open_recipe_examples(recipe.model_copy(update={"model": model}), cache, tell)
    if not len(store.validation):
        raise nothing_held_out(opened.found.path, recipe)
    return store


def nothing_held_out(run: Path, recipe: Recipe) -> WrongUse:
    return WrongUse(f"the run {run} held nothing out (data.validation_share={recipe.data.validation_share:g}); name data with "
                    "--data PATH")


def recipe_for(opened: OpenedModel) -> Recipe:
    """Return the recipe of the run that was opened; of a model without one, the default with the objective of its head."""
    if opened.found.recipe is not None:
        return opened.found.recipe
    return Recipe(objective=ObjectiveRecipe(name="reward")) if opened.task == REWARD else Recipe()


def examples_in(opened: OpenedModel, source: str, cache: Path, tell: Tell) -> Sequence[Example] | None:
    """Return the examples in `source`, read like the run's own data if there is a run; None where `source` is text."""
    recipe = recipe_for(opened)
    data, may_be_text = recipe.data, recipe.method == "scratch" and opened.task != REWARD
    if may_be_text and Path(source).suffix.lower() not in ROW_FILES:
        return None
    rows = [row for row in read_rows(source, cache=cache, split=data.split, most=ROWS_LOOKED_AT) if isinstance(row, Row)]
    schema, _ = schema_for(opened, rows, objective_of(recipe).rows)
    if may_be_text and schema.kind == "text":
        return None
    length = min(opened.context or DEFAULT_LENGTH, data.max_length or DEFAULT_LENGTH)
    of_source = data.model_copy(update={
        "source": source, "format": schema.name, "max_length": length, "long_examples": data.long_examples or "cut",
        "max_examples": None, "weights": None, "validation_source": None, "validation_share": 0.0})
    return open_examples(of_source, tokenizer_folder=opened.found.tokenizer_folder, cache=cache, task=opened.task, tell=tell,
                         learns=objective_of(recipe).rows,
                         decoder_start=decoder_start(opened.found.folder) if opened.task == "seq2seq" else None).training


def _evaluate(model: Model, examples: Sequence[Example], plan: Plan, tokens_per_byte: float | None = None,
              objective: Objective = NEXT_TOKEN) -> Evaluated:
    """Return the mean loss over the examples' targets, or over their pairs."""
    return evaluate(_setup(model, examples, plan, objective), examples, tokens_per_byte=tokens_per_byte)


def _setup(model: Model, examples: Sequence[Example], plan: Plan, objective: Objective) -> Setup:
    """Return a setup for forward passes: of the plan it has what changes these, so that a run's own loss comes out the same."""
    longest = max(example.tokens for example in examples)
    setup = plain_setup(model, examples, collate, train_batch_size=max(1, MICRO_BATCH_TOKENS // longest), seed=0,
                        optimizer=plain_adamw(0.0, (0.9, 0.95), 1e-8), objective=objective)
    forward = Plan(tuple(step for step in plan.steps if step.technique.touches & {"precision", "attention"}), ())
    return apply_plan(replace(setup, attention=sdpa_attention), forward)


def _with_reference(recipe: Recipe, examples: Sequence[Example], plan: Plan, tell: Tell) -> Sequence[Example]:
    """Return compared examples with the scores of the run's reference, which is the model that it began with."""
    objective, path = objective_of(recipe), recipe.model.adapter or recipe.model.path
    if not objective.has_reference or path is None:
        return examples
    tell(ScoringReference(examples=len(examples)))
    reference = open_model(path, revision=recipe.model.revision)
    values = scored(_setup(reference.model, examples, plan, objective), examples)
    return [replace(example, reference=(first, second)) for example, (first, second) in
            zip((one for one in examples if isinstance(one, Compared)), values.tolist(), strict=True)]


# ------------------------------------------------------------------------------------------------ to compare two models


def real_examples(opened: OpenedModel, cache: Path, tell: Tell) -> tuple[Sequence[Example], str]:
    """Return some examples and their source. A run whose data is gone is compared on the built-in text."""
    recipe = opened.found.recipe
    if recipe is not None:
        try:
            if recipe.method != "scratch":
                store = held_out_examples(opened, recipe, cache, tell)
                return ([_document(example) for example in store.validation[:MOST]],
                        f"{min(MOST, len(store.validation))} examples that the run held out")
            tokens = open_store(recipe.data, seed=recipe.seed, cache=cache).validation
            length = min(LONGEST, opened.context or LONGEST, max(1, len(tokens)))
            pieces = [tokens[start:start + length] for start in range(0, len(tokens) - length + 1, length)][:MOST]
            if pieces:
                return [_read(piece.tolist()) for piece in pieces], "text that the run held out"
        except WrongUse as error:
            tell(Phase(message=f"the run's own data cannot be used: {error}"))
    return _built_in(opened), "a built-in text"


def _document(example: Example) -> Example:
    """Return the example, or of compared answers the first one's document."""
    return example.documents[0] if isinstance(example, Compared) else example


def _built_in(opened: OpenedModel) -> list[Example]:
    if opened.task == "seq2seq":
        start = decoder_start(opened.found.folder)
        return [Example(np.array([start, *opened.prompt_ids(ANSWER)], dtype=np.int64), np.full(1, IGNORE),
                        source=np.array(opened.prompt_ids(text), dtype=np.int64)) for text in TEXTS]
    if opened.task == "span":
        sample = Span(QUESTION, TEXTS[-1], (), ())
        return [window.example for window in windows_of(opened, sample)]
    length = min(LONGEST, opened.context or LONGEST)
    try:
        found = [opened.prompt_ids(text) for text in TEXTS]
        if opened.has_template:
            found.append(opened.conversation_ids([Message("user", QUESTION)])[1])
    except (WrongUse, BadRow):               # a char tokenizer knows the characters of its own text only
        rows = opened.model.config.vocabulary if isinstance(opened.model, Decoder) else 1
        found = [[token % rows for token in range(length)]]
    return [_read(ids[:length]) for ids in found]


def _read(ids: Sequence[int]) -> Example:
    return Example(np.array(ids, dtype=np.int64), np.full(len(ids), IGNORE, dtype=np.int64))
