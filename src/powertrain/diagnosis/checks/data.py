"""Checks of the data: limits, size, cut examples, held-out text and overlapping blocks."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.situation import Situation
from powertrain.diagnosis.wording import told
from powertrain.records.findings import Finding, rule

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
        key, limit, read, unit = "data.max_chars", recipe.max_chars, data.characters, "characters"
    else:
        sources = 1 if isinstance(recipe.source, str) else len(recipe.source)
        key, read, unit = "data.max_examples", data.documents, "rows"
        limit = None if recipe.max_examples is None else sources * recipe.max_examples
    if limit is not None:
        yield told("data_limits.cuts_off" if read >= limit else "data_limits.idle", key=key, limit=limit, read=read, unit=unit)


@rule("fact: the number of examples")
def data_size(where: Situation) -> Iterator[Finding]:
    """The data has fewer examples than a step or a run uses."""
    data, steps = where.prepared.facts.data, where.prepared.total_steps
    examples, size = data.examples, data.train_batch_size
    epochs = steps * size / examples
    seen = f"{examples:,} examples, {size} per step, {steps:,} steps: {epochs:.3g} epochs"
    if size > examples:
        yield told("data_size.less_than_a_step", seen, speed=(1.0, size / examples), examples=examples, train_batch_size=size,
                   epochs=epochs)
    elif examples < FEW_EXAMPLES:
        yield told("data_size.few", seen, examples=examples, train_batch_size=size, epochs=epochs)
    if epochs > MANY_EPOCHS:
        yield told("data_size.many_epochs", seen, examples=examples, train_batch_size=size, epochs=epochs)


@rule("fact: the examples, tokenised")
def truncation(where: Situation) -> Iterator[Finding]:
    """Examples are cut at the length limit, so the model does not learn their ends."""
    data = where.prepared.facts.data
    if data.kind != "blocks" and data.cut_examples:
        share = data.cut_examples / max(1, data.examples)
        yield told("truncation.cut", severity="critical" if share > MANY_CUT else "moderate" if share > FEW_CUT else "low",
                   cut_share=share, limit=where.prepared.recipe.data.max_length or data.max_length, cut=data.cut_examples,
                   examples=data.examples)


@rule("documentation: 003's validation outside of the loop; 004's validation on training data")
def held_out(where: Situation) -> Iterator[Finding]:
    """No text is held out, or too little, so no evaluation shows whether the model learns or memorises."""
    tokens, share = where.prepared.facts.data.validation_tokens, where.prepared.recipe.data.validation_share
    if not len(where.prepared.material.held_out):
        yield told("held_out.nothing", tokens=tokens, share=share)
    elif tokens < FEW_HELD_OUT_TOKENS:
        yield told("held_out.little", tokens=tokens, share=share)


@rule("documentation: 003, whose windows start at every character")
def redundancy(where: Situation) -> Iterator[Finding]:
    """Blocks overlap, so one epoch visits each token several times."""
    data, recipe = where.prepared.facts.data, where.prepared.recipe
    if data.kind == "blocks" and data.redundancy > 1:
        by_epochs = recipe.max_steps is None and recipe.train_time_s is None
        yield told("redundancy.overlap", severity="moderate" if by_epochs and data.redundancy >= MANY_VISITS else "low",
                   visits=data.redundancy, block=data.block, stride=data.stride)
