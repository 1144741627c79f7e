"""Real examples to compare two models on: what a run held out, or a built-in text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from powertrain.data.example import Example
from powertrain.data.rows.row import BadRow, Message, Span
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.providers import decoder_start
from powertrain.records import IGNORE, WrongUse
from powertrain.run.material import open_recipe_store
from powertrain.use.opening import OpenedModel
from powertrain.use.questions import windows_of
from powertrain.use.scoring import held_out_examples

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


def real_examples(opened: OpenedModel, cache: Path, say: Callable[[str], None]) -> tuple[Sequence[Example], str]:
    """Some examples, and what they are. A run whose data are not there any more is compared on the built-in text."""
    recipe = opened.found.recipe
    if recipe is not None:
        try:
            if recipe.method != "scratch":
                store = held_out_examples(opened, recipe, cache, say)
                return store.validation[:MOST], f"{min(MOST, len(store.validation))} examples that the run held out"
            tokens = open_recipe_store(recipe, cache).validation
            length = min(LONGEST, opened.context or LONGEST, max(1, len(tokens)))
            pieces = [tokens[start:start + length] for start in range(0, len(tokens) - length + 1, length)][:MOST]
            if pieces:
                return [_read(piece.tolist()) for piece in pieces], "text that the run held out"
        except WrongUse as error:
            say(f"the run's own data cannot be used ({str(error).partition(';')[0]})")
    return _built_in(opened), "a built-in text"


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
