"""The sentences of findings: each gets the figures that it names, each is told somewhere, and figures have their units."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from powertrain import diagnosis
from powertrain.diagnosis.wording import sentences, told

FILES = [path for folder in ("checks", "symptoms") for path in (Path(diagnosis.__path__[0]) / folder).glob("*.py")]


def calls() -> Iterator[tuple[set[str], ast.Call]]:
    """Yield the cases that each call of `told` may name, and the call."""
    for call in (node for path in FILES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "told":
            named = {node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant) and "." in str(node.value)}
            yield {case for name in named for case in (cases_of(name[:-1]) if name.endswith(".") else [name])}, call


def cases_of(rule: str) -> list[str]:
    return [f"{rule}.{name}" for name, entry in sentences()[rule].items() if isinstance(entry, dict)]


def figures_of(case: str) -> set[str]:
    rule, _, name = case.partition(".")
    found: dict[str, Any] = {**sentences()[rule], **sentences()[rule][name]}
    texts = [text for value in found.values() if not isinstance(value, dict)
             for text in ([value] if isinstance(value, str) else value)]
    named = {re.split(r"[.\[]", figure)[0] for text in texts for _, figure, _, _ in string.Formatter().parse(text) if figure}
    return named - ({"because"} if "because" in found else set())


def test_every_sentence_gets_its_figures() -> None:
    for cases, call in calls():
        given = {str(keyword.arg) for keyword in call.keywords}
        assert not [(case, figures_of(case) - given) for case in cases if figures_of(case) - given]


def test_every_entry_is_told_and_every_case_has_an_entry() -> None:
    told_somewhere = {case for cases, _ in calls() for case in cases}
    assert told_somewhere == {case for rule in sentences() if rule not in ("bound", "remedy") for case in cases_of(rule)}


def test_a_figure_has_its_unit() -> None:
    found = told("memory.fits", needed_bytes=3 << 29, room_bytes=1 << 31)
    assert found.evidence[0].what == "a step needs 1.50 GiB at its peak, and 2.00 GiB are free"
    assert found.numbers == {"needed_bytes": 3 << 29, "room_bytes": 1 << 31}
    with pytest.raises(KeyError):
        told("memory.fits", needed_bytes=1)
