"""The named set `docstrings`: functions of Python's standard library and their authors' descriptions.

Made from the interpreter's own sources, so it needs no download and differs between Python versions. The prompt is a function
without its docstring, the completion the docstring's first paragraph. Short ones only: a small model learns what it can see.
"""

import ast
import inspect
import json
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from powertrain.data.documents import Document, standard_library
from powertrain.data.publishing import is_whole, key_of, publish
from powertrain.data.rows.files import json_lines
from powertrain.data.rows.row import Row

FORMAT = 1                                   # of the rows; another number makes them again
LONGEST_SOURCE_LINES = 20                    # decorators, signature and body
LONGEST_DOCSTRING_LINES = 3                  # of its first paragraph
FEWEST_WORDS = 3                             # less is a label ("Internal.") rather than a sentence
ROWS_FILE = "rows.jsonl"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_rows(cache: Path) -> Iterator[Row]:
    """Return the rows {"prompt": code, "completion": docstring}, by file and line; made once, then read from `cache`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    made_from = [FORMAT, sys.version, str(library), LONGEST_SOURCE_LINES, LONGEST_DOCSTRING_LINES, FEWEST_WORDS]
    folder = cache / "corpora" / f"docstrings-{key_of(made_from)[:16]}"
    if not is_whole(folder):
        publish(folder, lambda building: _build(building, library))
    # this module has written the file, so no row is rejected
    rows = (row for row in json_lines(folder / ROWS_FILE) if isinstance(row, Row))
    return (Row({name: row.fields[name] for name in ("prompt", "completion")}, f"docstrings {row.fields['origin']}")
            for row in rows)


def _build(folder: Path, library: Path) -> dict[str, Any]:
    seen: set[str] = set()
    with (folder / ROWS_FILE).open("w", encoding="utf-8") as file:
        for document in standard_library(library):
            path = Path(document.origin).relative_to(library).as_posix()
            for line, prompt, completion in documented_functions(document):
                if prompt not in seen:
                    seen.add(prompt)
                    row = {"prompt": prompt, "completion": completion, "origin": f"{path}:{line}"}
                    file.write(json.dumps(row) + "\n")
    return {"rows": len(seen)}


def documented_functions(document: Document) -> Iterator[tuple[int, str, str]]:
    """Yield line, source without the docstring, and the docstring's first paragraph of each function that fits the limits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")      # of the library's own code, such as an invalid escape
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):    # the library's own templates and broken examples are no Python
            return
        lines = re.split(r"\r\n|\r|\n", document.text)     # not splitlines(): to the parser a form feed ends no line
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for function in sorted(functions, key=lambda function: function.lineno):
            said = _first_paragraph(function)
            source = _without_docstring(function, lines) if said else None
            if said and source:
                yield function.lineno, source, said


def _first_paragraph(function: Function) -> str | None:
    """Return the text; None if there is no docstring, or its first paragraph is long, no sentence, or an example."""
    docstring = ast.get_docstring(function, clean=False)
    if docstring is None or "\0" in docstring:
        return None
    lines = list(takewhile(str.strip, inspect.cleandoc(docstring).splitlines()))
    text = "\n".join(line.rstrip() for line in lines)
    fits = 0 < len(lines) <= LONGEST_DOCSTRING_LINES and len(re.findall(r"[A-Za-z]{2,}", text)) >= FEWEST_WORDS
    return text if fits and not text.startswith((">>>", "@")) and not text.endswith(":") else None


def _without_docstring(function: Function, lines: list[str]) -> str | None:
    """Return the function's source, decorators first, dedented; None if it is long, or says nothing without its docstring."""
    docstring, *body = function.body
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    assert function.end_lineno               # the parser sets it
    assert docstring.end_lineno
    length = function.end_lineno - first + 1 - (docstring.end_lineno - docstring.lineno + 1)
    if not body or length > LONGEST_SOURCE_LINES:
        return None
    before = lines[first - 1:docstring.lineno - 1]
    behind = dropwhile(lambda line: not line.strip(), lines[docstring.end_lineno:function.end_lineno])
    source = textwrap.dedent("\n".join([*before, *behind])).strip("\n")
    return source if _same_code(source, function, body) else None


def _same_code(source: str, function: Function, body: list[ast.stmt]) -> bool:
    """Return whether the text is still the function: a docstring may share a line with code, dedenting may change a string."""
    try:
        (parsed,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(parsed, ast.FunctionDef | ast.AsyncFunctionDef) or ast.get_docstring(parsed) is not None:
        return False
    return [ast.dump(node) for node in parsed.body] == [ast.dump(node) for node in body] \
        and ast.dump(parsed.args) == ast.dump(function.args)
