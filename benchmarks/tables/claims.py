"""docs/claims.md, wholly generated: every claim beside what was measured of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powertrain.claims.claim import Catalogue, Claim, catalogue
from powertrain.claims.verdicts import shown
from powertrain.records.evidence import NOT_HERE, Interval
from tables.stored import Study, folder_of, machine, markdown_table, studies_of

HEAD = """# Claims

What five systems' documents claim, beside what was measured here. `python benchmarks/table.py` writes this page from
`src/powertrain/claims/claims.yaml` and from the newest study of each claim.

"""
NONE = "No study of claims is stored in `studies/` yet: `powertrain claims run` makes one.\n"
UNMEASURED = "not measured yet"
COLUMNS = ("claim", "what", "claimed", "measured (95 %)", "verdict", "because", "study")

Decided = tuple[Mapping[str, Any], Study]    # a claim's findings, and the study that they are from


def page(studies: Path, claims: Catalogue | None = None) -> str:
    decided = newest(studies)
    if not decided:
        return HEAD + NONE
    claims = claims or catalogue()
    counted = Counter(_verdict(decided.get(claim.id)) for claim in claims.claims)
    summary = ", ".join(f"{number} {verdict}" for verdict, number in counted.most_common())
    sections = [_section(document, about, [claim for claim in claims.claims if claim.document == document], decided)
                for document, about in sorted(claims.documents.items())]
    return f"{HEAD}{len(claims.claims)} claims: {summary}.\n\n" + "\n".join(sections) + "\n" + _machines(decided)


def newest(studies: Path) -> dict[str, Decided]:
    """Claim -> its newest finding; that a machine cannot decide it never hides what another one has measured."""
    found: dict[str, Decided] = {}
    for study in studies_of("claims", studies):
        for claim in study["findings"]["claims"]:
            before = found.get(claim["id"])
            if before is None or claim["verdict"] != NOT_HERE or before[0]["verdict"] == NOT_HERE:
                found[claim["id"]] = claim, study
    return found


def _section(document: str, about: str, claims: list[Claim], decided: Mapping[str, Decided]) -> str:
    rows = [_row(claim, decided.get(claim.id)) for claim in sorted(claims, key=lambda claim: claim.id)]
    return f"## {document}: {about}\n\n{markdown_table(COLUMNS, rows)}"


def _row(claim: Claim, found: Decided | None) -> tuple[str, ...]:
    told = (claim.id, claim.what, claim.claimed)
    if found is None:
        return *told, "", UNMEASURED, f"`powertrain claims run {claim.id}` measures it", ""
    finding, study = found
    measured = shown(claim, Interval(**finding["measured"])) if finding["measured"] else ""
    return *told, measured, f"**{finding['verdict']}**", finding["because"], folder_of(study)


def _verdict(found: Decided | None) -> str:
    return UNMEASURED if found is None else str(found[0]["verdict"])


def _machines(decided: Mapping[str, Decided]) -> str:
    """Where the studies were made."""
    used = {study["name"]: study for _, study in decided.values()}
    lines = [f"- {folder_of(study)}: {machine(study)}, torch {study['versions'].get('torch', 'unknown')}; "
             f"`{study['command']}`" for _, study in sorted(used.items())]
    return "## Studies\n\n" + "\n".join(lines) + "\n"
