"""What of a run or a study is told to a tracker besides its rows: its recipe, plan and facts, or its figures.

Nothing goes out that looks like a secret, and no name of this machine, its user or their files stands in the facts.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powertrain.records import WrongUse
from powertrain.records.json_files import read_json
from powertrain.records.redaction import redacted
from powertrain.records.sharing import shareable
from powertrain.tracking.tracker import Artefact, Followed

EVENTS, RECIPE, EVIDENCE = "events.jsonl", "recipe.yaml", "evidence.json"
OF_RUNS = (("recipe", RECIPE), ("plan", "plan.json"), ("facts", "facts.json"))           # kinds and files
OF_STUDIES = (("study", EVIDENCE), ("facts", "facts.json"), ("plan", "plans.json"))
ID_LENGTH = 16


def followed(path: Path, project: str | None, settings: Mapping[str, Any]) -> Followed:
    """Return the run or the study in a folder as trackers know it. Raises WrongUse where there is none, or no event yet."""
    if is_study(path):
        return Followed(path, _id((path / EVIDENCE).read_bytes()), "study", project)
    try:
        with open(path / EVENTS, "rb") as file:
            first = file.readline()
    except OSError as error:
        raise WrongUse(f"{path} holds no run that has begun ({error.strerror}); `powertrain runs list` shows the runs"
                       ) from None
    if not first.endswith(b"\n"):
        raise WrongUse(f"{path / EVENTS} has no event yet; wait for the run's first step")
    known = {key: redacted(value) if isinstance(value, str) else value for key, value in settings.items() if value is not None}
    return Followed(path, _id(first), "run", project, known)


def is_study(path: Path) -> bool:
    """Return whether a folder holds a study and no run."""
    return (path / EVIDENCE).is_file() and not (path / RECIPE).is_file()


def artefacts(run: Followed) -> list[Artefact]:
    """Return the files that a tracker gets, as they are now."""
    found = []
    for kind, name in OF_STUDIES if run.kind == "study" else OF_RUNS:
        if (file := run.path / name).is_file():
            found.append(Artefact(kind, name, _without_names(file) if file.suffix == ".json" else
                                  redacted(file.read_text(encoding="utf-8"))))
    return found


def digest(artefact: Artefact) -> str:
    return hashlib.sha256(artefact.text.encode()).hexdigest()


def _id(first: bytes) -> str:
    return hashlib.sha256(first).hexdigest()[:ID_LENGTH]


def _without_names(file: Path) -> str:
    return json.dumps(shareable(read_json(file)), indent=2, ensure_ascii=False)
