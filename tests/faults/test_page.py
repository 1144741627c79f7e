"""docs/reliability.md is what page.py makes of the last whole run, and each test that it names exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from page import DOCS, counted, page
from rows import ROWS

TESTS = Path(__file__).parents[1]


def test_the_page_is_generated_from_the_last_run() -> None:
    told = json.loads((DOCS / "reliability.json").read_text(encoding="utf-8"))
    assert (DOCS / "reliability.md").read_text(encoding="utf-8") == page(told)


def test_there_are_forty_rows() -> None:
    assert len(ROWS) == 40


@pytest.mark.parametrize("test", sorted({test for _, test in ROWS if "::" in test}))
def test_each_named_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (TESTS / path).read_text(encoding="utf-8"), re.MULTILINE), test


def test_a_test_that_ran_twice_counts_once(tmp_path: Path) -> None:
    line = json.dumps({"what": "x", "points": 3, "test": "a"}) + "\n"
    (tmp_path / "1.jsonl").write_text(line + line)
    (tmp_path / "2.jsonl").write_text(json.dumps({"what": "x", "points": 4, "test": "b"}) + "\n")
    assert counted(tmp_path) == {"x": 7}
