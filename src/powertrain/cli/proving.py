"""`powertrain ablate` and `powertrain tune`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain import planner
from powertrain.cli import output
from powertrain.cli.environment import budget_s, cache_folder, say
from powertrain.cli.training import prepare_words
from powertrain.evidence import studies
from powertrain.evidence.ablation import Subject, subjects_of
from powertrain.evidence.ablation import ablate as measure_techniques
from powertrain.evidence.clock import Arena
from powertrain.evidence.notebook import Notebook
from powertrain.evidence.tuning import Tuning
from powertrain.evidence.tuning import tune as find_fastest
from powertrain.records import to_plain
from powertrain.records.evidence import Interval, Parity, Study
from powertrain.report.figures import duration, memory
from powertrain.report.plan import plan_rows
from powertrain.run.fits import refuse_what_does_not_fit
from powertrain.run.learned import forget_tuned, keep_tuned, tuning_key
from powertrain.run.prepare import Prepared

USED = 0.95                  # of the budget: the last comparison may take a little longer than it was given


def ablate(words: Sequence[str], *, techniques: Sequence[str], budget: str, study: str | None, as_json: bool) -> None:
    began, seconds, folder = time.monotonic(), budget_s(budget), studies.new_folder("ablation", study)
    planner.check_names(techniques)
    prepared = _prepared(words)
    subjects = subjects_of(prepared, techniques)
    output.print_rows([("Plan", *row) for row in plan_rows(prepared.plan)], stderr=True, styles=("bold", "bold", "cyan"))
    with Arena(cache_folder()) as arena:
        notebook = Notebook(arena, tuple(words), say, began + USED * seconds)
        found = measure_techniques(prepared, subjects, notebook)
    what = f"what each technique does here, of the plan for {' '.join(words) or 'the default recipe'}"
    kept = _study("ablation", what, folder, prepared, notebook, found.findings, found.noise_floor, time.monotonic() - began)
    studies.save(folder, kept, prepared.facts)
    if as_json:
        _print_study(kept, folder)
        return
    header = ("technique", "bound", "speed with it", "memory", "same losses", "verdict", "why")
    output.print_rows([header, *(_technique_row(subject, notebook) for subject in found.subjects)])
    _print_totals(kept, folder)


def tune(words: Sequence[str], *, budget: str, study: str | None, as_json: bool) -> None:
    began, seconds, folder = time.monotonic(), budget_s(budget), studies.new_folder("tuning", study)
    prepared = _prepared(words)
    with Arena(cache_folder()) as arena:
        notebook = Notebook(arena, tuple(words), say, began + USED * seconds)
        found = find_fastest(prepared, notebook)
    findings = {**found.findings, "key": tuning_key(prepared.facts, prepared.recipe)}
    what = f"the fastest plan for {' '.join(words) or 'the default recipe'}, measured"
    kept = _study("tuning", what, folder, prepared, notebook, findings, found.noise_floor, time.monotonic() - began)
    studies.save(folder, kept, prepared.facts)
    cached = _cache(found, prepared, kept)
    if as_json:
        _print_study(kept, folder, because=found.because, cached=cached)
        return
    output.print_rows([("plan", "speed over the untuned one, by rounds", "kept", "why"),
                       *(_candidate_row(row) for row in findings["candidates"])])
    output.print_rows([("Tuned", _pins_in_words(found.pins) or "nothing"), ("Because", found.because),
                       *[("Length", f"{name} is used for runs of {steps:,} steps or more, which earn back what it takes to "
                                    "start") for name, steps in found.least_steps.items()],
                       ("Kept", cached)])
    _print_totals(kept, folder)


def _prepared(words: Sequence[str]) -> Prepared:
    prepared = prepare_words(words)
    refuse_what_does_not_fit(prepared)
    return prepared


def _study(kind: str, what: str, folder: Path, prepared: Prepared, notebook: Notebook, findings: Mapping[str, Any],
           noise_floor: float | None, seconds: float) -> Study:
    compared = {run.arm for run in notebook.runs}
    arms = tuple(arm for arm in notebook.arms.values() if arm.name in compared)
    return Study(name=folder.name, kind=kind, what=what, arms=arms, runs=tuple(notebook.runs),
                 comparisons=tuple(notebook.comparisons), noise_floor=noise_floor, findings=findings, seconds=seconds,
                 **studies.describe(prepared.facts))


def _cache(found: Tuning, prepared: Prepared, study: Study) -> str:
    """What later runs of this kind will do, in words."""
    if found.pins:
        file = keep_tuned(cache_folder(), prepared.facts, prepared.recipe, found.as_tuned(study.date, study.name))
        return f"runs of this model, data shape and software on this machine use it from now on ({file})"
    if not found.complete:
        return "nothing: not every plan was reached within the budget, and what was tuned before stays"
    forget_tuned(cache_folder(), prepared.facts, prepared.recipe)
    return "nothing: runs use the plan as the techniques themselves answer"


# ------------------------------------------------------------------------------------------------ in words


def _print_study(study: Study, folder: Path, **more: Any) -> None:
    shown = dataclasses.replace(study, arms=(), runs=())
    output.print_json({"event": study.kind, "folder": str(folder), **more,
                       **{key: value for key, value in to_plain(shown).items() if key not in ("arms", "runs")}})


def _print_totals(study: Study, folder: Path) -> None:
    total, floor = study.findings.get("total"), study.noise_floor
    rows = [("Noise", f"equal plans differ by up to {floor:.1%} here")] if floor is not None else []
    if total is not None and study.kind == "ablation":
        rows.append(("Total", f"the full plan against no technique: {study.comparisons[total].because}"))
    output.print_rows([*rows, ("Took", duration(study.seconds)), ("Study", f"{folder}/")])


def _technique_row(subject: Subject, notebook: Notebook) -> tuple[str, ...]:
    speed = None if subject.left_out is None else notebook.comparisons[subject.left_out].speed
    bound = "none" if subject.bound is None else f"x {subject.bound:.2f}"
    return (subject.name, bound, _speed(speed), _memory(subject.memory_bytes), _parity(subject.parity), subject.verdict,
            subject.why)


def _speed(speed: Interval | None) -> str:
    return "not timed" if speed is None else f"x {speed.median:.3f} ({speed.low:.3f} to {speed.high:.3f})"


def _memory(change_bytes: int | None) -> str:
    if change_bytes is None:
        return "unknown"
    return "the same" if not change_bytes else f"{'+' if change_bytes > 0 else '-'}{memory(abs(change_bytes))}"


def _parity(parity: Parity | None) -> str:
    return "not looked at" if parity is None else f"{'yes' if parity.holds else 'NO'} ({parity.demanded.lower()})"


def _candidate_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    rounds = "; ".join(f"x {speed['median']:.3f} ({speed['low']:.3f} to {speed['high']:.3f})" for speed in row["rounds"])
    return row["name"], rounds or "not tried", "yes" if row["kept"] else "no", row["why"]


def _pins_in_words(pins: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} off" if pin == "off" else f"{name} {pin}" if pin else f"{name} on" for name, pin in pins.items())
