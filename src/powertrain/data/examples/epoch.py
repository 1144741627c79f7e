"""What an epoch of a store trains and what validates, with all that a start counts of them.

    <cache>/epochs/<key>/  training.bin validation.bin                  numbers of examples, int32 or int64
                           training_lengths.bin validation_lengths.bin  int64: how many examples have each number of tokens
                           meta.json                                    the other fields of Epoch

Of many examples these are found once and mapped by later starts, which then take no longer than those on few. The key is a
digest of all that decides them: the parts, the split, the weights and the seed.
"""

import hashlib
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from powertrain.data.examples.part import Part
from powertrain.data.examples.sides import AT_ONCE, held_out, is_among, joined, places_of, shared, weighted
from powertrain.data.order import SORTED_MOST
from powertrain.data.publishing import is_whole, key_of, mapped, publish, read_meta
from powertrain.recipe.schema import DataRecipe
from powertrain.records import WrongUse

FORMAT = 1
Numbers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Epoch:
    training: Numbers                        # examples: with weights, some several times or not at all
    validation: Numbers                      # examples, in order
    training_lengths: Numbers                # how many examples have each number of tokens, from 0 to the most
    validation_lengths: Numbers
    digest: str                              # sha256 of all rows, where examples end, and the tokenizer
    trained_tokens: int                      # targets of the examples that train
    repeated_tokens: int                     # of their prompts, where a pair holds its prompt twice
    in_both: int                             # prompts of a validation source that are trained on too
    said: str                                # how the tokens are shared among the sources, where a recipe says so

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the arrays into `folder`, and return meta.json."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        for name, array in arrays.items():
            array.tofile(folder / f"{name}.bin")
        return {"arrays": {name: array.dtype.str for name, array in arrays.items()},
                "fields": {name: value for name, value in vars(self).items() if name not in arrays}}


def open_epoch(parts: Sequence[Part], data: DataRecipe, tokenizer: str, *, seed: int, cache: Path) -> Epoch:
    """Return the epoch of a recipe's parts, that of its validation source last; `tokenizer` is the digest of theirs.

    Raises WrongUse where the validation share cannot be held out.
    """
    if sum(map(len, parts)) <= SORTED_MOST:
        return _find(parts, data, tokenizer, seed)
    folder = cache / "epochs" / key_of([
        FORMAT, [part.folder.name for part in parts], tokenizer, list(data.sources), data.validation_source is not None,
        data.validation_share, data.weights, data.shares, seed])
    if is_whole(folder):
        meta = read_meta(folder)
        arrays: dict[str, Any] = {name: mapped(folder / f"{name}.bin", np.dtype(dtype))
                                  for name, dtype in meta["arrays"].items()}
        return Epoch(**arrays, **meta["fields"])
    found = _find(parts, data, tokenizer, seed)
    with suppress(WrongUse):                 # a cache that may only be read: the next start finds it again
        publish(folder, found.write)
    return found


def _find(parts: Sequence[Part], data: DataRecipe, tokenizer: str, seed: int) -> Epoch:
    prompts = joined([part.records["prompt"] for part in parts])
    begins, in_both, said = np.cumsum([0, *map(len, parts)]).tolist(), 0, ""
    if data.validation_source:
        last = begins[-2]
        in_validation = np.arange(begins[-1]) >= last
        in_both = int(np.count_nonzero(is_among(np.unique(prompts[last:]), np.sort(prompts[:last]))))
    else:
        in_validation = held_out(prompts, data.validation_share, seed)
    trains = [places_of(~in_validation[first:end], first) for first, end in itertools.pairwise(begins[:len(data.sources) + 1])]
    if data.shares is None:
        training = weighted(trains, data.weights, seed)
    else:
        lengths = lengths_of(parts, np.arange(begins[-1]))
        training = shared(data.shares, trains, lengths, seed)
        said = _shares_said(data.sources, trains, lengths, training)
    validation, twice = places_of(in_validation), parts[0].kind in ("preference", "comparison")
    return Epoch(training, validation, _length_counts(parts, training), _length_counts(parts, validation),
                 _digest(tokenizer, parts), _sum_of(joined([part.records["trained_tokens"] for part in parts]), training),
                 _sum_of(joined([part.records["answer"] for part in parts])[:, 1], training) if twice else 0, in_both, said)


def lengths_of(parts: Sequence[Part], indices: Numbers) -> npt.NDArray[np.int64]:
    """Return the tokens (n,) that the model reads of these examples, an encoder's included."""
    found, first = np.empty(len(indices), np.int64), 0
    for part in parts:
        inside = (indices >= first) & (indices < first + len(part))
        found[inside] = part.lengths_of(indices[inside] - first)
        first += len(part)
    return found


def _length_counts(parts: Sequence[Part], indices: Numbers) -> npt.NDArray[np.int64]:
    total = np.zeros(1, np.int64)
    for first in range(0, len(indices), AT_ONCE):
        counts = np.bincount(lengths_of(parts, indices[first:first + AT_ONCE]), minlength=len(total))
        counts[:len(total)] += total
        total = counts
    return total


def _sum_of(column: Numbers, indices: Numbers) -> int:
    return sum(int(column[indices[first:first + AT_ONCE]].sum()) for first in range(0, len(indices), AT_ONCE))


def _digest(tokenizer: str, parts: Sequence[Part]) -> str:
    """Return the sha256 (hex) of the content of all examples: the same files at another path give the same."""
    digest = hashlib.sha256(tokenizer.encode())
    for part in parts:
        for column in ("digest", "end", "trained_end"):
            for first in range(0, len(part), AT_ONCE):
                digest.update(part.records[column][first:first + AT_ONCE].tobytes())
    return digest.hexdigest()


def _shares_said(sources: Sequence[str], trains: Sequence[Numbers], lengths: npt.NDArray[np.int64], training: Numbers) -> str:
    """Return the sentence that states the tokens of an epoch by source."""
    times = np.bincount(training, minlength=len(lengths))
    total = max(1, int(lengths[training].sum()))
    said = []
    for source, examples in zip(sources, trains, strict=True):
        tokens, whole = int((times * lengths)[examples].sum()), int(lengths[examples].sum())
        said.append(f"{source} {tokens / total:.1%} ({tokens:,}, {tokens / max(1, whole):.2f} times its own {whole:,})")
    return f"an epoch has {total:,} tokens: {'; '.join(said)}"
