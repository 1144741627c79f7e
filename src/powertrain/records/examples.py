"""What is known about examples before they train: problems of rows, lengths, padding; and one example in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    kind: str                                # "bad", "untrained", "cut", "dropped", "boundary", "only_last"
    origin: str
    reason: str


@dataclass(frozen=True)
class Piece:
    reader: str                              # "model", "encoder" or "decoder"
    text: str
    trained: bool                            # these tokens are targets; of a span: they are the answer


@dataclass(frozen=True)
class Bar:
    first: int                               # tokens of the shortest example counted here
    last: int                                # and of the longest that could be
    examples: int


@dataclass(frozen=True)
class ExampleCheck:
    sources: tuple[str, ...]
    kind: str
    said: tuple[str, ...]                    # what was found by looking
    counts: Mapping[str, int]                # of rows: ExampleStore.counts
    problems: tuple[Problem, ...]            # the first rows of each kind
    duplicates: int                          # that repeat an earlier row
    shared_prompts: int                      # prompts that both sides have: possible with data.validation_source only
    training_examples: int                   # of an epoch, with weights
    validation_examples: int
    max_length: int
    length_quantiles: Mapping[str, int]      # tokens per training example
    histogram: tuple[Bar, ...]               # of training examples
    train_batch_size: int
    padding_shares: Mapping[str, float]      # batching -> the share of what is computed that is padding
    epoch_tokens: int                        # that the model reads, padding not counted
    epoch_trained_tokens: int

    @property
    def trained_share(self) -> float:
        return self.epoch_trained_tokens / max(1, self.epoch_tokens)
