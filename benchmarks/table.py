"""The pages' tables, of studies/ and of the code's own lists: `python benchmarks/table.py` writes them between their marks.

A mark is `<!-- NAME -->` ... `<!-- /NAME -->` in the page. docs/claims.md has none: all of it is generated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "benchmarks") not in sys.path:
    sys.path.insert(0, str(ROOT / "benchmarks"))

from tables import audited, claims, diagnosis, growth, peers, rooms, rules, techniques  # noqa: E402

Make = Callable[[Path], str]                 # the folder of studies -> Markdown
PAGES: Mapping[str, Mapping[str, Make] | Make] = {
    "README.md": {"results": peers.fastest},
    "docs/results.md": {"studies": peers.rows, "spent": peers.spent, "growth": growth.rows, "techniques": techniques.short},
    "docs/techniques.md": {"techniques": techniques.in_full},
    "docs/claims.md": claims.page,
    "docs/ARCHITECTURE.md": {"rooms": rooms.imports},
    "docs/audit.md": {"public": audited.public, "rules": rules.rows},
    "docs/diagnosis.md": {"checks": diagnosis.checks, "symptoms": diagnosis.symptoms, "crippled": diagnosis.crippled},
}


def made(root: Path = ROOT) -> dict[str, str]:
    """Page -> its text as the studies in root/studies make it."""
    studies = root / "studies"
    return {page: _filled(page, (root / page).read_text(encoding="utf-8"), tables, studies) if isinstance(tables, Mapping)
            else tables(studies) for page, tables in PAGES.items()}


def _filled(page: str, text: str, tables: Mapping[str, Make], studies: Path) -> str:
    for mark, make in tables.items():
        between = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
        if not between.search(text):
            raise ValueError(f"{page} lacks the marks <!-- {mark} --> and <!-- /{mark} -->, where a table belongs")
        table = make(studies)
        text = between.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text, count=1)
    return text


def main() -> None:
    for page, text in made().items():
        (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
