"""Facts of the training data: blocks of a token store's text, or the examples of an example store."""

import math

import numpy as np

from powertrain.data.example import count_blocks
from powertrain.data.examples.store import ExampleStore, refuse_no_training
from powertrain.data.store import TokenStore
from powertrain.records import DataFacts
from powertrain.shapes import quantiles_of_counts


def data_facts(store: TokenStore, *, block: int, stride: int, train_batch_size: int) -> DataFacts:
    """Return the facts of `store` cut into blocks of `block` predicted tokens, one every `stride` tokens."""
    return DataFacts(
        source=store.source, digest=store.digest, documents=store.documents, characters=store.characters,
        text_bytes=store.text_bytes, tokenizer=store.tokenizer.kind, vocabulary=store.tokenizer.vocabulary,
        train_tokens=len(store.train), validation_tokens=len(store.validation),
        validation_bytes=store.validation_bytes, block=block, stride=stride,
        examples=count_blocks(len(store.train), block, stride), train_batch_size=train_batch_size,
        length_quantiles=dict(store.length_quantiles),
    )


def example_facts(store: ExampleStore, *, train_batch_size: int) -> DataFacts:
    """Return the facts of `store`'s examples, which differ in length; documents are rows, whose characters nobody counts.

    Raises WrongUse if there is no example to train on.
    """
    refuse_no_training(store)
    epoch = store.epoch
    counts, validation = epoch.training_lengths, epoch.validation_lengths
    tokens, examples = int(counts @ np.arange(len(counts))), len(epoch.training)
    block = math.ceil(tokens / examples)
    return DataFacts(
        source=", ".join(store.sources), digest=epoch.digest, documents=store.counts["rows"], characters=0, text_bytes=0,
        tokenizer=store.tokenizer.kind, vocabulary=store.tokenizer.vocabulary,
        train_tokens=tokens, validation_tokens=int(validation @ np.arange(len(validation))), validation_bytes=0,
        block=block, stride=block, examples=examples, train_batch_size=train_batch_size,
        length_quantiles=quantiles_of_counts(counts), kind=store.kind, max_length=len(counts) - 1,
        trained_share=epoch.trained_tokens / tokens,
        cut_examples=store.counts.get("cut", 0), shared_share=epoch.repeated_tokens / tokens,
    )
