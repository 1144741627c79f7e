"""`powertrain runs`: list, show and compare the runs in a folder."""

from __future__ import annotations

from pathlib import Path

from powertrain.cli import output
from powertrain.cli.diagnosing import worst_rows
from powertrain.records import WrongUse, to_plain
from powertrain.records.event_log import read_events
from powertrain.records.json_files import read_json
from powertrain.records.origins import asked_lines
from powertrain.report.comparing import RunFiles, comparison_rows, difference, sentences, to_json
from powertrain.report.figures import count
from powertrain.report.result import result_rows, sample_rows, step_time_row
from powertrain.run import folder as run_folder


def list_runs(folder: Path, *, as_json: bool) -> None:
    found = run_folder.list_runs(folder)
    if as_json:
        for run in found:
            output.print_json({"event": "run", **to_plain(run), "folder": str(run.folder)})
        return
    if not found:
        raise WrongUse(f"there are no runs in {folder}/; `powertrain train` makes a run")
    header = ("folder", "started", "state", "steps", "loss", "bits/byte", "tokens/s")
    output.print_rows([header, *[
        (str(run.folder), run.started, run.state, f"{run.step:,}/{run.total_steps:,}",
         "" if run.loss is None else f"{run.loss:.4f}", "" if run.bits_per_byte is None else f"{run.bits_per_byte:.3f}",
         "" if run.tokens_per_s is None else count(run.tokens_per_s)) for run in found]])


def show_run(path: Path, *, as_json: bool) -> None:
    folder = run_folder.existing(path)
    events = read_events(folder.events) if folder.events.is_file() else []
    if as_json:
        output.print_json({"event": "run", **to_plain(run_folder.summarise(folder)), "folder": str(path)})
        return
    output.print_rows([("Recipe", line) for line in asked_lines(run_folder.stored_recipe(folder), planned=True)])
    plan = read_json(folder.plan)
    output.print_rows([("Plan", "on", step["technique"], step["because"]) for step in plan["steps"]] +
                      [("Plan", "off", refusal["technique"], refusal["because"]) for refusal in plan["refused"]])
    output.print_rows(sample_rows(events))
    if rows := result_rows(events, str(path), None):
        place = 1 + next((number for number, (title, _) in enumerate(rows) if title == "Speed"), 0)
        output.print_rows([*rows[:place], step_time_row(events), *rows[place:]])
    else:
        run = run_folder.summarise(folder)
        output.print_rows([("State", f"{run.state}, at step {run.step:,} of {run.total_steps:,}"), step_time_row(events),
                           ("Continue", f"powertrain train --resume {path}")])
    if events:
        output.print_rows(worst_rows(path))


def compare_runs(a: Path, b: Path, *, as_json: bool) -> None:
    if a.resolve() == b.resolve():
        raise WrongUse(f"{a} and {b} are the same run; name two different runs (`powertrain runs list` shows them)")
    found = difference(read_run(a), read_run(b))
    if as_json:
        output.print_json(to_json(found))
        return
    output.print_rows(comparison_rows(found), styles=("bold", "cyan"))
    output.print_rows(sentences(found))


def read_run(path: Path) -> RunFiles:
    """Read a run's folder. Raises WrongUse if the folder holds no run, or a file that cannot be read."""
    folder = run_folder.existing(path)
    files = {"facts.json": "its machine, data and model", "plan.json": "its techniques", "events.jsonl": "its steps"}
    missing = tuple(f"{path} has no {name}, so {what} are unknown" for name, what in files.items()
                    if not (path / name).is_file())
    try:
        recipe = run_folder.stored_recipe(folder)
        events = read_events(folder.events) if folder.events.is_file() else []
    except ValueError as error:              # WrongUse is one too, and says which line
        raise WrongUse(f"{path}: {error}") from None
    facts, plan = (read_json(file) if file.is_file() else {} for file in (folder.facts, folder.plan))
    return RunFiles(str(path), recipe, facts, plan, events, missing)
