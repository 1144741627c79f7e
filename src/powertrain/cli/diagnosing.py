"""`powertrain diagnose`: of a recipe before it trains, or of a run's folder (finished, interrupted or training now)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.cli import output
from powertrain.cli.environment import budget_s, cache_folder, say
from powertrain.records import WrongUse, to_plain
from powertrain.report.diagnosis import diagnosis_rows, finding_rows, summary_row

MOST_FINDINGS = 2            # that `runs show` names; `powertrain diagnose RUN` names all


def diagnose(words: Sequence[str], *, budget: str, probe: bool, price_per_hour: float | None, as_json: bool) -> int:
    """Print the diagnosis of a recipe or a run, and return the exit code by severity."""
    from powertrain.cli.training import train_base
    from powertrain.diagnosis.diagnose import Diagnosis, check, environment_of, prepare_for_diagnosis
    from powertrain.diagnosis.diagnose import diagnose as look_and_probe
    from powertrain.diagnosis.situation import read_machine
    from powertrain.recipe import resolve_words
    from powertrain.run.folder import missing_base

    if names_a_run(words):
        return diagnose_run(words, as_json=as_json)
    if price_per_hour is not None and price_per_hour < 0:
        raise WrongUse(f"--price-per-hour={price_per_hour:g} is below 0; name what an hour of this machine costs")
    seconds, resolved = budget_s(budget), resolve_words(words)
    if (base := missing_base(resolved.recipe)) is not None:
        train_base(base, say)
    prepared, refused = prepare_for_diagnosis(resolved, cache_folder(), say)
    if probe:
        found = look_and_probe(words, prepared, refused, cache=cache_folder(), budget_s=seconds, say=say,
                               price_per_hour=price_per_hour)
    else:
        found = Diagnosis(environment_of(prepared), check(prepared, read_machine(prepared), refused))
    print_diagnosis(to_plain(found), as_json=as_json, severity=found.severity)
    return output.BY_SEVERITY[found.severity]


def print_diagnosis(found: Mapping[str, Any], *, as_json: bool, severity: str) -> None:
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


def worst_rows(folder: Path) -> list[tuple[str, str]]:
    """Return the worst findings of a run's events as rows; none where nothing is above low."""
    from powertrain.diagnosis.run_record import read_run
    from powertrain.diagnosis.symptoms import symptoms_of

    found = [finding for finding in symptoms_of(read_run(folder)) if finding.severity in ("critical", "moderate")]
    return [*((finding.severity.capitalize(), finding.title) for finding in found[:MOST_FINDINGS]),
            *([("Why", f"powertrain diagnose {folder}")] if found else [])]


def names_a_run(words: Sequence[str]) -> bool:
    """Return whether the first word is a folder, and not the name of a shipped recipe."""
    from powertrain.recipe.resolve import shipped_recipes

    if not words or "=" in words[0] or not (folder := Path(words[0])).is_dir():
        return False
    return (folder / "recipe.yaml").is_file() or words[0] not in shipped_recipes()


def diagnose_run(words: Sequence[str], *, as_json: bool) -> int:
    """Print the diagnosis of a run's folder, and return the exit code by severity."""
    from powertrain.diagnosis.diagnose import Diagnosis
    from powertrain.diagnosis.history import causes_of, told
    from powertrain.diagnosis.run_record import read_run
    from powertrain.diagnosis.symptoms import symptoms_of

    if len(words) > 1:
        raise WrongUse(f"{words[0]} is a run, and is diagnosed without changes; `powertrain diagnose {words[0]}/recipe.yaml "
                       f"{' '.join(words[1:])}` probes its recipe with them")
    run = read_run(Path(words[0]))
    found = Diagnosis(told(run), tuple(symptoms_of(run)), tuple(causes_of(run)))
    print_diagnosis(to_plain(found), as_json=as_json, severity=found.severity)
    return output.BY_SEVERITY[found.severity]
