"""`powertrain diagnose RUN`: a run that is finished, interrupted or training now, from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powertrain.cli import output
from powertrain.records import WrongUse, to_plain

MOST_FINDINGS = 2            # that `runs show` names; the others are for who asks


def worst_rows(folder: Path) -> list[tuple[str, str]]:
    """The worst of what a run's events show, as rows; none where nothing is above low."""
    from powertrain.diagnosis.run_record import read_run
    from powertrain.diagnosis.symptoms import symptoms_of

    found = [finding for finding in symptoms_of(read_run(folder)) if finding.severity in ("critical", "moderate")]
    return [*((finding.severity.capitalize(), finding.title) for finding in found[:MOST_FINDINGS]),
            *([("Why", f"powertrain diagnose {folder}")] if found else [])]


def names_a_run(words: Sequence[str]) -> bool:
    """Whether the first word is a folder; one that holds no run is said to hold none, unless a recipe has its name."""
    from powertrain.recipe.resolve import shipped_recipes

    if not words or "=" in words[0] or not (folder := Path(words[0])).is_dir():
        return False
    return (folder / "recipe.yaml").is_file() or words[0] not in shipped_recipes()


def diagnose_run(words: Sequence[str], *, as_json: bool) -> int:
    """The exit code, by severity."""
    from powertrain.cli.diagnosing import print_diagnosis
    from powertrain.diagnosis.diagnose import Diagnosis
    from powertrain.diagnosis.history import causes_of, told
    from powertrain.diagnosis.run_record import read_run
    from powertrain.diagnosis.symptoms import symptoms_of

    if len(words) > 1:
        raise WrongUse(f"{words[0]} is a run, and is diagnosed as it was; `powertrain diagnose {words[0]}/recipe.yaml "
                       f"{' '.join(words[1:])}` probes its recipe with these changes")
    run = read_run(Path(words[0]))
    found = Diagnosis(told(run), tuple(symptoms_of(run)), tuple(causes_of(run)))
    print_diagnosis(to_plain(found), as_json=as_json, severity=found.severity)
    return output.BY_SEVERITY[found.severity]
