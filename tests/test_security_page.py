"""docs/security.md names only tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def missing(page: str) -> list[str]:
    """Return the tests that a page names and that no file has."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert named
    return [f"{file}::{test}" for file, test in named
            if not (ROOT / file).is_file() or f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")]


def test_every_test_that_the_page_names_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert missing(page) == []
    assert missing(page.replace("::test_a_lock_is", "::test_no_lock_is")) == [
        "tests/faults/test_code_of_others.py::test_no_lock_is_not_written_through_a_link"]


def test_every_test_that_the_page_of_the_page_names_is_there() -> None:
    named = re.findall(r"`(test_\w+)…?`", (ROOT / "docs" / "page.md").read_text(encoding="utf-8"))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 8
    assert [name for name in named if f"def {name}" not in tests] == []
