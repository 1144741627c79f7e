"""The rows of Parquet and Arrow files through pyarrow, and of datasets on the Hugging Face hub through `datasets`.

Rows are read a few hundred at a time, from a memory-mapped file. `datasets` downloads once into its own cache; without a
network, what that cache has is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from powertrain.data.rows.folders import choose_split
from powertrain.data.rows.row import Rejected, Row, fault
from powertrain.records import WrongUse

BATCH_ROWS = 256                             # turned into Python's objects at a time
ARROW_FILE_MAGIC = b"ARROW1"                 # without it, an Arrow file is a stream, as `datasets` writes them


def optional_part(module: str, what: str) -> ModuleType:
    """A module of a package that need not be installed. Raises WrongUse with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise WrongUse(f"{what} needs {package}, which cannot be imported ({error}); pip install {package}") from error


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
    """An Arrow file or stream."""
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
    """The rows of record batches or tables, with the origin "ORIGIN row N"."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for fields in _values(batch.slice(start, BATCH_ROWS)):
                number += 1
                yield _row(fields, f"{origin} row {number}")


def _values(batch: Any) -> Iterator[Any]:
    """Each row as a dict, or the error that its values give."""
    try:
        yield from batch.to_pylist()
    except ValueError:
        # Arrow does not check that text is UTF-8 before it is looked at
        for i in range(batch.num_rows):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except ValueError as error:
                yield error


def _row(fields: Any, origin: str) -> Row | Rejected:
    if isinstance(fields, ValueError):
        return Rejected(origin, f"a value cannot be read: {fields}; mend or remove the row")
    reason = fault(fields)
    return Rejected(origin, reason) if reason else Row(fields, origin)


# ------------------------------------------------------------------------------------------------ the hub

HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<config>[\w.+-]+))?")
# what nobody calls a dataset, but many a file
FILE_NAME = re.compile(r".*\.(txt|md|rst|py|html?|xml|ya?ml|log|pdf|docx?|xlsx?|zip|gz|xz|zst|tar|"
                       r"jsonl?|ndjson|csv|tsv|parquet|arrow|feather)", re.IGNORECASE)
SLICED = re.compile(r"[\[+]")                # "train[:10%]" and "train+test" are the hub library's own language


def is_hub_id(source: str) -> bool:
    """Whether `source` has the form of a dataset's name there, org/name or org/name:config, and not that of a file's."""
    return HUB_ID.fullmatch(source) is not None and FILE_NAME.fullmatch(source) is None


def hub_rows(source: str, split: str | None, *, hint: str = "") -> Iterator[Row | Rejected]:
    """The rows of one part. `hint` is said where there is no such dataset, before the cure.

    Raises WrongUse if the dataset does not exist, or is not in the cache and the hub cannot be reached.
    """
    found = HUB_ID.fullmatch(source)
    assert found is not None                 # the caller has asked is_hub_id
    datasets = optional_part("datasets", f"data.source={source} is a dataset of the hub, and reading it")
    asked = split if split and SLICED.search(split) else None
    try:
        loaded = datasets.load_dataset(found["name"], found["config"], split=asked)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise WrongUse(f"data.source={source}: the hub has no such dataset, or it is not yours to read{hint}; check the name, "
                       "and log in with `hf auth login` if it is private or gated") from error
    except ConnectionError as error:
        raise WrongUse(f"data.source={source}: neither a path nor a dataset in the cache of `datasets`, and the hub cannot "
                       f"be reached ({_first_line(error)}){hint}; load it once with a network, or give a path") from error
    except (ValueError, RuntimeError, OSError) as error:
        raise WrongUse(f"data.source={source} cannot be loaded: {_first_line(error)}{_config_cure(source, error)}") from error
    part = str(asked)
    if asked is None:
        part = choose_split(f"data.source={source}", list(loaded), split)
        loaded = loaded[part]
    return _rows(loaded, f"{source}[{part}]")


def _rows(dataset: Any, origin: str) -> Iterator[Row | Rejected]:
    # as Arrow: pictures and sounds stay encoded, since nobody looks at them
    yield from table_rows(dataset.with_format("arrow").iter(batch_size=BATCH_ROWS), origin)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _config_cure(source: str, error: Exception) -> str:
    text = str(error)
    if "onfig" not in text or ":" in source:
        return "; check data.source and data.split"
    listed = re.search(r"\[[^\]]*\]", text.replace("\n", " "))
    return f"; name one of its configurations{' ' + listed.group() if listed else ''} as {source}:CONFIG"
