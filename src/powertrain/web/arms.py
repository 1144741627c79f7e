"""Which of the runs beside each other are arms of a study, and what the study says of them.

A study keeps no runs. A run counts as an arm where data, model, batch, optimizer and machine are those of the study, and the
plan is the arm's: what the study has measured holds for it then.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from powertrain.recipe import flat, resolve_words
from powertrain.records import WrongUse
from powertrain.report.comparing import SAME_DATA, SAME_MACHINE, SAME_MODEL
from powertrain.report.run_page import RunFiles
from powertrain.web.places import Places, children

MOST_STUDIES = 5             # that are shown, the newest
OPTIMIZER = ("optimizer", "objective.")      # keys that decide a step's work, and are no facts
DAMAGED = (WrongUse, OSError, LookupError, TypeError, AttributeError, ValueError)        # also: of another version


@dataclass(frozen=True)
class Evidence:
    study: str                               # its folder
    arms: Mapping[str, str]                  # of these runs by name: the name of the arm
    says: tuple[str, ...]                    # of each two of them that the study compares


def evidence_of(places: Places, files: Mapping[str, RunFiles]) -> list[Evidence]:
    """Return what studies say of these runs, the newest first."""
    found = list[Evidence]()
    for folder in reversed(list(children(places.studies, ("evidence.json",)))):
        with suppress(*DAMAGED):             # the list of studies says what is wrong
            arms = _arms(places, folder, files)
            if arms and len(found) < MOST_STUDIES:
                found.append(Evidence(folder.name, arms, tuple(_says(places.json(folder / "evidence.json"), arms))))
    return found


def _arms(places: Places, folder: Path, files: Mapping[str, RunFiles]) -> dict[str, str]:
    """Return which of the runs are arms of a study, by the study's own files."""
    work = _work(places.json(folder / "facts.json"))
    alike = {name: run for name, run in files.items() if _is_work(run.facts, work)}
    if not alike:
        return {}
    plans = {arm: _techniques(plan) for arm, plan in places.json(folder / "plans.json").items()}
    words = {arm["name"]: arm["words"] for arm in places.json(folder / "evidence.json")["arms"]}
    found = {}
    for name, run in alike.items():
        arms = (arm for arm, plan in plans.items() if plan == _techniques(run.plan) and _has_optimizer_of(run, words[arm]))
        if (arm := next(arms, None)) is not None:
            found[name] = arm
    return found


def _is_work(facts: Mapping[str, Any], work: Mapping[str, Any]) -> bool:
    with suppress(*DAMAGED):
        return _work(facts) == work
    return False


def _work(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides how long a step takes, besides plan and optimizer. Paths are left out: a study holds none."""
    named = {"data": (*SAME_DATA, "train_batch_size"), "hardware": SAME_MACHINE,
             "model": tuple(name for name in SAME_MODEL if name != "path")}
    return {f"{part}.{name}": facts[part].get(name) for part, names in named.items() for name in names}


def _techniques(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {step["technique"]: step["settings"] for step in plan["steps"]}


def _has_optimizer_of(run: RunFiles, words: list[str]) -> bool:
    """Return whether the run uses the optimizer that an arm's words name. Raises WrongUse where that recipe is gone."""
    of_arm = dict(flat(resolve_words(words).recipe.model_dump()))
    return all(of_arm.get(key) == value for key, (value, _) in run.recipe.items() if key.startswith(OPTIMIZER))


def _says(evidence: Mapping[str, Any], arms: Mapping[str, str]) -> Iterator[str]:
    """Yield what the study found of each two of the runs, in words."""
    for a, b in permutations(arms, 2):
        for one in evidence["comparisons"]:
            if (one["a"], one["b"]) == (arms[a], arms[b]):
                parity = f"; losses: {one['parity']['because']}" if one["parity"] else ""
                yield f"{b} beside {a} ({one['b']} beside {one['a']}): {one['verdict']}, {one['because']}{parity}"
