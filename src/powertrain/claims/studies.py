"""Studies of kind `claims`: written again after every experiment, and read for the verdicts on this machine."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.claims.session import ClaimSession
from powertrain.evidence import studies
from powertrain.records import Hardware, Software, WrongUse, to_plain
from powertrain.records.evidence import Study

WHAT = "claims"


@dataclass(frozen=True)
class Known:
    """The newest verdict on a claim on this machine."""

    finding: Mapping[str, Any]               # as in a study
    study: str
    place: int                               # of that study among this machine's, from the oldest


def study_of(session: ClaimSession, name: str, circumstances: Mapping[str, Any], seconds: float) -> Study:
    findings = session.to_json()
    ids = [row["id"] for row in findings["claims"]]
    return Study(name, WHAT, f"{len(ids)} of the documents' claims, measured or reasoned about on this machine",
                 **circumstances, arms=tuple(session.arms), runs=tuple(session.runs),
                 comparisons=tuple(session.comparisons), noise_floor=session.noise_floor, findings=findings,
                 seconds=round(seconds, 1))


def keep(folder: Path, study: Study, hardware: Hardware, software: Software) -> None:
    """Write the study in place of its earlier version. A reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        fresh = Path(beside) / folder.name
        studies.save(fresh, study, {"hardware": to_plain(hardware), "software": to_plain(software)})
        for file in fresh.iterdir():
            os.replace(file, folder / file.name)


def known(folder: Path, fingerprint: str) -> dict[str, Known]:
    """Return claim id -> its newest verdict on the machine of this fingerprint, from the studies of `folder`."""
    here = [study for study in _claim_studies(folder) if study.machine.get("fingerprint") == fingerprint]
    found: dict[str, Known] = {}
    for place, study in enumerate(sorted(here, key=lambda study: (study.date, len(study.name), study.name))):
        for row in study.findings["claims"]:
            found[row["id"]] = Known(row, study.name, place)
    return found


def in_turn(ids: Sequence[str], found: Mapping[str, Known]) -> list[str]:
    """Return the ids without a verdict here; where all have one, all ids, those of the oldest study first."""
    return [name for name in ids if name not in found] or sorted(ids, key=lambda name: found[name].place)


def _claim_studies(folder: Path) -> list[Study]:
    found = []
    for path in sorted(folder.glob(f"*/{studies.EVIDENCE}")):
        try:
            kind = json.loads(path.read_text(encoding="utf-8")).get("kind")
        except (ValueError, AttributeError):
            raise WrongUse(f"{path} is damaged; repair it, or move {path.parent} out of {folder}/") from None
        if kind == WHAT:
            found.append(studies.load(path.parent))
    return found
