"""How results, progress and errors reach a person or a program.

Results go to stdout, progress to stderr; with --json stdout holds one object a line. Nothing is coloured or redrawn
without a terminal.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.cli.streams import FAILED
from powertrain.records import NotApplied, UserError
from powertrain.records.event import Event
from powertrain.records.event_log import to_line
from powertrain.records.findings import SEVERITIES, Finding, Severity
from powertrain.records.redaction import redacted

if TYPE_CHECKING:
    from rich.console import Console

# of audit and diagnose, by the worst finding; what cannot be read at all is 2, as everywhere
BY_SEVERITY: Mapping[str, int] = {"good": 0, "low": 0, "moderate": 4, "critical": 5}
PLAIN_LINE_EVERY_S = 5.0


def console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False, emoji=False, markup=False)


def worst(findings: Iterable[Finding]) -> Severity:
    """Return the worst severity, or "good" without findings."""
    return min((finding.severity for finding in findings), key=SEVERITIES.index, default="good")


def print_json(*values: Mapping[str, Any]) -> None:
    """Print each of the values as a line."""
    for value in values:
        # in one piece: print writes the end of a line by itself, and an interrupt between the two would glue lines together
        print(redacted(json.dumps(value, ensure_ascii=False)) + "\n", end="", flush=True)


def print_event(event: Event) -> None:
    print_json(to_line(event))


def tell(value: Mapping[str, Any], rows: Iterable[Sequence[str]], *, as_json: bool) -> None:
    """Print an answer: as one JSON object, or as rows."""
    if as_json:
        print_json(value)
    else:
        print_rows(rows)


def print_rows(rows: Iterable[Sequence[str]], *, stderr: bool = False, styles: Sequence[str] = ("bold",)) -> None:
    """Print columns that wrap within the terminal's width; without a terminal, each row is one long line."""
    from rich.table import Table

    from powertrain.report.result import printable

    out = console(stderr=stderr)
    rows = [tuple(printable(redacted(text)) for text in row) for row in rows]
    if not out.is_terminal:
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] if rows else []
        for row in rows:
            out.file.write("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]).rstrip() + "\n")
        out.file.flush()
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i in range(len(rows[0]) if rows else 0):
        table.add_column(style=styles[i] if i < len(styles) else None, no_wrap=i < len(rows[0]) - 1, overflow="fold")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def explain(error: BaseException, *, as_json: bool) -> int | None:
    """Print in one sentence what went wrong; return the exit code, or None for our own fault, which needs its traceback."""
    from powertrain.report.result import printable

    fields: dict[str, Any] = {}
    if isinstance(error, UserError):
        message, code, fields = str(error), error.exit_code, error.fields()
        if isinstance(error, NotApplied):
            without = f". Train without the technique: {' '.join(error.cure)}" if error.cure else ""
            message += f"; nothing was trained{without}"
    elif type(error).__name__ == "PanicException":       # of pyo3, which has no class to import
        message, code = f"a library broke off at what a file says ({error}); copy or download the model's files again", 2
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        message, code = f"{where}{error.strerror or error}", FAILED
    elif isinstance(error, (MemoryError, RuntimeError)):
        from powertrain.training.memory import is_out_of_memory  # which loads torch

        if not is_out_of_memory(error):
            return None
        message, code = ("out of memory; use a smaller micro-batch (techniques.micro_batch.examples=1 keeps the batch), "
                         "techniques.activation_checkpointing=on, or a smaller model"), FAILED
    else:
        return None
    if as_json:
        print_json({"event": "error", "message": message, "exit_code": code, **fields})
    print(f"powertrain: {printable(redacted(message))}", file=sys.stderr)
    return code
