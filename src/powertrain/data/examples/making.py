"""How one source becomes a part of the example store: how its rows are read, what the key is made of, and the build.

A large source is tokenised by several processes. Its files are cut into stretches, each free process takes the next stretch,
and the results are joined in order. A row's ids depend on that row alone, so the stored bytes do not depend on who did which
stretch. A stretch begins and ends where a line does, and knows the number of its first line, so its rows have the origins
that they have when the file is read as a whole. Only JSONL is cut: in CSV a line end may be part of a field.

A further process loads neither torch nor transformers. It reads the work from the first line of its standard input and one
stretch from each later line, and answers each stretch with a line end. It ends with its input, so it cannot outlive the process
that started it. If it fails, the others do its stretch again and go on without it.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from powertrain.data.examples.encoders import ENCODERS
from powertrain.data.examples.encoding import Encoder
from powertrain.data.examples.part import FILES, Part, PartWriter, Progress, write_rows
from powertrain.data.examples.templates import ChatTemplate
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.data.publishing import is_whole, key_of, publish
from powertrain.data.rows.files import json_lines
from powertrain.data.rows.folders import LINES, data_suffix, digests_of, readable, size_of
from powertrain.data.rows.reading import local_files, read_rows
from powertrain.data.rows.row import Rejected, Row
from powertrain.data.rows.schemas import ANSWERS, Schema, find_schema
from powertrain.data.shards import Piece, PieceWriter, Shard, ShardedStore
from powertrain.machine import usable_cpus
from powertrain.records import WrongUse
from powertrain.records.phases import Tell, Tokenising, TokenisingAlone

if TYPE_CHECKING:
    from powertrain.recipe.schema import DataRecipe

FORMAT = 5                                   # of a part, and of all that decides its content
OF_PAIRS = ("prompt", "chosen", "rejected")
TEXTS = {"prompt_completion": ("prompt", "completion"), "preference": OF_PAIRS, "comparison": OF_PAIRS,
         "rating": ("prompt", "completion")}             # format -> columns that may be texts, which need no template
ROWS_LOOKED_AT = 64                          # to find out what they mean
PIECE_ROWS = 64                              # of a source whose files cannot be cut, which machines share row by row


@dataclass(frozen=True)
class Reading:
    """How rows are read, whatever the source."""

    data: DataRecipe
    task: str
    cache: Path
    learns: str = ANSWERS                    # what the objective learns from; see rows/schemas.py

    def rows(self, source: str, most: int | None) -> Iterator[Row | Rejected]:
        return read_rows(source, cache=self.cache, split=self.data.split, text_field=self.data.text_field, most=most)

    def look(self, source: str) -> tuple[Schema, str, bool]:
        """Return the rows' schema, the sentence that states it, and whether the rows are texts that need no template."""
        rows, data = [row for row in self.rows(source, ROWS_LOOKED_AT) if isinstance(row, Row)], self.data
        columns = data.columns if data.text_field == "text" else {"text": data.text_field, **data.columns}
        schema, said = find_schema(rows, name=data.format, columns=columns, task=self.task,
                                   learns=self.learns)
        texts = schema.name in TEXTS and all(isinstance(row.fields.get(schema.columns[ours]), str | None)
                                             for row in rows for ours in TEXTS[schema.name] if ours in schema.columns)
        return schema, f"{source}: {said}", texts

    def digest(self, source: str) -> str:
        """Return the sha256 (hex) of the content that `rows` would read. A source that is no file is read row by row."""
        digest = hashlib.sha256()
        files = local_files(source, self.data.split)
        if files is None:
            for row in self.rows(source, self.data.max_examples):
                digest.update(repr(row).encode(errors="surrogatepass"))
        for file, content in zip(files or (), digests_of(files or ()), strict=True):
            digest.update(f"{file}\0{content}\0".encode(errors="surrogatepass"))
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Work:
    """The settings that turn rows into examples, the same in every process."""

    schema: Schema
    encoder: Encoder

    def write(self, folder: Path, stretch: Stretch) -> None:
        """Write the rows of `stretch` as the files of a part into `folder`, for `taken_from`."""
        self.write_rows(folder, stretch.rows())

    def write_rows(self, folder: Path, rows: Iterable[Row | Rejected]) -> None:
        folder.mkdir()
        with closing(PartWriter(folder, self.encoder.tokenizer.vocabulary)) as writer:
            write_rows(writer, rows, self.schema, self.encoder)
        (folder / TOLD).write_text(json.dumps(writer.told()), encoding="utf-8")

    def about(self, said: str) -> dict[str, Any]:
        """Return what is known of a part beforehand: the beginning of its meta.json."""
        return {"kind": self.schema.kind, "vocabulary": self.encoder.tokenizer.vocabulary, "schema": self.schema.name,
                "said": said}

    def to_json(self) -> dict[str, Any]:
        encoder, tokenizer = self.encoder, self.encoder.tokenizer
        return {"schema": self.schema.to_json(), "tokenizer": [str(tokenizer.files[0].parent), tokenizer.end, tokenizer.digest],
                "max_length": encoder.max_length, "drop": encoder.drop,
                "template": encoder.template and asdict(encoder.template), "train_on": encoder.train_on}


def part_key(source: str, reading: Reading, work: Work) -> dict[str, Any]:
    """Return all that decides the content of a source's part."""
    data, encoder, tokenizer = reading.data, work.encoder, work.encoder.tokenizer
    return {
        "format": FORMAT,
        "rows": {"source": source, "digest": reading.digest(source), "schema": work.schema.to_json(), "split": data.split,
                 "text_field": data.text_field, "max_examples": data.max_examples},
        "tokenizer": [tokenizer.digest, tokenizer.end, tokenizer.before],
        "template": encoder.template and encoder.template.text, "train_on": encoder.train_on,
        "limit": [encoder.max_length, encoder.drop],
    }


def make_part(source: str, reading: Reading, work: Work, said: str, tell: Tell) -> Part:
    """Return the part of `source`, tokenised now unless the cache has it."""
    def build(folder: Path) -> dict[str, Any]:
        files, progress = files_to_cut(source, reading.data), Progress(source, tell)
        with closing(PartWriter(folder, work.encoder.tokenizer.vocabulary)) as writer:
            if further := further_processes(files):
                write_together(writer, stretches(files, STRETCH_BYTES), work, further, progress, tell)
            else:
                write_rows(writer, reading.rows(source, reading.data.max_examples), work.schema, work.encoder, progress.tell)
            return writer.meta(work.about(said))

    folder = reading.cache / folder_of(part_key(source, reading, work))
    if not is_whole(folder):
        tell(Tokenising(source=source))
        publish(folder, build)
    return Part(folder)


def sharded_part(source: str, reading: Reading, work: Work, said: str, tell: Tell) -> ShardedStore:
    """Return how several machines make the part of `source`: by stretches where its files can be cut, else by rows."""
    def write(writer: PieceWriter, shard: Shard) -> dict[str, Any]:
        tell(Tokenising(source=f"shard {shard} of {source}"))
        files, progress = files_to_cut(source, reading.data), Progress(source, tell)
        if files:
            further = further_processes(files, shard.of)
            write_together(writer, shard.own(stretches(files, STRETCH_BYTES)), work, further, progress, tell)
        else:
            rows = enumerate(reading.rows(source, reading.data.max_examples))
            for _, some in shard.own(itertools.groupby(rows, lambda row: row[0] // PIECE_ROWS)):
                scratch = writer.folder / "rows"
                work.write_rows(scratch, (row for _, row in some))
                writer.append(*taken_from(scratch))
                progress.tell(writer)
        return {"meta": work.about(said)}

    key = part_key(source, reading, work)
    return ShardedStore(folder_of(key), key, FILES, write)


def folder_of(key: Mapping[str, Any]) -> str:
    """Return the folder, in the cache, of the part with this key."""
    return f"examples/{key_of(key)}"


def taken_from(folder: Path) -> Piece:
    """Return what `Work.write` wrote into `folder`, for `append` of a writer, and remove the folder."""
    piece = {name: (folder / f"{name}.bin").read_bytes() for name in FILES}, json.loads((folder / TOLD).read_bytes())
    shutil.rmtree(folder)
    return piece


# ------------------------------------------------------------------------------------------------ stretches

PIECE_BYTES = 1 << 16                        # read at a time to count lines


@dataclass(frozen=True)
class Stretch:
    path: Path
    start: int                               # in bytes
    size_bytes: int
    line: int                                # the number of its first one, from 1

    def rows(self) -> Iterator[Row | Rejected]:
        return json_lines(self.path, self.start, self.line, self.size_bytes)


def files_to_cut(source: str, data: DataRecipe) -> list[Path]:
    """Return the files of a source that are read in stretches: none where only its first rows count."""
    return files_of_lines(source, data.split) if data.max_examples is None else []


def files_of_lines(source: str, split: str | None) -> list[Path]:
    """Return the files of a source if all of them can be cut, else none."""
    files = local_files(source, split) or []
    return files if all(data_suffix(file) in LINES for file in files) else []


def stretches(files: Sequence[Path], size_bytes: int) -> Iterator[Stretch]:
    """Yield all lines of `files` in order, about `size_bytes` at a time, holding one piece however long a line is."""
    for path in files:
        with readable(path), path.open("rb") as file:
            start, line = 0, 1
            while True:
                lines = _pass(file, size_bytes)
                stop = file.tell()
                if stop == start:
                    break
                yield Stretch(path, start, stop - start, line)
                start, line = stop, line + lines


def _pass(file: IO[bytes], size_bytes: int) -> int:
    """Read on by `size_bytes` and from there to a line's end; return the number of line ends."""
    lines, piece = 0, b""
    while size_bytes > 0 and (piece := file.read(min(PIECE_BYTES, size_bytes))):
        lines += piece.count(b"\n")
        size_bytes -= len(piece)
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(PIECE_BYTES)
        lines += piece.endswith(b"\n")
    return lines


# ------------------------------------------------------------------------------------------------ several processes

STRETCH_BYTES = 1 << 19
EACH_BYTES = 4 << 20         # of a source for each further process: less is done before the process has started
MOST_FURTHER = 7             # some 100 MB each
WAITING = 2                  # stretches per process that are cut ahead of the first one that is not joined yet
TOLD = "told.json"           # beside the files of a stretch, written last
ANSWER = b"\n"
# the same modules are found as here, however this process came to find them
CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from powertrain.data.examples.making import main; main()"


def further_processes(files: Sequence[Path], shards: int = 1) -> int:
    """Return how many further processes would shorten the work on these files, or on one of equal shards of them.

    There are none for few bytes or on one core.
    """
    return min(usable_cpus() - 1, size_of(files) // shards // EACH_BYTES, MOST_FURTHER) if sys.executable else 0


def write_together(writer: PartWriter | PieceWriter, stretches: Iterable[Stretch], work: Work, further: int,
                   progress: Progress, tell: Tell) -> None:
    """Add all stretches to `writer`, tokenised by this process and `further` others."""
    scratch = writer.folder / "stretches"
    scratch.mkdir()
    waiting: deque[tuple[Path, Future[list[str]]]] = deque()
    with ExitStack() as stack:
        free: SimpleQueue[Work | Other] = SimpleQueue()
        free.put(work)
        for number in range(further):
            free.put(stack.enter_context(Other(work, scratch / f"{number}.err")))
        threads = ThreadPoolExecutor(further + 1)
        stack.callback(threads.shutdown, cancel_futures=True)            # before the further processes are ended

        def join_first() -> None:
            done, failures = waiting.popleft()
            for failure in failures.result():
                tell(TokenisingAlone(why=failure))
            writer.append(*taken_from(done))
            progress.tell(writer)

        for number, stretch in enumerate(stretches):
            waiting.append((scratch / str(number), threads.submit(_tokenise, free, scratch / str(number), stretch)))
            if len(waiting) > WAITING * (further + 1):
                join_first()
        while waiting:
            join_first()
    shutil.rmtree(scratch)


def _tokenise(free: SimpleQueue[Work | Other], folder: Path, stretch: Stretch) -> list[str]:
    """Have a free process tokenise the stretch into `folder`, another one where it fails; return why each failed."""
    failures: list[str] = []
    while True:
        worker = free.get()
        try:
            worker.write(folder, stretch)
        except Ended as error:               # this process is not free again
            failures.append(str(error))
            shutil.rmtree(folder, ignore_errors=True)
            continue
        except BaseException:
            free.put(worker)                 # other threads may wait for it
            raise
        free.put(worker)
        return failures


class Ended(Exception):
    """A further process has ended before its work."""


class Other:
    """One further process. Leaving the context ends the process."""

    def __init__(self, work: Work, errors: Path):
        self.errors, self.told = errors, work.to_json()
        with errors.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, "-c", CODE, json.dumps(sys.path)], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=file)

    def __enter__(self) -> Other:
        with suppress(BrokenPipeError):      # the process has ended; its first stretch will fail and say so
            self._tell(self.told)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):      # words that the process did not read any more
            self.process.communicate()

    def write(self, folder: Path, stretch: Stretch) -> None:
        """Have the process write the stretch into `folder`. Raises Ended if the process has ended before it answers."""
        assert self.process.stdout is not None
        answer = b""
        with suppress(BrokenPipeError):
            self._tell([str(folder), str(stretch.path), stretch.start, stretch.size_bytes, stretch.line])
            answer = self.process.stdout.read(len(ANSWER))
        if not answer:
            raise Ended(self._reason())

    def _reason(self) -> str:
        status = self.process.wait()
        lines = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return signal.Signals(-status).name if status < 0 else lines[-1] if lines else f"exit status {status}"

    def _tell(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()


def work_from(told: Mapping[str, Any]) -> Work:
    """Return the work that `to_json` told. Raises WrongUse if the tokenizer's folder has changed since."""
    folder, end, digest = told["tokenizer"]
    tokenizer = open_example_tokenizer(Path(folder), end)
    if tokenizer.digest != digest:
        raise WrongUse(f"the tokenizer in {folder} changed while rows were tokenised with it; start again")
    template = told["template"] and ChatTemplate(**{**told["template"], "special": tuple(told["template"]["special"])})
    schema = Schema(*told["schema"])
    return Work(schema, ENCODERS[schema.kind](tokenizer, told["max_length"], told["drop"], template, told["train_on"]))


def main() -> None:
    """Tokenise the stretches that standard input names; this is what a further process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # whoever started this process is interrupted too, and ends it
    answers, sys.stdout = os.dup(sys.stdout.fileno()), sys.stderr        # nothing else may be taken for an answer
    work = work_from(json.loads(sys.stdin.readline()))
    gc.freeze()                              # all objects that exist now stay to the end
    for line in sys.stdin:
        folder, path, *place = json.loads(line)
        work.write(Path(folder), Stretch(Path(path), *place))
        os.write(answers, ANSWER)
