"""`powertrain ablate`, `tune` and `bench`, which keep their measurements as a study, and `powertrain diagnose`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powertrain.cli import output
from powertrain.cli.options import Budget, Json, Machine, StudyName, Words, budget_s, cache_folder, say, tell
from powertrain.cli.streams import FAILED
from powertrain.cli.training import prepare_words, train_missing_base
from powertrain.records import WrongUse, to_plain
from powertrain.records.evidence import Arm, Study
from powertrain.report import rows
from powertrain.report.plan import plan_rows

if TYPE_CHECKING:
    from powertrain.diagnosis.diagnose import Diagnosis
    from powertrain.evidence.notebook import Notebook
    from powertrain.evidence.tuning import Tuning
    from powertrain.run.prepare import Prepared

USED = 0.95                  # of the budget: the last comparison may take a little longer than it was given
DEFAULT = "default"          # the embedded recipe


def ablate(words: Words = None,
           techniques: Annotated[list[str] | None, typer.Option("--technique", help="Measure only this technique (may "
                                                                                    "be repeated).")] = None,
           budget: Budget = "15m", study: StudyName = None, as_json: Json = False) -> None:
    """Measure the effect of each technique of the plan.

    Runs with and without each technique are compared in speed, memory and loss.
    """
    from powertrain import planner
    from powertrain.evidence import ablation, studies
    from powertrain.evidence.clock import Arena
    from powertrain.evidence.notebook import Notebook

    words = words or []
    began, seconds, folder = time.monotonic(), budget_s(budget), studies.new_folder("ablation", study)
    planner.check_names(techniques or [])
    prepared = _prepared(words)
    subjects = ablation.subjects_of(prepared, techniques or [])
    output.print_rows([("Plan", *row) for row in plan_rows(prepared.plan)], stderr=True, styles=("bold", "bold", "cyan"))
    with Arena(cache_folder()) as arena:
        notebook = Notebook(arena, tuple(words), say, began + USED * seconds)
        found = ablation.ablate(prepared, subjects, notebook)
    what = f"the effect of each technique in the plan for {' '.join(words) or 'the default recipe'}"
    kept = _keep("ablation", what, folder, prepared, notebook, found, began)
    if as_json:
        _print_study(kept, folder)
        return
    output.print_rows(rows.technique_rows(kept))
    output.print_rows(rows.total_rows(kept, folder))


def tune(words: Words = None, budget: Budget = "10m", study: StudyName = None, as_json: Json = False) -> None:
    """Find the fastest plan at the same batch by short runs.

    Later runs of this model, data shape and software on this machine use this plan.
    """
    from powertrain.evidence import studies, tuning
    from powertrain.evidence.clock import Arena
    from powertrain.evidence.notebook import Notebook
    from powertrain.run.learned import tuning_key

    words = words or []
    began, seconds, folder = time.monotonic(), budget_s(budget), studies.new_folder("tuning", study)
    prepared = _prepared(words)
    with Arena(cache_folder()) as arena:
        notebook = Notebook(arena, tuple(words), say, began + USED * seconds)
        found = tuning.tune(prepared, notebook)
    findings = {**found.findings, "key": tuning_key(prepared.facts, prepared.recipe)}
    what = f"the fastest plan for {' '.join(words) or 'the default recipe'}, measured"
    kept = _keep("tuning", what, folder, prepared, notebook, findings, began)
    cached = _cache(found, prepared, kept)
    if as_json:
        _print_study(kept, folder, because=found.because, cached=cached)
        return
    output.print_rows(rows.candidate_rows(findings["candidates"]))
    output.print_rows(rows.tuned_rows(found.pins, found.because, found.least_steps, cached))
    output.print_rows(rows.total_rows(kept, folder))


def bench(words: Words = None, budget: Budget = "10m", study: StudyName = None, as_json: Json = False) -> int:
    """Measure memory, loader settings, precision and accumulation.

    The exit code is 1 if a result contradicts one of the suite's assertions.
    """
    from powertrain.evidence import bench as suites
    from powertrain.evidence import studies
    from powertrain.evidence.clock import Arena
    from powertrain.evidence.notebook import Notebook

    began, seconds = time.monotonic(), budget_s(budget)
    folder = studies.new_folder("bench", study)
    named = tuple(words or [DEFAULT])
    prepared = prepare_words(named)
    changed = suites.without_dropout(named, prepared)
    prepared = prepared if changed == named else prepare_words(changed)
    suite = suites.make_suite(changed, prepared)
    with Arena(cache_folder()) as arena:
        notebook = Notebook(arena, changed, say, began + seconds)
        suites.bench(suite, notebook)
    arms = [setting.arm for setting in (suite.base, *(setting for table in suite.tables.values() for setting in table))]
    arms += [] if suite.control is None else [replace(suite.base.arm, name=notebook.comparisons[suite.control].b)]
    kept = _keep("bench", f"the performance suite on the recipe {' '.join(suite.base.arm.words)}", folder, prepared, notebook,
                 suites.findings(suite, notebook), began, arms)
    _print_bench(kept, folder, as_json=as_json)
    return 0 if all(assertion.holds for assertion in suite.assertions) else FAILED


def _prepared(words: Sequence[str]) -> Prepared:
    from powertrain.run.fits import refuse_what_does_not_fit

    prepared = prepare_words(words)
    refuse_what_does_not_fit(prepared)
    return prepared


def _keep(kind: str, what: str, folder: Path, prepared: Prepared, notebook: Notebook, findings: Mapping[str, Any],
          began: float, arms: Sequence[Arm] | None = None) -> Study:
    """Save what was measured as a study. `arms`: those to name, if not the ones that ran."""
    from powertrain.evidence import studies

    ran = {run.arm for run in notebook.runs}
    study = Study(name=folder.name, kind=kind, what=what, runs=tuple(notebook.runs),
                  arms=tuple(arms if arms is not None else (arm for arm in notebook.arms.values() if arm.name in ran)),
                  comparisons=tuple(notebook.comparisons), noise_floor=notebook.noise_floor, findings=findings,
                  seconds=time.monotonic() - began, **studies.describe(prepared.facts))
    studies.save(folder, study, prepared.facts)
    return study


def _cache(found: Tuning, prepared: Prepared, study: Study) -> str:
    """Keep the tuned plan for later runs of this kind; return what they will do, in words."""
    from powertrain.run.learned import forget_tuned, keep_tuned

    if found.pins:
        file = keep_tuned(cache_folder(), prepared.facts, prepared.recipe, found.as_tuned(study.date, study.name))
        return f"runs of this model, data shape and software on this machine use this plan from now on ({file})"
    if not found.complete:
        return "nothing: not every plan was reached within the budget; a plan tuned before stays in use"
    forget_tuned(cache_folder(), prepared.facts, prepared.recipe)
    return "nothing: runs use the plan that `powertrain plan` shows"


def _print_study(study: Study, folder: Path, **more: Any) -> None:
    shown = to_plain(replace(study, arms=(), runs=()))
    output.print_json({"event": study.kind, "folder": str(folder), **more,
                       **{key: value for key, value in shown.items() if key not in ("arms", "runs")}})


def _print_bench(study: Study, folder: Path, *, as_json: bool) -> None:
    findings = study.findings
    if as_json:
        output.print_json(*({"event": "table", "table": name, **table} for name, table in findings["tables"].items()))
        output.print_json(*({"event": "assertion", **assertion} for assertion in findings["assertions"]))
        output.print_json({"event": "study", "folder": str(folder), "noise_floor": study.noise_floor,
                           "notes": findings["notes"], "not_reached": findings["not_reached"], "seconds": study.seconds})
        return
    for table in rows.bench_tables(findings["tables"]):
        output.print_rows(table)
        print()
    output.print_rows([("holds" if assertion["holds"] else "FAILS", assertion["what"], assertion["because"])
                       for assertion in findings["assertions"]])
    output.print_rows(rows.bench_rows(study, folder))


# ------------------------------------------------------------------------------------------------ what holds a run back


def diagnose(words: Annotated[list[str] | None, typer.Argument(
                 metavar="[RECIPE | RUN] [KEY=VALUE ...]", show_default=False,
                 help="A recipe, whose first steps are run, or a run's folder, whose events are read.")] = None,
             budget: Budget = "60s",
             probe: Annotated[bool | None, typer.Option(show_default=False, help="Run the first steps and try cures (default: "
                                                                                 "yes, without --machine).")] = None,
             price_per_hour: Annotated[float | None, typer.Option(help="Price of an hour of this machine, to report the "
                                                                   "cost of the run.")] = None,
             machine: Machine = None,
             as_json: Json = False) -> int:
    """Find what makes a run slow or keeps it from learning.

    Each finding comes with its cure.

    Exit code: 0 no finding worse than low, 4 moderate findings, 5 critical findings.
    """
    words = words or []
    if price_per_hour is not None and price_per_hour < 0:
        raise WrongUse(f"--price-per-hour={price_per_hour:g} is below 0; name what an hour of this machine costs")
    seconds = budget_s(budget)
    if machine is not None and (probe or price_per_hour is not None):
        raise WrongUse(f"--machine {machine[:100]} is not here, so only its checks are made; leave --probe and "
                       "--price-per-hour out")
    found = _of_run(words, machine) if _names_a_run(words) else _of_recipe(
        words, seconds, price_per_hour, probe=machine is None and probe is not False, machine=machine)
    _print_diagnosis(to_plain(found), as_json=as_json, severity=found.severity)
    return output.BY_SEVERITY[found.severity]


def _of_recipe(words: Sequence[str], budget_s: float, price_per_hour: float | None, *, probe: bool,
               machine: str | None) -> Diagnosis:
    from powertrain.diagnosis import diagnose as room
    from powertrain.diagnosis.checks.machine import read_machine
    from powertrain.recipe import resolve_words

    resolved = resolve_words(words)
    train_missing_base(resolved.recipe, tell)
    prepared, refused = room.prepare_for_diagnosis(resolved, cache_folder(), say, machine)
    if probe:
        return room.diagnose(words, prepared, refused, cache=cache_folder(), budget_s=budget_s, say=say,
                             price_per_hour=price_per_hour)
    return room.Diagnosis(room.environment_of(prepared),
                          room.check(prepared, None if machine else read_machine(prepared), refused))


def _of_run(words: Sequence[str], machine: str | None) -> Diagnosis:
    from powertrain.diagnosis.diagnose import Diagnosis, causes_of, checked_for, description_of
    from powertrain.diagnosis.run_record import read_run
    from powertrain.diagnosis.symptoms import symptoms_of

    if len(words) > 1:
        raise WrongUse(f"{words[0]} is a run, and a run is diagnosed without changes; `powertrain diagnose "
                       f"{words[0]}/recipe.yaml {' '.join(words[1:])}` probes its recipe with these changes")
    run = read_run(Path(words[0]))
    found = Diagnosis(description_of(run), tuple(symptoms_of(run)), tuple(causes_of(run)))
    return checked_for(machine, found, Path(words[0]), cache_folder(), say) if machine else found


def _names_a_run(words: Sequence[str]) -> bool:
    """Return whether the first word is a folder, and not the name of a shipped recipe."""
    from powertrain.recipe.resolve import shipped_recipes

    if not words or "=" in words[0] or not (folder := Path(words[0])).is_dir():
        return False
    return (folder / "recipe.yaml").is_file() or words[0] not in shipped_recipes()


def _print_diagnosis(found: Mapping[str, Any], *, as_json: bool, severity: str) -> None:
    if as_json:
        for event, objects in (("environment", [found["environment"]]), ("finding", found["findings"]),
                               ("cause", found["causes"]), ("forecast", [found["forecast"]] if found["forecast"] else [])):
            output.print_json(*({"event": event, **one} for one in objects))
        output.print_json({"event": "diagnosis", "severity": severity, "exit_code": output.BY_SEVERITY[severity],
                           "bound_by": found["causes"][0]["name"] if found["causes"] else None, "failed": found["failed"],
                           "observed": found["probed"] and found["probed"]["observed"]})
        return
    output.print_rows(rows.diagnosis_rows(found))
    print()
    output.print_rows(rows.finding_rows(found["findings"]), styles=("bold", "bold"))
    output.print_rows([rows.summary_row(found["findings"])])
