"""Examples before they train: which rows were left out and why, lengths, the cost of padding, and one example in words."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from powertrain.data.example import Compared, Example
from powertrain.data.examples.preferences import SIDES
from powertrain.data.examples.store import ExampleStore, refuse_no_training
from powertrain.data.order import epoch_order
from powertrain.data.tokenizers import Tokenizer
from powertrain.records import IGNORE
from powertrain.records.findings import Bar, ExampleCheck, Piece, Problem
from powertrain.shapes import length_quantiles

BARS = 12                                    # of the histogram, at most
SHOWN = 20                                   # duplicates and shared prompts that are named, of however many there are
CHECKED = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

Lengths = npt.NDArray[np.int64]


def check_examples(store: ExampleStore, *, train_batch_size: int, seed: int) -> ExampleCheck:
    """Return all counts and findings. Raises WrongUse if there is no example to train on."""
    refuse_no_training(store)
    lengths = store.training.lengths
    sources = store.source_lengths[store.training.indices]
    grids = [lengths - sources, sources] if store.kind == "pair" else [lengths]
    orders = {"as drawn, padded": epoch_order(seed, 0, len(lengths)),
              "grouped by length, padded": np.argsort(lengths, kind="stable")}
    shares = {name: padding_share([grid[order] for grid in grids], train_batch_size) for name, order in orders.items()}
    duplicates = _duplicates(store)
    shared = _shared_prompts(store)
    return ExampleCheck(
        sources=store.sources, kind=store.kind, said=store.said, counts=store.counts,
        problems=(*store.problems,
                  *(Problem("duplicate", store.origins(second), f"repeats {store.origins(first)}")
                    for first, second in duplicates[:SHOWN].tolist()),
                  *(Problem("shared", store.origins(held), f"its prompt is trained on too, at {store.origins(learned)}")
                    for learned, held in shared[:SHOWN].tolist())),
        duplicates=len(duplicates), shared_prompts=len(shared), training_examples=len(lengths),
        validation_examples=len(store.validation), max_length=store.max_length,
        length_quantiles=length_quantiles(lengths, CHECKED),
        histogram=histogram(lengths), train_batch_size=train_batch_size,
        padding_shares={**shares, "packed end to end": 0.0},
        epoch_tokens=int(lengths.sum()), epoch_trained_tokens=store.epoch.trained_tokens)


def histogram(lengths: Lengths) -> tuple[Bar, ...]:
    """Return bars of equal width, a power of two, over all lengths."""
    width = 1
    while int(lengths.max()) // width - int(lengths.min()) // width >= BARS:
        width *= 2
    first = int(lengths.min()) // width
    counts = np.bincount(lengths // width - first).tolist()
    return tuple(Bar(number * width, (number + 1) * width - 1, count) for number, count in enumerate(counts, first))


def padding_share(grids: list[Lengths], batch: int) -> float:
    """Return the share of padding, if batches of `batch` examples in this order are padded to their longest.

    Each of `grids` is padded by itself: the lengths of an encoder's texts, and of a decoder's.
    """
    padded = real = 0
    for lengths in grids:
        starts = np.arange(0, len(lengths), batch)
        in_batch = np.diff(starts, append=len(lengths))
        padded += int((np.maximum.reduceat(lengths, starts) * in_batch).sum())
        real += int(lengths.sum())
    return 1 - real / max(1, padded)


def _duplicates(store: ExampleStore) -> npt.NDArray[np.int64]:
    """Return (duplicates, 2): the first example of a row, and of a later row that is equal to it."""
    _, firsts = np.unique(store.rows(), return_index=True)   # a long text gives several examples
    digests = store.column("digest")[firsts]
    _, earliest, group = np.unique(digests, return_index=True, return_inverse=True)
    first = earliest[group]
    later = np.flatnonzero(first != np.arange(len(digests)))
    return np.stack([firsts[first[later]], firsts[later]], axis=1).astype(np.int64)


def _shared_prompts(store: ExampleStore) -> npt.NDArray[np.int64]:
    """Return (prompts, 2): an example that trains and one that validates with the same prompt."""
    held = np.flatnonzero(store.in_validation)
    learned = np.flatnonzero(~store.in_validation)
    prompts = store.column("prompt")
    _, of_learned, of_held = np.intersect1d(prompts[learned], prompts[held], return_indices=True)
    return np.stack([learned[of_learned], held[of_held]], axis=1).astype(np.int64)


# ------------------------------------------------------------------------------------------------ one example in words


def pieces_of(store: ExampleStore, index: int) -> list[Piece]:
    """Return example `index` as the model sees it: its tokens in order, neighbours alike (trained or not) as one piece.

    The last target of a causal example, which is not an input of it, comes last.
    """
    example, tokenizer = store.example(index), store.tokenizer
    if store.kind == "span":
        first, last = (int(place) for place in example.targets)
        numbers = np.arange(len(example.inputs))
        return _pieces("model", example.inputs, (numbers >= first) & (numbers <= last), tokenizer)
    trained = example.targets != IGNORE
    if store.kind == "pair":
        assert example.source is not None
        source = _pieces("encoder", example.source, np.zeros(len(example.source), np.bool_), tokenizer)
        return source + _pieces("decoder", example.targets, trained, tokenizer)
    if isinstance(example, Compared) and store.kind == "comparison":
        return [piece for side, document in zip(SIDES, example.documents, strict=True)
                for piece in _pieces(side, document.inputs, document.targets != IGNORE, tokenizer)]
    if isinstance(example, Compared) and store.kind == "preference":
        return [piece for side, document in zip(SIDES, example.documents, strict=True)
                for piece in _document(side, document, tokenizer)]
    return _document("model", example, tokenizer)


def _document(reader: str, document: Example, tokenizer: Tokenizer) -> list[Piece]:
    ids = np.append(document.inputs, document.targets[-1])
    return _pieces(reader, ids, np.append(False, document.targets != IGNORE), tokenizer)


def _pieces(reader: str, ids: npt.NDArray[np.int64], trained: npt.NDArray[np.bool_], tokenizer: Tokenizer) -> list[Piece]:
    """Return runs of tokens, trained or not, with their texts.

    A text is what the decoded whole gains there, because some tokenizers drop the first space of any ids that they decode.
    """
    pieces: list[Piece] = []
    before = ""
    for start, stop in pairwise([0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]):
        so_far = tokenizer.decode(ids[:stop])
        text = so_far[len(before):] if so_far.startswith(before) else tokenizer.decode(ids[start:stop])
        pieces.append(Piece(reader, text, bool(trained[start])))
        before = so_far
    return pieces
