"""`powertrain report`: reads the files of a run or a study, and writes its page as HTML, Markdown and JSON."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

from powertrain import __version__
from powertrain.cli import output as screen
from powertrain.recipe import read_yaml
from powertrain.records import WrongUse
from powertrain.records.event_log import read_all_events, read_events
from powertrain.records.json_files import read_json
from powertrain.records.origins import asked_lines
from powertrain.report import html, markdown, run_page, study_page
from powertrain.report import page as pages
from powertrain.report.page import Page
from powertrain.report.run_page import RunFiles
from powertrain.run.folder import RunFolder, stored_recipe


def report(target: Path, *, output: Path | None, as_json: bool) -> None:
    page = read_page(target)
    written = write_page(page, output or target)
    if as_json:
        screen.print_json({"event": "report", "what": page.what, "verdict": page.verdict, "cautions": list(page.cautions),
                           **{path.suffix[1:]: str(path) for path in written}})
        return
    screen.print_rows([("Verdict", page.verdict),
                       *(("Care" if number == 0 else "", caution) for number, caution in enumerate(page.cautions)),
                       *(("Report" if number == 0 else "", str(path)) for number, path in enumerate(written))])


def read_page(target: Path) -> Page:
    """The page of a run's or a study's folder. Raises WrongUse if it is neither."""
    if (target / "evidence.json").is_file():
        return study_page.page(read_json(target / "evidence.json"), str(target), _made())
    if (target / "recipe.yaml").is_file():
        return run_page.page(_run_files(target))
    there = "holds neither a run (recipe.yaml) nor a study (evidence.json)" if target.is_dir() else "does not exist"
    raise WrongUse(f"{target} {there}; `powertrain runs list` shows the runs, and studies are in studies/")


def write_page(page: Page, folder: Path) -> list[Path]:
    """report.html, report.md and report.json in `folder`, each whole or not at all."""
    if folder.exists() and not folder.is_dir():
        raise WrongUse(f"{folder} is a file; --output must name a folder for the report")
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"report.html": html.write(page), "report.md": markdown.write(page),
             "report.json": json.dumps(pages.as_json(page), indent=1, ensure_ascii=False, allow_nan=False) + "\n"}
    return [_write(folder / name, text) for name, text in texts.items()]


def _write(path: Path, text: str) -> Path:
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        # what no file can hold (half a surrogate pair in a sample) becomes a question mark
        draft.write_bytes(text.encode("utf-8", errors="replace"))
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise WrongUse(f"{path} cannot be written ({error.strerror or error}); name another folder with --output") from None
    return path


def _run_files(folder: Path) -> RunFiles:
    text = (folder / "recipe.yaml").read_text(encoding="utf-8")
    events = folder / "events.jsonl"
    return RunFiles(
        folder=str(folder), recipe=read_yaml(text, str(folder / "recipe.yaml")),
        asked=asked_lines(stored_recipe(RunFolder(folder)), planned=False),
        facts=read_json(folder / "facts.json") if (folder / "facts.json").is_file() else {},
        plan=read_json(folder / "plan.json") if (folder / "plan.json").is_file() else {},
        events=read_events(events) if events.is_file() else [], all_events=read_all_events(events) if events.is_file() else [],
        made=_made(), **_diagnosed(folder))


def _diagnosed(folder: Path) -> dict[str, Any]:
    """What `powertrain diagnose RUN` finds in the events, or why it cannot."""
    from powertrain.diagnosis.run_record import read_run
    from powertrain.diagnosis.symptoms import symptoms_of

    try:
        return {"symptoms": tuple(symptoms_of(read_run(folder)))}
    except WrongUse as error:
        return {"not_diagnosed": str(error)}


def _made() -> str:
    return f"Written by powertrain {__version__} on {datetime.datetime.now():%Y-%m-%d %H:%M}. Numbers in full: report.json."
