"""docs/audit.md: how the audit fared with public scripts and configs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tables.stored import folder_of, markdown_table, studies_of

NONE = ("No study of the audit is stored in `studies/` yet: `powertrain audit` is put to the proof by "
        "`python benchmarks/audit_public.py`.\n")
COLUMNS = ("files", "", "expected", "of these found", "without names that are gone", "findings", "of these right")
WHAT = {"critical": "crashes or mistrains (critical)", "moderate": "moderate"}


def public(studies: Path) -> str:
    """The newest study of the audit, each half of its files by itself."""
    found = studies_of("audit", studies)
    if not found:
        return NONE
    halves, kinds = found[-1]["findings"]["halves"], found[-1]["findings"].get("kinds", {})
    rows = [_row(half, counts, severity) for half, counts in reversed(halves.items()) for severity in WHAT]
    rows[2:2] = [_row(f"of these, {kind}", counts, "critical") for kind, counts in kinds.items()]
    return f"{markdown_table(COLUMNS, rows)}\n{folder_of(found[-1])}\n"


def _row(half: str, counts: Mapping[str, Any], severity: str) -> tuple[str, ...]:
    of = counts[severity]
    return (f"{half}: {counts['files']}", WHAT[severity], str(of["expected"]), share(of["expected_found"], of["expected"]),
            share(of["of_code_found"], of["of_code"]), str(of["findings"]), share(of["right"], of["findings"]))


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "none"
