"""From the source that the user names to rows, one after the other, whatever the size of the source.

A source is a named set of rows (docstrings) or of texts (stdlib, shakespeare), a file, a folder, a glob, or a dataset of the
Hugging Face hub as org/name or org/name:config. A set's name wins over a path of the same name (write ./docstrings for the
path), and a path over a dataset of the hub. `datasets` downloads once into its own cache, which also serves without a network.

CSV and TSV are read by the line here, Parquet and Arrow through pyarrow, a few hundred rows at a time; files.py reads the rest.
"""

import csv
import difflib
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from powertrain.data.documents import corpus_documents
from powertrain.data.rows import folders
from powertrain.data.rows.docstrings import docstring_rows
from powertrain.data.rows.files import LONGEST_LINE_BYTES, json_lines, json_rows, numbered_lines, opened, text_rows
from powertrain.data.rows.row import Rejected, Row, checked
from powertrain.records import WrongUse
from powertrain.records.errors import first_line

ROW_SETS = ("docstrings",)


def read_rows(source: str, *, cache: Path, split: str | None = None, text_field: str = "text",
              most: int | None = None) -> Iterator[Row | Rejected]:
    """Yield the rows of `source`, and in their places the rows that cannot be read at all.

    A text file gives one row, {text_field: its text}. `split` is the part of a source that has parts: a dataset of the hub, a
    folder whose files are named after parts, a JSON file with several lists; train by default. `most` limits the rows.
    Raises WrongUse here if there is no such source, and while reading if a file is damaged or no row can be used.
    """
    return _usable(source, _found(source, cache, split, text_field), most)


def local_files(source: str, split: str | None) -> list[Path] | None:
    """Return the files that `source` names, in the order of reading; None for a named set or a dataset of the hub.

    Raises WrongUse if `source` names no file.
    """
    path = Path(source).expanduser()
    if source in (*ROW_SETS, *folders.CORPORA) or (not path.exists() and is_hub_id(source)):
        return None
    if path.is_dir():
        return folders.folder_files(path, split)
    if not path.exists() and (near := difflib.get_close_matches(source, ROW_SETS, n=1)):
        raise WrongUse(f"{source}: there is no such file or folder; did you mean the set {near[0]}?")
    return folders.named_files(source)


def _found(source: str, cache: Path, split: str | None, text_field: str) -> Iterator[Row | Rejected]:
    if source in ROW_SETS:
        return docstring_rows(cache)
    if source in folders.CORPORA:
        return (Row({text_field: document.text}, document.origin) for document in corpus_documents(source, cache))
    path, files = Path(source).expanduser(), local_files(source, split)
    if files is None:
        hint = folders.nearest(path) if path.parent.is_dir() else ""
        return hub_rows(source, split, hint=hint)
    # a folder's files are all rows, or all texts, and then its .json is one of them
    texts = path.is_dir() and any(folders.data_suffix(file) is None for file in files)
    return itertools.chain.from_iterable(text_rows(file, text_field) if texts else _file_rows(file, split, text_field)
                                         for file in files)


def _file_rows(path: Path, split: str | None, text_field: str) -> Iterator[Row | Rejected]:
    suffix = (folders.data_suffix(path) or "").removesuffix(".gz")
    if suffix in folders.LINES:
        return json_lines(path)
    if suffix in folders.OBJECTS:
        return json_rows(path, split)
    if suffix in folders.SHEETS:
        return csv_rows(path)
    if suffix == ".parquet":
        return parquet_rows(path)
    return arrow_rows(path) if suffix else text_rows(path, text_field)


def _usable(source: str, found: Iterable[Row | Rejected], most: int | None) -> Iterator[Row | Rejected]:
    """Yield `found` up to its row number `most`. Raises WrongUse at its end if not one row could be read."""
    first: Rejected | None = None
    rejected = rows = 0
    for row in found:
        if isinstance(row, Row):
            rows += 1
        else:
            first, rejected = first or row, rejected + 1
        yield row
        if rows == most:
            return
    if first and not rows:
        raise WrongUse(f"{source} has no row that can be read: all {rejected} are bad, the first of them, "
                       f"{first.origin}: {first.reason}")
    if not rows:
        raise WrongUse(f"{source} is empty: no row to train on; give a source with rows")


# ------------------------------------------------------------------------------------------------ CSV and TSV

LONGEST_FIELD_CHARS = 16 << 20               # of CSV, which holds 4 bytes per character: what a quote left open can take in
DELIMITERS = ",;\t"                          # of CSV, tried on the header in this order
NOT_UTF8 = "not UTF-8; convert the file, for example with iconv -f LATIN1 -t UTF-8"


def csv_rows(path: Path) -> Iterator[Row | Rejected]:
    """Yield the rows under a header, quoted as RFC 4180 says; a row's origin is the line where it begins.

    A row that violates the quoting is rejected rather than read as something else.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD_CHARS))  # the csv module has one for the process
    with folders.readable(path), opened(path) as file:
        lines = _csv_lines(path, file)
        first = next(lines, "")
        delimiters = "\t" if ".tsv" in (suffix.lower() for suffix in path.suffixes) else DELIMITERS
        delimiter = next((delimiter for delimiter in delimiters if delimiter in first), delimiters[0])
        reader = csv.reader(itertools.chain([first] if first else [], lines), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            origin = f"{path}:{reader.line_num + 1}"
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # csv.Error has no kinds: its text is all there is
                unclosed = "end of data" in str(error) or "field limit" in str(error)
                cure = "a quote that opens here is never closed: close it, or double it" if unclosed else \
                    "a quote inside a quoted field is written twice"
                reason = f"{error}; {cure}"
                if header is None:
                    raise WrongUse(f"{origin}: the header cannot be read: {reason}") from error
                yield Rejected(origin, reason)
                continue
            if header is None:
                header = _header(values, origin) if values else None
            elif values:
                yield _csv_row(header, values, origin)


def _csv_lines(path: Path, file: IO[bytes]) -> Iterator[str]:
    for number, line in numbered_lines(file):
        if line is None:
            raise WrongUse(f"{path}:{number}: more than {LONGEST_LINE_BYTES >> 20} MiB in one line; is it CSV?")
        # bytes that are not UTF-8 become surrogates here, so that only the row that holds them is rejected
        yield line.decode("utf-8", "surrogateescape")


def _header(values: list[str], origin: str) -> list[str]:
    names = [value.strip() for value in values]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise WrongUse(f"{origin}: the header names the column {twice!r} twice; rename one")
    if not _are_utf8(names):
        raise WrongUse(f"{origin}: the header is {NOT_UTF8}")
    return names


def _csv_row(header: list[str], values: list[str], origin: str) -> Row | Rejected:
    if len(values) != len(header):
        return Rejected(origin, f"{len(values)} fields where the header names {len(header)}; quote those that hold a delimiter")
    return checked(dict(zip(header, values, strict=True)), origin) if _are_utf8(values) else Rejected(origin, NOT_UTF8)


def _are_utf8(texts: Iterable[str]) -> bool:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ Parquet and Arrow

BATCH_ROWS = 256                             # turned into Python's objects at a time
ARROW_FILE_MAGIC = b"ARROW1"                 # without it, an Arrow file is a stream, as `datasets` writes them


def optional_part(module: str, purpose: str) -> ModuleType:
    """Import a module of a package that need not be installed. Raises WrongUse with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise WrongUse(f"{purpose} needs {package}, which cannot be imported ({error}); pip install {package}") from error


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:   # pyarrow's own errors are kinds of these
        raise WrongUse(f"{path} cannot be read: {error}; make it again, or convert it to JSONL") from error


def parquet_rows(path: Path) -> Iterator[Row | Rejected]:
    parquet = optional_part("pyarrow.parquet", "reading Parquet")
    with _whole(path), parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
        yield from table_rows(file.iter_batches(batch_size=BATCH_ROWS), str(path))


def arrow_rows(path: Path) -> Iterator[Row | Rejected]:
    """Yield the rows of an Arrow file or stream."""
    arrow = optional_part("pyarrow", "reading Arrow")
    if not path.stat().st_size:
        return
    with _whole(path), arrow.memory_map(str(path)) as mapped:
        if mapped.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC:
            file = arrow.ipc.open_file(mapped)
            yield from table_rows((file.get_batch(i) for i in range(file.num_record_batches)), str(path))
        else:
            mapped.seek(0)
            yield from table_rows(arrow.ipc.open_stream(mapped), str(path))


def table_rows(batches: Iterator[Any], origin: str) -> Iterator[Row | Rejected]:
    """Yield the rows of record batches or tables, with the origin "ORIGIN row N"."""
    pieces = (batch.slice(start, BATCH_ROWS) for batch in batches for start in range(0, batch.num_rows, BATCH_ROWS))
    for number, fields in enumerate(itertools.chain.from_iterable(map(_values, pieces)), 1):
        place = f"{origin} row {number}"
        yield checked(fields, place) if not isinstance(fields, ValueError) else \
            Rejected(place, f"a value cannot be read: {fields}; mend or remove the row")


def _values(batch: Any) -> Iterator[Any]:
    """Yield each row as a dict, or the error that its values give."""
    try:
        yield from batch.to_pylist()
    except ValueError:
        # Arrow does not check that text is UTF-8 before it is looked at
        for i in range(batch.num_rows):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except ValueError as error:
                yield error


# ------------------------------------------------------------------------------------------------ the hub

HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<config>[\w.+-]+))?")
# endings that many a file has and no dataset
FILE_NAME = re.compile(r".*\.(txt|md|rst|py|html?|xml|ya?ml|log|pdf|docx?|xlsx?|zip|gz|xz|zst|tar|"
                       r"jsonl?|ndjson|csv|tsv|parquet|arrow|feather)", re.IGNORECASE)
SLICED = re.compile(r"[\[+]")                # "train[:10%]" and "train+test" are the hub library's own language


def is_hub_id(source: str) -> bool:
    """Return whether `source` has the form of a dataset's name there, org/name or org/name:config, and not of a file's."""
    return HUB_ID.fullmatch(source) is not None and FILE_NAME.fullmatch(source) is None


def hub_rows(source: str, split: str | None, *, hint: str = "") -> Iterator[Row | Rejected]:
    """Yield the rows of one part. An error for a dataset that does not exist says `hint` before the cure.

    Raises WrongUse if the dataset does not exist, or is not in the cache and the hub cannot be reached.
    """
    found = HUB_ID.fullmatch(source)
    assert found is not None                 # the caller has asked is_hub_id
    datasets = optional_part("datasets", f"{source} is a dataset of the hub, and reading it")
    asked = split if split and SLICED.search(split) else None
    try:
        loaded = datasets.load_dataset(found["name"], found["config"], split=asked)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise WrongUse(f"{source}: the hub has no such dataset, or it is not yours to read{hint}; check the name, "
                       "and log in with `hf auth login` if it is private or gated") from error
    except ConnectionError as error:
        raise WrongUse(f"{source}: neither a path nor a dataset in the cache of `datasets`, and the hub cannot be "
                       f"reached ({first_line(error).rstrip('.')}){hint}; load it once with a network, or "
                       "give a path") from error
    except (ValueError, RuntimeError, OSError) as error:
        raise WrongUse(f"{source} cannot be loaded: {first_line(error).rstrip('.')}"
                       f"{_config_cure(source, error)}") from error
    part = asked or folders.choose_split(source, list(loaded), split)
    rows = loaded if asked else loaded[part]
    # as Arrow: pictures and sounds stay encoded, since nobody looks at them
    return table_rows(rows.with_format("arrow").iter(batch_size=BATCH_ROWS), f"{source}[{part}]")


def _config_cure(source: str, error: Exception) -> str:
    text = str(error)
    if "onfig" not in text or ":" in source:
        return "; check data.source and data.split"
    listed = re.search(r"\[[^\]]*\]", text.replace("\n", " "))
    return f"; name one of its configurations{' ' + listed.group() if listed else ''} as {source}:CONFIG"
