"""docs/reliability.md is what page.py makes of the last whole run, and each test that it names exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from page import DOCS, counted, page
from rows import FOUND, ROWS

TESTS = Path(__file__).parents[1]


def test_the_page_is_generated_from_the_last_run() -> None:
    told = json.loads((DOCS / "reliability.json").read_text(encoding="utf-8"))
    assert (DOCS / "reliability.md").read_text(encoding="utf-8") == page(told)


def test_there_are_forty_rows() -> None:
    assert len(ROWS) == 40


def test_each_line_of_what_was_found_has_its_test() -> None:
    assert {how_grave for how_grave, *_ in FOUND} == {"high", "medium", "low", "untried"}
    for word in ("H1", "H2", "H3", "H4", "H5", "H6", "tokenizer.json", "newest checkpoint", "head", "templates", "audit",
                 "token store", "YAML", "learning_rate", "100 MB", "link", "char tokenizer", "sizes", "FIFOs", "lipsum", "NaN",
                 "name=../x", ".lock", "--sarif", "twice", "0600", "lasting EIO", "lasting errors of a cache", "config.json"):
        assert any(word in fault for _, fault, _ in FOUND), word


@pytest.mark.parametrize("test", sorted({test for *_, test in (*ROWS, *FOUND) if "::" in test}))
def test_each_named_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (TESTS / path).read_text(encoding="utf-8"), re.MULTILINE), test


def test_a_test_that_ran_twice_counts_once(tmp_path: Path) -> None:
    line = json.dumps({"what": "x", "points": 3, "test": "a"}) + "\n"
    (tmp_path / "1.jsonl").write_text(line + line)
    (tmp_path / "2.jsonl").write_text(json.dumps({"what": "x", "points": 4, "test": "b"}) + "\n")
    assert counted(tmp_path) == {"x": 7}
