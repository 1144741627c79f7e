"""Checks of the data: limits, size, cut examples, held-out text and overlapping blocks."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.situation import Situation
from powertrain.records.findings import Expected, Finding, Risk, finding, rule

FEW_EXAMPLES = 10            # fewer than these are an example of the format rather than a data set
MANY_EPOCHS = 10
FEW_CUT, MANY_CUT = 0.01, 0.1                # shares of the examples
FEW_HELD_OUT_TOKENS = 1000   # a loss over fewer tokens is mostly chance
MANY_VISITS = 8.0            # visits of each token in one epoch


@rule("documentation: 003's diagnose tool, dataset sizes against limits")
def data_limits(where: Situation) -> Iterator[Finding]:
    """A limit of the recipe cuts the data off, or is larger than the data."""
    data, recipe = where.prepared.facts.data, where.prepared.recipe.data
    if data.kind == "blocks":
        key, limit, found, unit = "data.max_chars", recipe.max_chars, data.characters, "characters"
    else:
        sources = 1 if isinstance(recipe.source, str) else len(recipe.source)
        key, found, unit = "data.max_examples", data.documents, "rows"
        limit = None if recipe.max_examples is None else sources * recipe.max_examples
    if limit is None:
        return
    seen, numbers = f"{key}={limit:,}, and {found:,} {unit} were read", {"limit": limit, "read": found}
    if found >= limit:
        yield finding("low", f"the data ends at {key}", f"{unit} beyond this limit are not trained on", seen, keys=(key,),
                      cure="raise the limit, or remove the key to train on everything", numbers=numbers)
    else:
        yield finding("low", f"{key} is larger than the data", "the limit has no effect", seen, cure="remove the key",
                      keys=(key,), numbers=numbers)


@rule("fact: the number of examples")
def data_size(where: Situation) -> Iterator[Finding]:
    """The data has fewer examples than a step or a run uses."""
    data, steps = where.prepared.facts.data, where.prepared.total_steps
    epochs = steps * data.train_batch_size / data.examples
    seen = f"{data.examples:,} examples, {data.train_batch_size} per step, {steps:,} steps: {epochs:.3g} epochs"
    numbers = {"examples": data.examples, "train_batch_size": data.train_batch_size, "epochs": epochs}
    if data.train_batch_size > data.examples:
        yield finding("critical", "a step has more examples than the data", "each step repeats examples, which costs time and "
                      "teaches nothing new", seen, cure="use a batch no larger than the data", numbers=numbers,
                      words=(f"train_batch_size={data.examples}",), risk=Risk(accuracy="low"),
                      expected=Expected("the same examples in less time", "formula: examples over batch",
                                        (1.0, data.train_batch_size / data.examples)))
    elif data.examples < FEW_EXAMPLES:
        yield finding("moderate", f"there are only {data.examples} examples", "a model memorises so few examples", seen,
                      cure="add data", numbers=numbers)
    if epochs > MANY_EPOCHS:
        yield finding("low", f"every example is seen {epochs:,.0f} times", "the held-out loss usually rises long before that",
                      seen, cure="train for fewer epochs, and watch the held-out loss", words=("num_train_epochs=3",),
                      numbers=numbers)


@rule("fact: the examples, tokenised")
def truncation(where: Situation) -> Iterator[Finding]:
    """Examples are cut at the length limit, so the model does not learn their ends."""
    data = where.prepared.facts.data
    if data.kind == "blocks" or not data.cut_examples:
        return
    share = data.cut_examples / max(1, data.examples)
    limit = where.prepared.recipe.data.max_length or data.max_length
    yield finding("critical" if share > MANY_CUT else "moderate" if share > FEW_CUT else "low",
                  f"{share:.1%} of the examples are cut", f"tokens beyond {limit:,} are not learned, and an answer without its "
                  "end teaches the model not to stop", f"{data.cut_examples:,} of {data.examples:,} examples",
                  cure="raise the limit if the model reads more tokens, or drop the long examples",
                  words=("data.long_examples=drop",), risk=Risk(accuracy="low"), numbers={"cut_share": share, "limit": limit},
                  expected=Expected("the model learns whole answers", "none"))


@rule("documentation: 003's validation outside of the loop; 004's validation on training data")
def held_out(where: Situation) -> Iterator[Finding]:
    """No text is held out, or too little, so no evaluation shows whether the model learns or memorises."""
    data, share = where.prepared.facts.data, where.prepared.recipe.data.validation_share
    seen = f"{data.validation_tokens:,} tokens are held out (data.validation_share={share})"
    if not len(where.prepared.material.held_out):
        yield finding("moderate", "no data is held out", "the run cannot evaluate, and no checkpoint is known to be the best",
                      seen, cure="hold some of the data out", words=("data.validation_share=0.05",))
    elif data.validation_tokens < FEW_HELD_OUT_TOKENS:
        yield finding("low", "very little data is held out", "a loss over so few tokens is mostly chance", seen,
                      cure="hold more of the data out", words=("data.validation_share=0.1",))


@rule("documentation: 003, whose windows start at every character")
def redundancy(where: Situation) -> Iterator[Finding]:
    """Blocks overlap, so one epoch visits each token several times."""
    data, recipe = where.prepared.facts.data, where.prepared.recipe
    if data.kind != "blocks" or data.redundancy <= 1:
        return
    by_epochs = recipe.max_steps is None and recipe.train_time_s is None
    yield finding("moderate" if by_epochs and data.redundancy >= MANY_VISITS else "low",
                  f"an epoch visits each token {data.redundancy:.3g} times", "an epoch takes that many times as long, and its "
                  "blocks are nearly alike", f"data.block={data.block}, data.stride={data.stride}",
                  cure="let the blocks follow each other without overlap", words=(f"data.stride={data.block}",),
                  numbers={"visits": data.redundancy},
                  expected=Expected(f"an epoch is {data.redundancy:.3g} times shorter", "formula: block over stride"))
