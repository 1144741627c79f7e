"""Studies: measurements, stored so that they can be read, checked and made again.

A study is a folder, `studies/<date>_<what>`: evidence.json (the Study, curves thinned), facts.json, and plans.json with
each arm's plan. A study is not written over, except one of claims as it grows; no path of this machine is written down.

`findings` holds what the kind of study adds to runs and comparisons, as plain JSON:
  ablation    recipe, profile, control, total, techniques       (evidence/ablation.py)
  tuning      recipe, candidates, chosen, total, control, key   (evidence/tuning.py)
  claims      claims                                            (claims/claim.py)
  bench       tables, assertions                                (evidence/bench.py)
  speed       rows: expected and measured seconds of a step
  memory      rows: predicted and measured bytes by component
  diagnosis   cases: planted cause, verdict, predicted and measured gain of the cure (benchmarks/crippled.py)
  audit       halves, subjects: what the audit found in public files, judged (benchmarks/audit_public.py)
  comparison  nothing
"""

import datetime
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from powertrain.records import Facts, Hardware, Software, WrongUse, to_plain
from powertrain.records.evidence import Study
from powertrain.records.json_files import replace_file

STUDIES = Path("studies")
PACKAGE = Path(__file__).resolve().parent.parent
EVIDENCE, FACTS, PLANS = "evidence.json", "facts.json", "plans.json"
CURVE = 60                                   # points of a curve that are kept, evenly spaced from the first step
CURVES, DIFFERENCES = ("losses", "grad_norms"), ("loss_difference", "grad_norm_difference")
LINE = 240                                   # characters, up to which a value of a JSON file stays on one line: a window does
ABSOLUTE = re.compile(r"(?<![\w.~:/\\])(?:[A-Za-z]:)?[/\\](?:[\w.+@~-]+[/\\])+([\w.+@~-]*)")


def new_folder(what: str, named: str | None = None) -> Path:
    """Return studies/<date>_<what> in the current directory, or studies/<named>; saving the study makes the folder.

    Raises WrongUse where `named` is there already; without a name another number is found.
    """
    if named is not None:
        folder = STUDIES / named
        if Path(named).name != named or named in ("", ".", ".."):
            raise WrongUse(f"--study {named} is not the name of a folder in {STUDIES}/; write for example --study {what}")
        if folder.exists():
            raise WrongUse(f"the study {folder} exists already and is not overwritten; use another name")
        return folder
    plain = STUDIES / f"{datetime.date.today()}_{what}"
    numbered = (plain.with_name(f"{plain.name}-{number}") for number in range(2, 10**6))
    return plain if not plain.exists() else next(folder for folder in numbered if not folder.exists())


def describe(facts: Facts) -> dict[str, Any]:
    """Return the fields of Study that describe the circumstances: date, command, commit, machine, versions."""
    return circumstances(facts.hardware, facts.software)


def circumstances(hardware: Hardware, software: Software) -> dict[str, Any]:
    """Return the same for a measurement without a model."""
    named = ("name", "device", "cores", "memory_bytes", "fingerprint")
    machine = {**{name: getattr(hardware, name) for name in named},
               "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None}
    return {"date": f"{datetime.date.today()}", "command": command(), "commit": commit(), "machine": machine,
            "versions": dict(software.versions)}


def command() -> str:
    """Return the command line, with the program's name for its path."""
    program, *words = sys.argv
    name = Path(program).name
    typed = "powertrain" if name == "__main__.py" else name
    return shlex.join([*(["python"] if typed.endswith(".py") else []), typed, *words])


def commit() -> str | None:
    """Return the commit of powertrain's checkout, with "+" where its source was changed; None outside a checkout."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None                          # this may be a checkout, and of something else
    head = _git("rev-parse", "--short=12", "HEAD")
    return head and head + ("+" if _git("status", "--porcelain", "--", ".") else "")


def _git(*words: str) -> str | None:
    """Return git's output in the package's folder; None where git fails."""
    try:
        done = subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def save(folder: Path, study: Study, facts: Facts | Mapping[str, Any], *, over: bool = False) -> None:
    """Write the study, each file whole. Raises WrongUse where the folder holds a study, unless it is written `over`."""
    if not over and any((folder / name).exists() for name in (FACTS, PLANS, EVIDENCE)):
        raise WrongUse(f"{folder} already holds a study, which is not overwritten; use another name")
    evidence = to_plain(replace(study, name=folder.name))
    evidence["arms"] = [{"name": arm["name"], "words": arm["words"]} for arm in evidence["arms"]]
    evidence["runs"] = [thinned(run) for run in evidence["runs"]]
    plans = {arm.name: arm.plan for arm in study.arms if arm.plan is not None}
    for name, value in ((FACTS, facts), (PLANS, plans), (EVIDENCE, evidence)):
        replace_file(folder / name, (as_text(to_plain(value, portable)) + "\n").encode())


def load(folder: Path) -> Study:
    """Return the study of a folder. Raises WrongUse where there is none, or one of another form."""
    path = folder / EVIDENCE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        plans = json.loads((folder / PLANS).read_text(encoding="utf-8")) if (folder / PLANS).exists() else {}
        return _study(found, plans)
    except FileNotFoundError:
        raise WrongUse(f"{folder} is no study: it has no {EVIDENCE}") from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise WrongUse(f"{path} is no study that this version can read ({type(error).__name__}: {error})") from None


def thinned(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run with its curves rounded, and thinned where the run is long. All windows are kept."""
    every = max(1, math.ceil(len(run["losses"]) / CURVE))
    curves = {name: [rounded(value) for value in run[name][::every]] for name in CURVES}
    windows = [{**window, "seconds": rounded(window["seconds"]),
                "parts": {part: rounded(seconds, 4) for part, seconds in window["parts"].items()}} for window in run["windows"]]
    return {**run, **curves, "windows": windows, "curves_every_steps": every}


def rounded(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def portable(value: Any) -> Any:
    """Return a text with its absolute paths cut to their last part, None for a number that is not finite, or else the value."""
    if isinstance(value, str):
        return ABSOLUTE.sub(lambda found: found[1] or "…", value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(value: Any, indent: int = 0) -> str:
    """Return JSON in which short values, and lists of numbers, take one line."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    numbers = isinstance(value, list) and all(isinstance(item, (int, float, type(None))) for item in value)
    if not isinstance(value, (dict, list)) or numbers or (indent and indent + len(line) <= LINE):
        return line
    inner = " " * (indent + 1)
    if isinstance(value, list):
        parts = [inner + as_text(item, indent + 1) for item in value]
    else:
        parts = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {as_text(item, indent + 1)}" for key, item in value.items()]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return opening + "\n" + ",\n".join(parts) + "\n" + " " * indent + closing


def _study(found: Mapping[str, Any], plans: Mapping[str, Any]) -> Study:
    """Return the study; None stands for a number that was not finite, and entries for readers of the file stay in the file."""
    arms = [{**arm, "plan": plans.get(arm["name"])} for arm in found["arms"]]
    runs = [{**run, **{curve: [math.nan if value is None else value for value in run[curve]] for curve in CURVES}}
            for run in found["runs"]]
    comparisons = [{**one, "parity": one["parity"] and {**one["parity"], **{
        name: math.inf for name in DIFFERENCES if one["parity"][name] is None}}} for one in found["comparisons"]]
    return TypeAdapter(Study).validate_python({**found, "arms": arms, "runs": runs, "comparisons": comparisons})
