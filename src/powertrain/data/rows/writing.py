"""Writing rows to a new file, whole or not at all: JSONL, CSV, TSV, Parquet or Arrow, by the file's ending.

What is written is read back and compared with the rows, so that nothing is lost in silence: a file that reads otherwise is
removed, and the error names the row and the column. A column that a row lacks and one that is null are the same to every reader
here. CSV holds only text and has no null: it takes rows whose values are text, and null is written as an empty field.
"""

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.data.rows.files import json_kind
from powertrain.data.rows.reading import BATCH_ROWS, local_files, optional_part, read_rows
from powertrain.data.rows.row import Rejected, Row
from powertrain.records import WrongUse
from powertrain.records.json_files import draft_of

ENDINGS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLES = (".parquet", ".arrow")

Rows = Callable[[], Iterator[Row]]           # begins anew with every call, and yields the same
Same = Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]        # fields as meant, as read -> what differs


def check_output(out: Path, sources: Iterable[str] = (), split: str | None = None) -> None:
    """Raise WrongUse if `out` cannot be a new file of rows: its ending, its folder, a file that is there, or a source."""
    if out.suffix.lower() not in ENDINGS:
        raise WrongUse(f"{out} does not say its format; end its name in one of {', '.join(ENDINGS)}")
    for source in sources:
        if out.exists() and any(file.exists() and file.samefile(out) for file in local_files(source, split) or ()):
            raise WrongUse(f"{out} is a source itself, and sources are never changed; name a new file")
    if out.exists():
        raise WrongUse(f"{out} exists already; name a new file, or remove it first")
    if not out.parent.is_dir():
        raise WrongUse(f"there is no folder {out.parent} to write {out.name} into; make it first")


def write_rows(out: Path, rows: Rows, same: Same | None = None) -> int:
    """Write the rows as `out` and return how many they are. Raises WrongUse where `out` would not hold the same.

    `same` compares a row's fields with what is read back; by default they have to be equal.
    """
    ending = out.suffix.lower()
    with draft_of(out, ending) as draft:
        if ending in DELIMITERS:
            _write_sheet(draft, rows, DELIMITERS[ending])
        elif ending in TABLES:
            _write_table(draft, rows, ending)
        else:
            with draft.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(_json_line(row.fields, row.origin) for row in rows())
        return _compare(draft, out, rows, same or _differing)


def _json_line(fields: Mapping[str, Any], origin: str) -> str:
    """Return a line of JSONL. Raises WrongUse for a value that JSON does not have, such as a date."""
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        for name, value in fields.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                kind = "a number that is not finite" if isinstance(value, float) else type(value).__name__
                raise WrongUse(f"{origin}: the column {name!r} holds {kind}, which JSON does not have; leave the column out "
                               f"with --drop {name}, or write Parquet") from error
        raise


# ------------------------------------------------------------------------------------------------ CSV


def _write_sheet(draft: Path, rows: Rows, delimiter: str) -> None:
    names: dict[str, set[bool]] = {}         # column -> whether it has empty texts, whether it has nulls
    for row in rows():
        for name, value in row.fields.items():
            found = names.setdefault(name, set())
            if value is not None and not isinstance(value, str):
                raise WrongUse(f"{row.origin}: the column {name!r} holds {json_kind(value)}, and CSV holds only text; write "
                               "JSONL or Parquet")
            if not value:
                found.add(value is None)
            if len(found) > 1:
                raise WrongUse(f"{row.origin}: the column {name!r} has both null and empty texts, which CSV cannot tell apart; "
                               "write JSONL or Parquet")
    with draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(names)
        for row in rows():
            writer.writerow([row.fields.get(name) or "" for name in names])


# ------------------------------------------------------------------------------------------------ Parquet and Arrow


def _write_table(draft: Path, rows: Rows, ending: str) -> None:
    arrow = optional_part("pyarrow", f"writing {ending[1:].capitalize()}")
    schema = _schema(arrow, rows)
    with draft.open("wb") as file:
        try:
            writer = optional_part("pyarrow.parquet", "writing Parquet").ParquetWriter(file, schema) if ending == ".parquet" \
                else arrow.ipc.new_stream(file, schema)
        except arrow.ArrowNotImplementedError as error:      # of an object without keys, as a tool without parameters has
            raise WrongUse(f"{ending[1:].capitalize()} cannot hold these rows: {str(error).splitlines()[0].rstrip('.')}; write "
                           "JSONL, or give rows one shape with --shape") from error
        with writer:
            for some in _some(rows()):
                writer.write_batch(_batch(arrow, some, schema))


def _some(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while some := list(itertools.islice(rows, BATCH_ROWS)):
        yield some


def _schema(arrow: Any, rows: Rows) -> Any:
    """Return the columns of all rows, each with the one type that holds its values."""
    schema = arrow.schema([])
    for some in _some(rows()):
        names = dict.fromkeys(name for row in some for name in row.fields)
        found = arrow.schema([(name, _column(arrow, some, name, None).type) for name in names])
        try:
            schema = arrow.unify_schemas([schema, found])
        except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
            raise WrongUse(f"{some[0].origin} and the rows behind it have values of another kind than the rows before "
                           f"({error}); a table holds one kind in a column: write JSONL") from error
    return schema


def _column(arrow: Any, some: Sequence[Row], name: str, kind: Any) -> Any:
    try:
        return arrow.array([row.fields.get(name) for row in some], type=kind)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, arrow.ArrowNotImplementedError, OverflowError) as error:
        raise WrongUse(f"{some[0].origin} and the rows behind it have values of several kinds in the column {name!r} "
                       f"({str(error).splitlines()[0]}); a table holds one kind in a column: write JSONL") from error


def _batch(arrow: Any, some: Sequence[Row], schema: Any) -> Any:
    columns = [_column(arrow, some, field.name, field.type) for field in schema]
    return arrow.RecordBatch.from_arrays(columns, schema=schema)


# ------------------------------------------------------------------------------------------------ reading it back


def _compare(draft: Path, out: Path, rows: Rows, same: Same) -> int:
    """Return how many rows were written. Raises WrongUse if what is read back differs."""
    count = 0
    back = read_rows(str(draft), cache=draft.parent)
    for wanted, found in itertools.zip_longest(rows(), back):
        if wanted is None or not isinstance(found, Row):
            reason = found.reason if isinstance(found, Rejected) else "it would have another number of rows"
            raise WrongUse(f"{out} would not hold the rows as they are ({reason}); write JSONL")
        differs = same(wanted.fields, found.fields)
        if differs is not None:
            raise WrongUse(f"{wanted.origin}: {out.suffix[1:].upper()} cannot hold the column {differs!r} as it is: it would "
                           "read back with other values (a table gives all objects in a column the same keys); write JSONL, "
                           "or give rows one shape with --shape")
        count += 1
    return count


def _differing(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return the first column whose values differ; null, an absent column and, in CSV, an empty field count as one."""
    for name in dict.fromkeys([*wanted, *found]):
        ours, theirs = wanted.get(name), found.get(name)
        if not _is_equal(ours, theirs) and (ours or theirs or isinstance(ours, int | float)):
            return str(name)
    return None


def _is_equal(ours: Any, theirs: Any) -> bool:
    """Return whether two values are the same, 1 and 1.0 and true apart; two NaN are the same."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(_is_equal(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_is_equal, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float) and math.isnan(ours):
        return math.isnan(theirs)
    return type(ours) is type(theirs) and bool(ours == theirs)
