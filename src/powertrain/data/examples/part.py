"""The tokenised examples of one source, on disk, written row by row and read as they are asked for.

    <cache>/examples/<key>/  examples.bin    one RECORD for each example
                             tokens.bin      their ids end to end, little-endian uint16 or uint32
                             trained.bin     int32 pairs: ranges of an example's ids that are targets
                             sources.bin     what an encoder reads, end to end (pairs only)
                             segments.bin    uint8 for each id (spans only)
                             meta.json       the counts, the first rows of each problem, where rows come from

All are memory-mapped: what a process holds does not grow with the data.
"""

import hashlib
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from powertrain.data.documents import in_batches
from powertrain.data.example import Compared, Example
from powertrain.data.examples.encoding import Encoded, EncodedRow, Encoder, prompt_of
from powertrain.data.publishing import mapped, read_meta
from powertrain.data.rows.row import BadRow, Conversation, Rejected, Row, Sample
from powertrain.data.rows.schemas import Schema
from powertrain.data.shards import PieceWriter
from powertrain.data.tokenizers import token_dtype
from powertrain.records import IGNORE
from powertrain.records.findings import Problem
from powertrain.records.phases import Tell, Tokenising

# the *_end columns say where the example ends in the other files; it starts where the one before it ends
RECORD = np.dtype([("end", "<i8"), ("trained_end", "<i8"), ("source_end", "<i8"), ("trained_tokens", "<i4"), ("row", "<i8"),
                   ("prompt", "<u8"), ("digest", "<u8"), ("place", "<i4"), ("number", "<i8"), ("answer", "<i4", (2,)),
                   ("margin", "<f4")])
FILES = ("examples", "tokens", "trained", "sources", "segments")     # each with the ending .bin
PROBLEMS_KEPT = 20                           # of each kind, with their origin: enough to find out what is wrong


class Part:
    """The stored examples of one source: the files of a whole folder, mapped into memory."""

    def __init__(self, folder: Path):
        meta = read_meta(folder)
        dtype = token_dtype(meta["vocabulary"])
        self.folder = folder
        self.kind: str = meta["kind"]                                        # of samples: rows/formats.py
        self.schema: str = meta["schema"]                                    # the name of the format of the rows
        self.said: str = meta["said"]                                        # the sentence that states how rows were read
        self.counts: Mapping[str, int] = meta["counts"]
        self.problems = [Problem(*problem) for problem in meta["problems"]]
        self.places: Sequence[str] = meta["places"]                          # beginnings of origins
        self.records = mapped(folder / "examples.bin", RECORD)               # (N,)
        self.tokens = mapped(folder / "tokens.bin", dtype)
        self.trained = mapped(folder / "trained.bin", np.dtype("<i4")).reshape(-1, 2)
        self.sources = mapped(folder / "sources.bin", dtype)
        self.segments = mapped(folder / "segments.bin", np.dtype("u1"))

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def source_lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.records["source_end"], prepend=0)

    def lengths_of(self, indices: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the tokens (n,) that the model reads of each of these examples, an encoder's included."""
        to_predict = {"pair": 0, "span": 0, "preference": 2, "comparison": 0}.get(self.kind, 1)        # and not read
        return self._spans("end", indices) - to_predict + self._spans("source_end", indices)

    def _spans(self, column: str, indices: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        ends = self.records[column]
        found: npt.NDArray[np.int64] = ends[indices] - np.where(indices > 0, ends[indices - 1], 0)
        return found

    def origin(self, index: int) -> str:
        record = self.records[index]
        number = int(record["number"])
        return self.places[int(record["place"])] + (str(number) if number >= 0 else "")

    def example(self, index: int, decoder_start: int | None, max_length: int) -> Example:
        """Return example `index`; a pair's decoder begins with the token `decoder_start`."""
        ids = self.tokens[self._slice("end", index)].astype(np.int64)
        if self.kind == "span":
            return Example(ids, self.records[index]["answer"].astype(np.int64),
                           segments=self.segments[self._slice("end", index)].astype(np.int64))
        if self.kind == "pair":
            assert decoder_start is not None
            return Example(np.concatenate([[decoder_start], ids[:-1]]), ids,
                           source=self.sources[self._slice("source_end", index)].astype(np.int64))
        trained = self.trained[self._slice("trained_end", index)].tolist()
        if self.kind in ("preference", "comparison"):
            length, shared = self.records[index]["answer"].tolist()
            first, second = (_scored(ids[:length]), _scored(ids[length:])) if self.kind == "comparison" else (
                _causal(ids[:length], trained),
                _causal(ids[length:], [(start - length, stop - length) for start, stop in trained]))
            return Compared(np.concatenate([first.inputs, second.inputs]), np.concatenate([first.targets, second.targets]),
                            documents=(first, second), shared=shared, margin=float(self.records[index]["margin"]))
        document = _causal(ids, trained)
        if self.kind != "rating":
            return document
        desirable, start = self.records[index]["answer"].tolist()
        return Compared(document.inputs, document.targets, desirable=bool(desirable),
                        documents=(document, self._with_other_answer(index, ids[:start], max_length)))

    def _with_other_answer(self, index: int, prompt: npt.NDArray[np.int64], max_length: int) -> Example:
        """Return a rated example's prompt with the answer of the example before it: KTO estimates its KL term by these."""
        ids = self.tokens[self._slice("end", index - 1 if index else len(self) - 1)].astype(np.int64)
        start = int(self.records[index - 1]["answer"][1])
        whole = np.concatenate([prompt, ids[start:]])[:max_length + 1]
        return _causal(whole, [(len(prompt), len(whole))])

    def _slice(self, column: str, index: int) -> slice:
        ends = self.records[column]
        return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


def _causal(ids: npt.NDArray[np.int64], trained: Iterable[tuple[int, int]]) -> Example:
    """Return the example of these ids, in which the ranges `trained` are targets; what lies outside of the ids is left out."""
    targets = np.full(len(ids) - 1, IGNORE, dtype=np.int64)
    for start, stop in trained:
        if 0 < start < len(ids):
            targets[start - 1:stop - 1] = ids[start:stop]
    return Example(ids[:-1], targets)


def _scored(ids: npt.NDArray[np.int64]) -> Example:
    """Return the document of these ids, with its last token as the place whose row is scored."""
    targets = np.full(len(ids), IGNORE, dtype=np.int64)
    targets[-1] = ids[-1]
    return Example(ids, targets)


# ------------------------------------------------------------------------------------------------ writing

BATCH_CHARS, BATCH_ROWS = 500_000, 4096      # the library keeps about 300 bytes per token of a batch, offsets included
SAY_EVERY_S = 4.0
SHORT_NUMBER = 18            # digits
NUMBERED = re.compile(r"(.*?)(0|[1-9]\d{0,17})", re.DOTALL)


@dataclass(frozen=True)
class Read:
    """A row that could be read."""

    sample: Sample
    origin: str
    characters: int                          # about
    digest: int                              # of the whole sample


class PartWriter:
    """The files of one part, and what is counted while they are written."""

    def __init__(self, folder: Path, vocabulary: int):
        self.folder, self.vocabulary = folder, vocabulary
        self.dtype = token_dtype(vocabulary)
        self.files: dict[str, IO[bytes]] = {name: (folder / f"{name}.bin").open("wb") for name in FILES}
        self.written: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.problems: list[Problem] = []
        self.places: dict[str, int] = {}

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def problem(self, kind: str, origin: str, reason: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= PROBLEMS_KEPT:
            self.problems.append(Problem(kind, origin, reason))

    def add(self, batch: Sequence[Read | Rejected], rows: Sequence[EncodedRow]) -> None:
        """Write rows that follow each other; `rows` are the results of those that could be read, in the same order."""
        encoded = iter(rows)
        examples: list[Encoded] = []
        columns: list[tuple[int, int, int, int, int]] = []             # row, prompt, digest, place, number
        self.counts["rows"] += len(batch)
        for read in batch:
            if isinstance(read, Rejected):
                self.problem("bad", read.origin, read.reason)
                continue
            row = next(encoded)
            self._count(read.origin, row)
            if row.examples:
                column = (self.counts["good"] - 1, digest64(prompt_of(read.sample)), read.digest, *self._place(read.origin))
                columns += [column] * len(row.examples)
                examples += row.examples
        if not examples:
            return
        records = np.zeros(len(examples), RECORD)
        for name, values in zip(("row", "prompt", "digest", "place", "number"), zip(*columns, strict=True), strict=False):
            records[name] = np.array(values, RECORD[name])
        records["end"] = self._write("tokens", [example.ids for example in examples], self.dtype)
        records["trained_end"] = self._write("trained", [example.trained for example in examples], np.dtype("<i4"))
        records["source_end"] = self._write("sources", [example.source for example in examples], self.dtype)
        self._write("segments", [example.segments for example in examples], np.dtype("u1"))
        records["trained_tokens"] = [example.trained_tokens for example in examples]
        records["answer"] = [example.answer or (0, 0) for example in examples]
        records["margin"] = [example.margin for example in examples]
        self.files["examples"].write(records.tobytes())
        self.counts["examples"] += len(records)

    def append(self, files: Mapping[str, bytes], told: Mapping[str, Any]) -> None:
        """Append the rows that another writer wrote: the content of its files, and the values that its `told` returned."""
        records = np.frombuffer(files["examples"], RECORD).copy()
        for column, name in (("end", "tokens"), ("trained_end", "trained"), ("source_end", "sources")):
            records[column] += self.written[name]
        records["row"] += self.counts["good"]
        if len(records):
            places = [self.places.setdefault(place, len(self.places)) for place in told["places"]]
            records["place"] = np.array(places, RECORD["place"])[records["place"]]
        for name, content in {**files, "examples": records.tobytes()}.items():
            self.files[name].write(content)
        self.written.update(told["written"])
        for problem in (Problem(*found) for found in told["problems"]):
            if sum(known.kind == problem.kind for known in self.problems) < PROBLEMS_KEPT:
                self.problems.append(problem)
        longest = max((counts["longest"] for counts in (self.counts, told["counts"]) if "longest" in counts), default=None)
        self.counts.update(told["counts"])
        if longest is not None:
            self.counts["longest"] = longest

    def told(self) -> dict[str, Any]:
        """Return the values that `append` needs besides the files."""
        return {"counts": dict(sorted(self.counts.items())), "places": list(self.places), "written": dict(self.written),
                "problems": [[problem.kind, problem.origin, problem.reason] for problem in self.problems]}

    def meta(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of meta.json: what is known `about` the part beforehand, and what was counted."""
        return {**about, **{name: value for name, value in self.told().items() if name != "written"}}

    def _count(self, origin: str, row: EncodedRow) -> None:
        if row.refused == "bad":
            self.problem("bad", origin, row.reason)
            return
        self.counts["good"] += 1
        self.counts["longest"] = max(self.counts["longest"], row.tokens)
        self.counts["too_long"] += row.too_long
        self.counts["untrained_end"] += row.untrained_end
        if row.refused:
            self.problem({"long": "dropped"}.get(row.refused, row.refused), origin, row.reason)
            self.counts["tokens_lost"] += row.tokens if row.too_long else 0
            return
        self.counts["tokens_lost"] += row.lost
        if row.lost:
            self.problem("cut", origin, f"{row.tokens} tokens, of which the last {row.lost} are cut off")
        if row.boundary:
            self.problem("boundary", origin, "its prompt alone has other tokens than before the answer")
        if row.rewritten:
            self.problem("rewritten", origin, "the chat template rewrites earlier turns, and these are not trained")

    def _write(self, name: str, values: Sequence[Sequence[Any] | npt.NDArray[Any] | None],
               dtype: np.dtype[Any]) -> npt.NDArray[np.int64]:
        """Append each example's values, and return where they end, counted in values (in ranges for "trained")."""
        found = [some for some in values if some is not None and len(some)]
        if found:
            self.files[name].write(np.concatenate(found).astype(dtype).tobytes())
        lengths = np.array([0 if some is None else len(some) for some in values], dtype=np.int64)
        ends = lengths.cumsum() + self.written[name]
        self.written[name] += int(lengths.sum())
        return ends

    def _place(self, origin: str) -> tuple[int, int]:
        """Return an origin as the number of its beginning in `places`, and the number at its end: -1 where it has none."""
        beginning, _, end = origin.rpartition(":")
        if end.isascii() and end.isdigit() and end[0] != "0" and len(end) < SHORT_NUMBER:
            beginning, number = f"{beginning}:", int(end)            # the usual case, ten times as fast
        else:
            found = NUMBERED.fullmatch(origin)
            beginning, number = (found[1], int(found[2])) if found else (origin, -1)
        return self.places.setdefault(beginning, len(self.places)), number


def write_rows(writer: PartWriter, rows: Iterable[Row | Rejected], schema: Schema, encoder: Encoder,
               tell: Callable[[PartWriter], None] = lambda _: None) -> None:
    """Add the examples of `rows` to `writer`: a thread tokenises one batch while the next one is read."""
    waiting: deque[tuple[list[Read | Rejected], Future[list[EncodedRow]]]] = deque()

    def add_first() -> None:
        batch, encoded = waiting.popleft()
        writer.add(batch, encoded.result())
        tell(writer)

    with ThreadPoolExecutor(1) as tokenizing:
        for batch in in_batches(_samples(rows, schema), lambda read: 0 if isinstance(read, Rejected) else read.characters,
                                most_characters=BATCH_CHARS, most_items=BATCH_ROWS):
            samples: list[Any] = [read.sample for read in batch if isinstance(read, Read)]
            waiting.append((batch, tokenizing.submit(encoder.encode, samples)))
            if len(waiting) > 1:
                add_first()
        while waiting:
            add_first()


class Progress:
    """Tells the user every few seconds how many rows are done."""

    def __init__(self, source: str, tell: Tell):
        self.source, self._tell = source, tell
        self.began = self.told = time.monotonic()

    def tell(self, writer: PartWriter | PieceWriter) -> None:
        now, count = time.monotonic(), writer.counts["rows"]
        if now - self.told > SAY_EVERY_S:
            self.told = now
            self._tell(Tokenising(source=self.source, rows=count, rows_per_s=count / (now - self.began)))


def is_plain(sample: Conversation) -> bool:
    """Return whether a conversation has nothing but roles and contents."""
    return not sample.tools and all(message.is_plain for message in sample.messages)


def digest64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _samples(rows: Iterable[Row | Rejected], schema: Schema) -> Iterator[Read | Rejected]:
    for row in rows:
        if isinstance(row, Rejected):
            yield row
            continue
        try:
            sample = schema.read(row.fields)
        except BadRow as error:
            yield Rejected(row.origin, str(error))
            continue
        # the whole content, so that equal samples have equal digests; repr of a Conversation itself would be slower
        content = repr([(message.role, message.content) for message in sample.messages]
                       if isinstance(sample, Conversation) and is_plain(sample) else sample)
        yield Read(sample, row.origin, len(content), digest64(content))
