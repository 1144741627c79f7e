"""`powertrain diagnose`: of a recipe before it trains, or of a run's folder (finished, interrupted or training now)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powertrain.cli import output
from powertrain.cli.options import Budget, Json, budget_s, cache_folder, say
from powertrain.records import WrongUse, to_plain
from powertrain.report.rows import diagnosis_rows, finding_rows, summary_row

if TYPE_CHECKING:
    from powertrain.diagnosis.diagnose import Diagnosis


def diagnose(words: Annotated[list[str] | None, typer.Argument(
                 metavar="[RECIPE | RUN] [KEY=VALUE ...]", show_default=False,
                 help="A recipe, whose first steps are run, or a run's folder, whose events are read.")] = None,
             budget: Budget = "60s",
             probe: Annotated[bool, typer.Option(help="Run the first steps and try cures; --no-probe only checks.")] = True,
             price_per_hour: Annotated[float | None, typer.Option(help="Price of an hour of this machine, to report the "
                                                                   "cost of the run.")] = None,
             as_json: Json = False) -> int:
    """Find what makes a run slow or keeps it from learning.

    Each finding comes with its cure.

    Exit code: 0 no finding worse than low, 4 moderate findings, 5 critical findings.
    """
    words = words or []
    if price_per_hour is not None and price_per_hour < 0:
        raise WrongUse(f"--price-per-hour={price_per_hour:g} is below 0; name what an hour of this machine costs")
    seconds = budget_s(budget)
    found = _of_run(words) if _names_a_run(words) else _of_recipe(words, seconds, price_per_hour, probe=probe)
    _print(to_plain(found), as_json=as_json, severity=found.severity)
    return output.BY_SEVERITY[found.severity]


def _of_recipe(words: Sequence[str], budget_s: float, price_per_hour: float | None, *, probe: bool) -> Diagnosis:
    from powertrain.cli.training import train_missing_base
    from powertrain.diagnosis import diagnose as room
    from powertrain.diagnosis.checks.machine import read_machine
    from powertrain.recipe import resolve_words

    resolved = resolve_words(words)
    train_missing_base(resolved.recipe, say)
    prepared, refused = room.prepare_for_diagnosis(resolved, cache_folder(), say)
    if probe:
        return room.diagnose(words, prepared, refused, cache=cache_folder(), budget_s=budget_s, say=say,
                             price_per_hour=price_per_hour)
    return room.Diagnosis(room.environment_of(prepared), room.check(prepared, read_machine(prepared), refused))


def _of_run(words: Sequence[str]) -> Diagnosis:
    from powertrain.diagnosis.diagnose import Diagnosis, causes_of, description_of
    from powertrain.diagnosis.run_record import read_run
    from powertrain.diagnosis.symptoms import symptoms_of

    if len(words) > 1:
        raise WrongUse(f"{words[0]} is a run, and is diagnosed without changes; `powertrain diagnose {words[0]}/recipe.yaml "
                       f"{' '.join(words[1:])}` probes its recipe with them")
    run = read_run(Path(words[0]))
    return Diagnosis(description_of(run), tuple(symptoms_of(run)), tuple(causes_of(run)))


def _names_a_run(words: Sequence[str]) -> bool:
    """Return whether the first word is a folder, and not the name of a shipped recipe."""
    from powertrain.recipe.resolve import shipped_recipes

    if not words or "=" in words[0] or not (folder := Path(words[0])).is_dir():
        return False
    return (folder / "recipe.yaml").is_file() or words[0] not in shipped_recipes()


def _print(found: Mapping[str, Any], *, as_json: bool, severity: str) -> None:
    if as_json:
        output.print_json({"event": "environment", **found["environment"]})
        for finding in found["findings"]:
            output.print_json({"event": "finding", **finding})
        for cause in found["causes"]:
            output.print_json({"event": "cause", **cause})
        if found["forecast"]:
            output.print_json({"event": "forecast", **found["forecast"]})
        output.print_json({"event": "diagnosis", "severity": severity, "exit_code": output.BY_SEVERITY[severity],
                           "bound_by": found["causes"][0]["name"] if found["causes"] else None, "failed": found["failed"],
                           "observed": found["probed"] and found["probed"]["observed"]})
        return
    output.print_rows(diagnosis_rows(found))
    print()
    output.print_rows(finding_rows(found["findings"]), styles=("bold", "bold"))
    output.print_rows([summary_row(found["findings"])])
