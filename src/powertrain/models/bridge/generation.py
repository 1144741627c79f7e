"""What a model behind the bridge is used for: scores of what follows a prompt, or the place of an answer.

The library's cache of keys and values is used where a model has one; without it the whole document is read again for each
token. Drawing tokens is use/generation.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from powertrain.models.bridge.model import BridgedModel
from powertrain.models.model import evaluating
from powertrain.records import Batch, WrongUse

LONGEST_ANSWER = 30                          # tokens; transformers' examples/pytorch/question-answering


class Reader:
    """A decoder that is fed a document in pieces and tells the scores of what comes next.

    The caller puts the model in evaluation, turns gradients off, and stays within the model's context.
    """

    def __init__(self, model: BridgedModel) -> None:
        self.model, self.network = model, model.network
        self.device = next(model.parameters()).device
        self.ids: list[int] = []
        self.cache: Any = None

    def __call__(self, fresh: Sequence[int]) -> Tensor:
        """Scores (V,) fp32 after these further tokens."""
        self.ids += fresh
        read = self.ids if self.cache is None else list(fresh)
        found = self.network(**self.inputs(torch.tensor([read], device=self.device)))
        self.cache = getattr(found, "past_key_values", None) if "past_key_values" in self.model.takes else None
        scores: Tensor = found.logits[0, -1].float()
        return scores

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": True}
        if "past_key_values" in self.model.takes:
            given["past_key_values"] = self.cache
        else:
            given["use_cache"] = False
        if "use_cache" not in self.model.takes and not self.model.takes_more:
            del given["use_cache"]
        if "attention_mask" in self.model.takes:
            given["attention_mask"] = torch.ones(1, len(self.ids), dtype=torch.int64, device=self.device)
        return given


class Writer(Reader):
    """The decoder of an encoder-decoder; its encoder reads the source once. Raises WrongUse for one beyond its positions."""

    def __init__(self, model: BridgedModel, source: Sequence[int]) -> None:
        super().__init__(model)
        if model.source_context is not None and len(source) > model.source_context:
            raise WrongUse(f"the prompt has {len(source)} tokens, and the encoder of this {self.network.config.model_type} "
                           f"reads {model.source_context}; shorten it")
        self.source = torch.tensor([list(source)], device=self.device)
        self.read: Any = None

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        mask = torch.ones_like(self.source)
        if self.read is None:
            self.read = self.network.get_encoder()(input_ids=self.source, attention_mask=mask)
        return {"encoder_outputs": self.read, "attention_mask": mask, "decoder_input_ids": tokens,
                "past_key_values": self.cache, "use_cache": True}


# ------------------------------------------------------------------------------------------------ answers in a context


def best_spans(model: BridgedModel, batch: Batch, *, context: Sequence[tuple[int, int]] | None = None,
               most_tokens: int = LONGEST_ANSWER,
               precision: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[tuple[int, int, float]]:
    """For each document the likeliest answer in its context: its first token, its last token, and its log-probability (nats).

    `context` is for each document the first token of the context and the first one behind it; by default where
    `batch.segments` is 1. The probability is over all places of the document, so that of several windows of one context
    the likeliest may be taken. Raises WrongUse for a model of another task, and for a document without a context.
    """
    if model.task != "span":
        raise WrongUse(f"this model is for {model.task}, which points at no answer; use a model for spans")
    if context is None:
        context = [_second_text(batch, document) for document in range(len(batch.lengths))]
    with evaluating(model), torch.no_grad(), precision():
        scores = model.hidden(batch).float().log_softmax(-1).cpu().view(len(batch.lengths), 2, -1)    # (B, 2, L)
    return [_best(pair, first, stop, most_tokens) for pair, (first, stop) in zip(scores, context, strict=True)]


def best_span(model: BridgedModel, batch: Batch, *, context: tuple[int, int] | None = None,
              most_tokens: int = LONGEST_ANSWER) -> tuple[int, int, float]:
    """`best_spans` of a batch of one document."""
    assert len(batch.lengths) == 1, f"{len(batch.lengths)} documents; use best_spans"
    return best_spans(model, batch, context=None if context is None else [context], most_tokens=most_tokens)[0]


def _best(scores: Tensor, first: int, stop: int, most_tokens: int) -> tuple[int, int, float]:
    starts, ends = scores[0, first:stop], scores[1, first:stop]
    allowed = torch.ones(stop - first, stop - first).triu().tril(most_tokens - 1) > 0
    pairs = (starts[:, None] + ends[None]).masked_fill(~allowed, -torch.inf)
    start, end = divmod(int(pairs.argmax()), stop - first)
    return first + start, first + end, float(pairs[start, end])


def _second_text(batch: Batch, document: int) -> tuple[int, int]:
    """Where the segments are 1. Raises WrongUse where they do not tell: some tokenizers number both texts 0."""
    begin = sum(batch.lengths[:document])
    found = [] if batch.segments is None else \
        batch.segments[begin:begin + batch.lengths[document]].nonzero().flatten().tolist()
    if not found:
        raise WrongUse("the tokens do not say where the context begins (this tokenizer does not number a pair's texts); give "
                       "`context`")
    return int(found[0]), int(found[-1]) + 1
