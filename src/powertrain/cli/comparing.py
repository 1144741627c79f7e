"""`powertrain runs compare`."""

from __future__ import annotations

from pathlib import Path

from powertrain.cli import output
from powertrain.records import WrongUse
from powertrain.report.comparing import RunFiles, comparison_rows, difference, read_recipe, sentences, to_json


def compare_runs(a: Path, b: Path, *, as_json: bool) -> None:
    if a.resolve() == b.resolve():
        raise WrongUse(f"{a} and {b} are the same run; name two, `powertrain runs list` shows them")
    found = difference(read_run(a), read_run(b))
    if as_json:
        output.print_json(to_json(found))
        return
    output.print_rows(comparison_rows(found), styles=("bold", "cyan"))
    output.print_rows(sentences(found))


def read_run(path: Path) -> RunFiles:
    """Everything that the run's folder says. Raises WrongUse where it holds no run, or a file that cannot be read."""
    from powertrain.run.folder import existing, read_json
    from powertrain.training.events import read_events

    folder = existing(path)
    files = {"facts.json": "its machine, data and model", "plan.json": "its techniques", "events.jsonl": "its steps"}
    missing = tuple(f"{path} has no {name}, so {what} are unknown" for name, what in files.items()
                    if not (path / name).is_file())
    try:
        recipe = read_recipe(folder.recipe.read_text(encoding="utf-8"))
        events = read_events(folder.events) if folder.events.is_file() else []
    except ValueError as error:              # WrongUse is one too, and says which line
        raise WrongUse(f"{path}: {error}") from None
    facts, plan = (read_json(file) if file.is_file() else {} for file in (folder.facts, folder.plan))
    return RunFiles(str(path), recipe, facts, plan, events, missing)
