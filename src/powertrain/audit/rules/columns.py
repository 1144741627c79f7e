"""Rules on the columns of data: those that a script reads, and those that a file of the project has."""

import ast
import csv
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from powertrain.audit.rules.base import Findings, code_rule, found
from powertrain.audit.rules.labels import ANSWERS, PROMPTS
from powertrain.audit.scopes import is_tried
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, argument, every, last_name, owner_of

# published data -> the columns of a prompt, of which each belongs into it
COLUMNS = {"yahma/alpaca-cleaned": ("instruction", "input"), "tatsu-lab/alpaca": ("instruction", "input"),
           "vicgalle/alpaca-gpt4": ("instruction", "input"), "iamtarun/python_code_instructions_18k_alpaca": (
               "instruction", "input"), "databricks/databricks-dolly-15k": ("instruction", "context")}
PAIRS = (("instruction", "input"), ("instruction", "context"), ("question", "context"))      # of a prompt
RENAMING = (".rename_column", ".rename_columns", ".rename", ".add_column", ".merge", ".flatten")
MOST_BYTES, FIRST_ROWS = 1 << 24, 1000         # of a file whose columns are read


@code_rule
def column_left_out(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The prompt leaves out a column of the data that belongs to it."""
    source, own = subject.settings.get("data.source"), _own_data(script)
    data, columns = str(source.value) if source is not None else "", COLUMNS.get(str(source.value), ()) if source else ()
    if not columns and own is not None:
        data, source = own.name, None
        columns = next((pair for pair in PAIRS if all(own.columns.get(name, 0) > 1 / 2 for name in pair)), ())
    texts = {node.value for node in script.every(ast.Constant) if isinstance(node.value, str)}
    reads = {column: any(text == column or re.search(rf"\{{\s*{column}\b", text) for text in texts) or script.says(f".{column}")
             for column in columns}
    first = next((node for node in script.every(ast.Subscript) if isinstance(node.slice, ast.Constant)
                  and node.slice.value in columns[:1]), None)
    missing = [column for column, read in reads.items() if not read]
    renamed = script.has_call(".rename_column", ".remove_columns", ".filter")
    if first is not None and missing and not renamed:
        yield found("critical", first, source or (own.load if own is not None else None), column=missing[0], data=data)


@code_rule
def column_not_there(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A row is asked for a column that the project's own data does not have."""
    own = _own_data(script)
    first = min((call for call in script.calls(".map", ".filter") if own is not None and own.load in script.behind(
        owner_of(call) or call)), key=lambda call: call.lineno, default=None)
    if own is None or first is None or not own.columns or script.has_call(*RENAMING) or argument(first, "input_columns"):
        return                                           # behind the first, rows have other columns
    stored = [node.slice for node in every(ast.Subscript, script.tree) if isinstance(node.ctx, ast.Store)]
    stored += [key for node in every(ast.Dict, script.tree) for key in node.keys if key is not None]
    known = {*own.columns, *(node.value for node in stored if isinstance(node, ast.Constant))}
    known |= {item.arg for item in every(ast.keyword, script.tree)}
    lost = [node for name, node in read_of_rows(mapped(script, first)) if name not in known and not is_tried(script, node)
            and not script.conditions(node) and not any(isinstance(each, ast.IfExp) for each in script.ancestors(node))]
    if lost:
        yield found("critical", lost[0], own.load, name=str(getattr(lost[0].slice, "value", "")), has=", ".join(own.columns),
                   file=own.name)


@code_rule
def answers_alone(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The text that is trained is the answer alone, without what it answers."""
    own, functions = _own_data(script), mapped(script, *script.calls(".map", ".filter"))
    read = {name for name, _ in read_of_rows(functions)}
    texts = [node for function in functions for node in every(ast.Dict, function)
             for key, value in zip(node.keys, node.values, strict=True)
             if getattr(key, "value", "") == "text" and isinstance(value, ast.Subscript)]
    answers = sorted(read & ANSWERS)
    asked = own is not None and any(own.columns.get(name, 0) > 1 / 2 for name in PROMPTS)
    if subject.trainer == "trl.SFTTrainer" and texts and answers and asked and not script.says(*PROMPTS):
        yield found("critical", texts[0], name=answers[0])


def read_of_rows(functions: list[FunctionNode | ast.Lambda]) -> list[tuple[str, ast.Subscript]]:
    """Return the columns that functions read of the rows that they are given first, each with where."""
    return [(node.slice.value, node) for function in functions for node in every(ast.Subscript, function)
            if isinstance(node.value, ast.Name) and node.value.id == function.args.args[0].arg
            and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)]


def mapped(script: Script, *calls: ast.Call) -> list[FunctionNode | ast.Lambda]:
    """Return the functions that calls of `map` and `filter` run for rows, as far as they stand in the project."""
    given = [call.args[0] for call in calls if call.args]
    functions = [item if isinstance(item, ast.Lambda) else script.functions.get(last_name(item)) for item in given]
    return [each for each in functions if each is not None and each.args.args]


@dataclass(frozen=True)
class _Own:
    """A file of the project that the script loads as its data."""

    load: ast.Call
    name: str
    columns: Mapping[str, float]             # of its first rows, with the share of these in which each is not empty


@lru_cache(maxsize=2)
def _own_data(script: Script) -> _Own | None:
    """Return the project's own data, if the script loads one file of it and nothing else."""
    loads = list(script.calls("datasets.load_dataset", "datasets.load_from_disk", "datasets.Dataset.from_json",
                              "datasets.Dataset.from_csv", "datasets.Dataset.from_list", "datasets.Dataset.from_pandas",
                              "datasets.Dataset.from_dict"))
    plain = len(loads) == 1 and all(item.arg in ("path", "data_files", "split") for item in loads[0].keywords)
    given = argument(loads[0], "data_files") if plain else None
    names = {node.value for node in script.behind(given) if isinstance(node, ast.Constant) and isinstance(node.value, str)
             and node.value.endswith((".json", ".jsonl", ".csv"))} if given is not None else set()
    root = (script.root or script.path.parent).resolve()
    files = [folder / name for name in names for folder in (script.path.resolve().parent, root)]
    file = next((each for each in files if each.is_file() and each.resolve().is_relative_to(root)), None)
    small = len(names) == 1 and file is not None and file.stat().st_size <= MOST_BYTES
    return _Own(loads[0], file.name, columns_of(file)) if small and file is not None else None


def columns_of(file: Path) -> Mapping[str, float]:
    """Return the columns of a file's first rows, each with the share of these rows in which it is not empty."""
    rows: list[Any] = []
    with suppress(OSError, ValueError, RecursionError, csv.Error), open(file, encoding="utf-8-sig", newline="") as opened:
        rows = list(islice(_rows(file, opened), FIRST_ROWS))
    tables = [row for row in rows if isinstance(row, dict)]
    names = dict.fromkeys(str(name) for row in tables for name in row)
    return {name: sum(bool(row.get(name)) for row in tables) / len(tables) for name in names}


def _rows(file: Path, opened: Any) -> Iterator[Any]:
    if file.suffix == ".csv":
        yield from csv.DictReader(opened)
        return
    text = opened.read()
    if text.lstrip().startswith("["):
        yield from json.loads(text)
    else:
        yield from (json.loads(line) for line in islice(text.splitlines(), FIRST_ROWS) if line.strip())
