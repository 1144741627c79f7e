"""Mixing sources by tokens: which rows of each make the shares that were asked for, and a file that holds them.

Tokens are counted as training counts them, with the model's tokenizer and chat template. A source gives rows that the seed
draws, until their tokens come as near to its share as whole rows allow. A source that has too few gives all of them again,
where that is allowed. In the file the sources alternate by their shares, so that every stretch of it has about the same
mixture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from powertrain.data.documents import in_batches
from powertrain.data.examples.making import Reading, Work
from powertrain.data.examples.store import find_sources
from powertrain.data.order import draw_tokens
from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.row import BadRow, Row, Sample
from powertrain.data.rows.writing import check_output, write_rows
from powertrain.recipe.schema import DataRecipe, check_shares
from powertrain.records import WrongUse
from powertrain.records.json_files import write_json

RECORD = ".mix.json"
BATCH_ROWS, BATCH_CHARS = 1024, 500_000
NO_LIMIT = 2**31 - 1         # tokens of a row: whole rows are counted

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """What one source gives to a mixture."""

    source: str
    weight: float
    tokens: int                              # in the mixture
    rows: int
    all_tokens: int                          # that the source has
    all_rows: int
    bad_rows: int = 0

    @property
    def passes(self) -> float:
        """Return how often the mixture has a row of the source, on average."""
        return self.tokens / max(1, self.all_tokens)


def mix(out: Path, sources: Sequence[str], weights: Sequence[float], *, tokenizer_folder: Path, cache: Path, seed: int = 42,
        tokens: int | None = None, repeat: bool = False, split: str | None = None) -> list[Part]:
    """Write a mixture of `sources` as `out`, and a record of it beside it; return what each source gives.

    `tokens`: of the whole mixture; by default as many as there are without a row twice. Raises WrongUse for weights that do not
    sum to 1, sources of different shapes, too few tokens, and files that cannot be written.
    """
    check_shares(weights, sources, "weights")
    check_output(out, sources, split)
    data = DataRecipe(source=list(sources), max_length=NO_LIMIT, split=split)
    found = find_sources(data, tokenizer_folder=tokenizer_folder, cache=cache, task="causal")
    _check_alike(sources, found.works)
    counts = [_count(source, found.reading, work) for source, work in zip(sources, found.works, strict=True)]
    totals = [int(lengths.sum()) for lengths in counts]
    if empty := [source for source, total in zip(sources, totals, strict=True) if not total]:
        raise WrongUse(f"no row of {empty[0]} can be read, so it has no tokens to mix; `powertrain data clean` says why")
    wanted = _wanted(sources, weights, totals, tokens, repeat=repeat)
    times = [draw_tokens(lengths, want, seed, number)
             for number, (lengths, want) in enumerate(zip(counts, wanted, strict=True))]
    written = write_rows(out, lambda: _alternating(sources, counts, times, cache, split))
    parts = [Part(source, weight, int((lengths * often).sum()), int(often.sum()), total, int((lengths > 0).sum()),
                  int((lengths == 0).sum()))
             for source, weight, lengths, often, total in zip(sources, weights, counts, times, totals, strict=True)]
    assert written == sum(part.rows for part in parts)
    write_json(out.with_name(out.name + RECORD), {
        "event": "mixed", "output": str(out), "seed": seed, "rows": written, "tokens": sum(part.tokens for part in parts),
        "tokenizer": found.tokenizer.digest, "sources": [asdict(part) for part in parts]})
    return parts


def _check_alike(sources: Sequence[str], works: Sequence[Work]) -> None:
    """Raise WrongUse if the sources' rows have different shapes: one file is read by one."""
    first = works[0].schema
    for source, work in zip(sources, works, strict=True):
        if (work.schema.name, work.schema.columns) != (first.name, first.columns):
            raise WrongUse(f"{sources[0]} holds rows of the format {first.name} and {source} of {work.schema.name}, and one "
                           "file is read by one format; bring both to one shape first: powertrain data convert SOURCE FILE "
                           "--shape messages")


def _wanted(sources: Sequence[str], weights: Sequence[float], totals: Sequence[int], tokens: int | None, *,
            repeat: bool) -> list[float]:
    """Return the tokens that each source gives. Raises WrongUse if one has too few and may not give its rows again."""
    most = min(total / weight for total, weight in zip(totals, weights, strict=True))
    if tokens is not None and not repeat:
        for source, weight, total in zip(sources, weights, totals, strict=True):
            if weight * tokens > total:
                raise WrongUse(f"{source} has {total:,} tokens, and a weight of {weight:g} of {tokens:,} takes "
                               f"{weight * tokens:,.0f}; use --tokens {int(most)} or fewer, or --repeat to take its rows "
                               "several times")
    return [weight * (most if tokens is None else tokens) for weight in weights]


def _count(source: str, reading: Reading, work: Work) -> Tokens:
    """Return the tokens (rows,) of each row, in order: 0 for a row that cannot be read."""
    found: list[int] = []

    def samples() -> Iterator[Sample | None]:
        for row in reading.rows(source, None):
            try:
                yield work.schema.read(row.fields) if isinstance(row, Row) else None
            except BadRow:
                yield None

    for batch in in_batches(samples(), lambda sample: 0 if sample is None else len(repr(sample)),
                            most_characters=BATCH_CHARS, most_items=BATCH_ROWS):
        rows = iter(work.encoder.encode([sample for sample in batch if sample is not None]))
        encoded = [None if sample is None else next(rows) for sample in batch]
        found += [row.tokens if row is not None and row.examples else 0 for row in encoded]
    return np.array(found, dtype=np.int64)


def _alternating(sources: Sequence[str], counts: Sequence[Tokens], times: Sequence[Tokens], cache: Path,
                 split: str | None) -> Iterator[Row]:
    """Yield the drawn rows: each is of the source that is furthest behind its share."""
    streams = [_drawn_rows(source, lengths, often, cache, split)
               for source, lengths, often in zip(sources, counts, times, strict=True)]
    wanted = [int((lengths * often).sum()) for lengths, often in zip(counts, times, strict=True)]
    given = [0] * len(sources)
    while any(done < want for done, want in zip(given, wanted, strict=True)):
        number = min((number for number, want in enumerate(wanted) if given[number] < want),
                     key=lambda number: given[number] / wanted[number])
        row, tokens = next(streams[number])
        given[number] += tokens
        yield row


def _drawn_rows(source: str, lengths: Tokens, times: Tokens, cache: Path, split: str | None) -> Iterator[tuple[Row, int]]:
    """Yield the drawn rows of a source with their tokens, in the source's order, once for each time that they are drawn."""
    for again in range(int(times.max(initial=0))):
        for number, row in enumerate(read_rows(source, cache=cache, split=split)):
            if times[number] > again and lengths[number] and isinstance(row, Row):
                yield row, int(lengths[number])
