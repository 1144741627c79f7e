"""What is trained on, as the token store and the recipe's block, stride and batch give it."""

from __future__ import annotations

from powertrain.data.store import TokenStore
from powertrain.records import DataFacts, WrongUse


def data_facts(store: TokenStore, *, block: int, stride: int, train_batch_size: int) -> DataFacts:
    """The facts of `store` cut into blocks of `block` predicted tokens, one every `stride` tokens."""
    return DataFacts(
        source=store.source, digest=store.digest, documents=store.documents, characters=store.characters,
        text_bytes=store.text_bytes, tokenizer=store.tokenizer.kind, vocabulary=store.tokenizer.vocabulary,
        train_tokens=len(store.train), validation_tokens=len(store.validation),
        validation_bytes=store.validation_bytes, block=block, stride=stride,
        examples=training_examples(len(store.train), block, stride), train_batch_size=train_batch_size,
        length_quantiles=dict(store.length_quantiles),
    )


def training_examples(train_tokens: int, block: int, stride: int) -> int:
    """How many blocks fit: those whose `block` inputs and one further target lie within the training tokens.

    Block i starts at i * stride; it counts if i * stride + block + 1 <= train_tokens.
    """
    if block < 1 or stride < 1:
        raise WrongUse(f"blocks of {block} tokens every {stride} tokens: both must be at least 1")
    return max(0, (train_tokens - block - 1) // stride + 1)
