"""The studies in a folder, and figures as the tables show them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Study = Mapping[str, Any]                    # evidence.json, as records/evidence.py describes it


def studies_of(kind: str, folder: Path) -> list[Study]:
    """The studies of a kind in `folder`, oldest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/evidence.json")]
    ours = [study for study in found if study.get("kind") == kind]
    return sorted(ours, key=lambda study: (study["date"], len(study["name"]), study["name"]))       # NAME, NAME-2, NAME-10


def machine(study: Study) -> str:
    of = study["machine"]
    return f"{of['name']}, {of['cores']} cores" if of.get("device", "cpu") == "cpu" else str(of["name"])


def times(interval: Mapping[str, float] | None, digits: str = ".2f") -> str:
    """1.12 (1.10 to 1.14), as a factor; nothing where nothing was timed."""
    if interval is None:
        return ""
    median, low, high = (f"{interval[name]:{digits}}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def folder_of(study: Study) -> str:
    return f"`studies/{study['name']}`"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" if line[0] != "---" else
                   f"|{'|'.join(line)}|\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
