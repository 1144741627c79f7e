"""`powertrain runs` and `powertrain report`: what the folders of runs and studies hold."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli import output as screen
from powertrain.cli.grouping import group
from powertrain.cli.options import Json, Run
from powertrain.records import WrongUse, timeline, to_plain
from powertrain.records.event_log import counted, read_all_events, read_events
from powertrain.records.events import Start
from powertrain.records.json_files import read_json, replace_file
from powertrain.records.origins import asked_lines
from powertrain.records.redaction import redacted
from powertrain.report.result import result_rows, sample_rows, step_time_row
from powertrain.report.words import count, labelled

if TYPE_CHECKING:
    from powertrain.records.findings import Finding
    from powertrain.report.page import Page
    from powertrain.report.run_page import RunFiles

MOST_FINDINGS = 2            # that `runs show` names; `powertrain diagnose RUN` names all
FILES = {"facts.json": "its machine, data and model", "plan.json": "its techniques", "events.jsonl": "its steps"}


def list_runs(folder: Annotated[Path, typer.Argument(help="Folder with the runs.")] = Path("runs"),
              as_json: Json = False) -> None:
    """List the runs in a folder with their state and result."""
    from powertrain.mirror.returning import clear_drafts
    from powertrain.run.folder import list_runs as runs_in

    clear_drafts(folder)
    found = runs_in(folder)
    if as_json:
        screen.print_json(*({"event": "run", **to_plain(run), "folder": str(run.folder)} for run in found))
        return
    if not found:
        raise WrongUse(f"there are no runs in {folder}/; `powertrain train` makes a run")
    header = ("folder", "started", "state", "steps", "loss", "bits/byte", "tokens/s")
    screen.print_rows([header, *[
        (str(run.folder), run.started, run.state, f"{run.step:,}/{run.total_steps:,}",
         "" if run.loss is None else f"{run.loss:.4f}", "" if run.bits_per_byte is None else f"{run.bits_per_byte:.3f}",
         "" if run.tokens_per_s is None else count(run.tokens_per_s)) for run in found]])


def show(run: Run, as_json: Json = False) -> None:
    """Show one run: recipe, plan, sample, result."""
    from powertrain.run.folder import existing, stored_recipe, summarise

    folder = existing(run)
    events = read_events(folder.events)
    if as_json:
        screen.print_json({"event": "run", **to_plain(summarise(folder)), "folder": str(run)})
        return
    screen.print_rows([("Recipe", line) for line in asked_lines(stored_recipe(folder), planned=True)])
    plan = read_json(folder.plan, having="steps")
    screen.print_rows([("Plan", "on", step["technique"], step["because"]) for step in plan["steps"]] +
                      [("Plan", "off", refusal["technique"], refusal["because"]) for refusal in plan["refused"]])
    screen.print_rows(sample_rows(events))
    if rows := result_rows(events, str(run), None):
        place = 1 + next((number for number, (title, _) in enumerate(rows) if title == "Speed"), 0)
        screen.print_rows([*rows[:place], step_time_row(events), *rows[place:]])
    else:
        summary = summarise(folder)
        screen.print_rows([("State", f"{summary.state}, at step {summary.step:,} of {summary.total_steps:,}"),
                           step_time_row(events), ("Continue", (timeline.last_of(Start, events) or Start()).command(str(run)))])
    worst = [finding for finding in _symptoms(run) if finding.severity in ("critical", "moderate")] if events else []
    screen.print_rows([*((finding.severity.capitalize(), finding.title) for finding in worst[:MOST_FINDINGS]),
                       *([("Why", f"powertrain diagnose {run}")] if worst else [])])


def _symptoms(run: Path) -> list[Finding]:
    """Return what `powertrain diagnose RUN` finds in the events, the worst first."""
    from powertrain.diagnosis.run_record import read_run
    from powertrain.diagnosis.symptoms import symptoms_of

    return list(symptoms_of(read_run(run)))


def compare(a: Annotated[Path, typer.Argument(help="Folder of the first run.")],
            b: Annotated[Path, typer.Argument(help="Folder of the second run.")], as_json: Json = False) -> None:
    """Show how two runs differ in recipe, plan, facts and result."""
    from powertrain.report.comparing import comparison_rows, difference, sentences

    if a.resolve() == b.resolve():
        raise WrongUse(f"{a} and {b} are the same run; name two different runs (`powertrain runs list` shows them)")
    found = difference(read_run(a), read_run(b))
    if as_json:
        screen.print_json({"event": "comparison", **to_plain(found)})
        return
    screen.print_rows(comparison_rows(found), styles=("bold", "cyan"))
    screen.print_rows(sentences(found))


def report(target: Annotated[Path, typer.Argument(help="Folder of a run or a study.")],
           output: Annotated[Path | None, typer.Option(help="Folder for report.html, report.md and report.json "
                                                          "(default: TARGET).")] = None,
           as_json: Json = False) -> None:
    """Write an HTML report of a run or a study.

    Markdown and JSON are written beside the HTML file.
    """
    page = read_page(target)
    written = write_page(page, output or target)
    screen.tell({"event": "report", "what": page.what, "verdict": page.verdict, "cautions": list(page.cautions),
                 **{path.suffix[1:]: str(path) for path in written}},
                [("Verdict", page.verdict), *labelled("Care", page.cautions), *labelled("Report", map(str, written))],
                as_json=as_json)


def read_page(target: Path) -> Page:
    """Return the page of a run's or a study's folder. Raises WrongUse if it is neither."""
    from powertrain.report import run_page, study_page

    if (target / "evidence.json").is_file():
        return study_page.page(read_json(target / "evidence.json"), str(target), _made())
    if (target / "recipe.yaml").is_file():
        files = replace(read_run(target), made=_made())
        try:
            files = replace(files, symptoms=tuple(_symptoms(target)))
        except WrongUse as error:
            files = replace(files, not_diagnosed=str(error))
        return run_page.page(files)
    there = "holds neither a run (recipe.yaml) nor a study (evidence.json)" if target.is_dir() else "does not exist"
    raise WrongUse(f"{target} {there}; `powertrain runs list` shows the runs, and studies are in studies/")


def write_page(page: Page, folder: Path) -> list[Path]:
    """Write report.html, report.md and report.json in `folder`, each whole or not at all."""
    from powertrain.report import formats

    if folder.exists() and not folder.is_dir():
        raise WrongUse(f"{folder} is a file; --output must name a folder for the report")
    texts = {"report.html": formats.html(page), "report.md": formats.markdown(page),
             "report.json": json.dumps(formats.as_json(page), indent=1, ensure_ascii=False, allow_nan=False) + "\n"}
    for name, text in texts.items():
        try:
            # what no file can hold (half a surrogate pair in a sample) becomes a question mark
            replace_file(folder / name, redacted(text).encode("utf-8", errors="replace"))
        except OSError as error:
            raise WrongUse(f"{folder / name} cannot be written ({error.strerror or error}); name another folder with --output"
                           ) from None
    return [folder / name for name in texts]


def read_run(path: Path) -> RunFiles:
    """Read a run's folder. Raises WrongUse if the folder holds no run, or a file that cannot be read."""
    from powertrain.report.run_page import RunFiles
    from powertrain.run.folder import existing, stored_recipe

    folder = existing(path)
    missing = tuple(f"{path} has no {name}, so {what} are unknown" for name, what in FILES.items()
                    if not (path / name).is_file())
    try:
        recipe, written = stored_recipe(folder), read_all_events(folder.events)
    except ValueError as error:              # WrongUse is one too, and says which line
        raise WrongUse(f"{path}: {error}") from None
    facts, plan = (read_json(file) if file.is_file() else {} for file in (folder.facts, folder.plan))
    return RunFiles(str(path), recipe, facts, plan, timeline.read(counted(written), written), missing)


def _made() -> str:
    from powertrain.records.version import VERSION

    return f"Written by powertrain {VERSION} on {datetime.datetime.now():%Y-%m-%d %H:%M}. Numbers in full: report.json."


runs = group("List, show and compare runs.", {"list": list_runs, "show": show, "compare": compare})
