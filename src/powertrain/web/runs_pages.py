"""The list of runs, and several runs beside each other."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from powertrain.records import WrongUse, timeline
from powertrain.records.events import End, Evaluated
from powertrain.records.origins import Stored
from powertrain.records.timeline import last_of
from powertrain.report.comparing import ABSENT, RECENT_STEPS, UNPINNED, UNTRAINED, can_be_compared, changed_keys
from powertrain.report.page import Cell, Table
from powertrain.report.run_page import RunFiles
from powertrain.report.words import count, duration, memory, with_settings
from powertrain.run.folder import RunFolder, stored_recipe
from powertrain.web.arms import evidence_of
from powertrain.web.curves import View, asked_place, over_each_other, values_at, xs_of
from powertrain.web.places import Places, children
from powertrain.web.series import Listed, Series
from powertrain.web.site import Site, shown, site_of

ROWS = 100                   # of a page of the list
INDEXED_S = 0.8              # that one request reads runs which are new to the index
STATES = ("running", "finished", "stopped", "failed", "killed")
MOST_COMPARED = 8
UNKNOWN = "-"
MOST_QUERY = 100             # characters that are looked for


# ------------------------------------------------------------------------------------------------ the list


def listed(request: Request) -> Response:
    """Show the runs, the newest first. Those that are new to the index are read a few at a time."""
    site, query = site_of(request), request.query_params
    runs, waiting = runs_of(site, INDEXED_S)
    words, state = query.get("q", "")[:MOST_QUERY], query.get("state", "")
    found = [run for run in runs if words.casefold() in f"{run.folder.name} {run.name}".casefold()]
    of_state = {name: [run for run in found if run.state.startswith(name)] for name in STATES}
    if state in of_state:
        found = of_state[state]
    pages = max(1, -(-len(found) // ROWS))
    page = min(max(1, int(query.get("page", "1")) if query.get("page", "1")[:9].isdecimal() else 1), pages)

    def address(**changes: object) -> str:
        values = {"q": words, "state": state if state in of_state else "", "page": "", **changes}
        return "/runs?" + urlencode({name: value for name, value in values.items() if value})

    return shown(
        request, "runs.html", title="Runs", rows=[row_of(run) for run in found[(page - 1) * ROWS:page * ROWS]],
        words=words, state=state, total=len(runs) + waiting, read=len(runs), waiting=waiting,
        here=address(page=page), matching=len(found),
        states=[(name, address(state=name), len(of_state[name]), name == state) for name in STATES if of_state[name]],
        every_state=address(state=""), newer=address(page=page - 1) if page > 1 else "", page=page, pages=pages,
        older=address(page=page + 1) if page < pages else "", most=MOST_COMPARED)


def runs_of(site: Site, patience_s: float) -> tuple[list[Listed], int]:
    """Return the runs that could be read within this time, the newest first, and how many are left to read."""
    until, waiting, folders = time.monotonic() + patience_s, 0, list(children(site.places.runs, ("recipe.yaml",)))
    found = site.index.summaries(folders)
    unread = [folder for folder in folders if folder not in found]
    for number, folder in enumerate(unread):
        if number and time.monotonic() > until:
            waiting = len(unread) - number
            break
        found[folder] = site.index.summary(folder)
    return sorted(found.values(), key=lambda run: (run.began, run.folder.name), reverse=True), waiting


def row_of(run: Listed) -> dict[str, str]:
    """Return the words of a run's line in a list."""
    return {"folder": run.folder.name, "recipe": run.name, "state": run.state, "started": run.started or UNKNOWN,
            "steps": f"{run.step:,} of {run.total_steps:,}" if run.total_steps else f"{run.step:,}",
            "loss": UNKNOWN if run.last_loss is None else f"{run.last_loss:.4f}",
            "held": f"{run.loss:.4f}" if run.is_held_out and run.loss is not None else UNKNOWN,
            "speed": UNKNOWN if run.tokens_per_s is None else count(run.tokens_per_s), "damaged": run.damaged,
            "tone": "good" if run.state == "finished" else "bad" if run.state in ("failed", "killed") else "open"}


# ------------------------------------------------------------------------------------------------ beside each other


def compared(request: Request) -> Response:
    """Show up to eight runs: what was set differently, their curves, and what they came to."""
    site, view = site_of(request), View.of(request.query_params)
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if len(names) > MOST_COMPARED:
        raise WrongUse(f"{len(names)} runs do not fit beside each other; choose at most {MOST_COMPARED}")
    paths = {name: site.places.run(name) for name in names}
    written = {name: site.index.series(path) for name, path in paths.items()}
    files, problems = dict[str, RunFiles](), [f"{name}: {one.damaged}" for name, one in written.items() if one.damaged]
    for name, path in paths.items():
        try:
            files[name] = _files(site.places, path)
        except (WrongUse, OSError) as error:
            problems.append(f"{name}: its settings cannot be read: {error}")
    ends = [float(xs_of(one, view.x)[-1]) for one in written.values() if len(one.steps)]
    return shown(
        request, "compare.html", title="Compare runs", names=names, problems=problems, view=view,
        chosen="&" + urlencode([("run", name) for name in names]), most=MOST_COMPARED,
        without={name: urlencode([("run", other) for other in names if other != name]) for name in names},
        views=view.choices(), moves=view.moved(0.0, max(ends)) if ends else {},
        settings=_differing("setting", {name: _settings(one.recipe) for name, one in files.items()}, _absent),
        techniques=_differing("technique", {name: _techniques(one.plan) for name, one in files.items()}, lambda _: "off"),
        says=list(_comparable(files)), evidence=evidence_of(site.places, files),
        charts=over_each_other(written, view) if names else [],
        results=Table(("", *names), tuple(_results({name: (written[name], paths[name]) for name in names}))) if names else None)


def compared_at(request: Request) -> Response:
    """Tell the numbers of each run's step that lies at a place of the curves."""
    site, query = site_of(request), request.query_params
    names = list(dict.fromkeys(query.getlist("run")))[:MOST_COMPARED]
    values = {name: values_at(site.index.series(site.places.run(name)), View.of(query).x, asked_place(query)) for name in names}
    return JSONResponse({"says": [f"{name}: {says}" for name, says in values.items() if says]})


def _files(places: Places, path: Path) -> RunFiles:
    """Return recipe, facts and plan of a run, without its events. Raises WrongUse."""
    folder = RunFolder(path)
    facts, plan = (places.json(file) if file.is_file() else {} for file in (folder.facts, folder.plan))
    return RunFiles(path.name, stored_recipe(folder), facts, plan, timeline.read(()))


def _settings(recipe: Stored) -> dict[str, str]:
    return {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, (value, _) in recipe.items() if key not in UNTRAINED}


def _absent(key: str) -> str:
    return UNPINNED[0] if key.startswith("techniques.") else ABSENT


def _techniques(plan: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {step["technique"]: with_settings("on", step.get("settings") or {}) for step in plan.get("steps", ())}
    except (LookupError, TypeError, AttributeError):     # damaged: what differs is then not known
        return {}


def _differing(what: str, values: Mapping[str, Mapping[str, str]], absent: Callable[[str], str]) -> Table:
    """Return the keys that are not the same in all runs."""
    keys = sorted({key for found in values.values() for key in found})
    rows = [(key, *(found.get(key, absent(key)) for found in values.values())) for key in keys]
    return Table((what, *values), tuple(row for row in rows if len(set(row[1:])) > 1))


def _comparable(files: Mapping[str, RunFiles]) -> Iterator[str]:
    """Yield for each run but the first whether its losses compare with those of the first."""
    names = list(files)
    for name in names[1:]:
        first, other = files[names[0]], files[name]
        try:
            because = can_be_compared(first, other, tuple(changed_keys(first.recipe, other.recipe)))[1]
        except (LookupError, TypeError, AttributeError):
            because = "whether the runs can be compared is unknown: facts.json of a run is of another version, or damaged"
        yield f"{names[0]} and {name}: {because}."


def _results(runs: Mapping[str, tuple[Series, Path]]) -> Iterator[tuple[Cell, ...]]:
    """Yield what the runs came to, a quantity a row."""
    columns = [_result(series, path) for series, path in runs.values()]
    for quantity in columns[0]:
        yield quantity, *(column[quantity] for column in columns)


def _result(series: Series, path: Path) -> dict[str, str]:
    held, ended, steps = last_of(Evaluated, series.others), last_of(End, series.others), len(series.steps)
    seconds, last = float(series["seconds"].sum()), series["loss"][-RECENT_STEPS:]
    peak = ended.peak_memory_bytes if ended else None
    return {"state": series.state(RunFolder(path)),
            "steps": f"{int(series['step'][-1]) if steps else 0:,} of {series.start.total_steps:,}",
            "trained tokens": count(float(series["tokens"].sum())),
            f"training loss, mean of the last {RECENT_STEPS} steps (nats a token)": f"{last.mean():.4f}" if steps else UNKNOWN,
            "last held-out loss (nats a token)": f"{held.loss:.4f} at step {held.step:,}" if held else UNKNOWN,
            "real tokens per second": count(float(series["real_tokens"].sum()) / seconds) if seconds else UNKNOWN,
            "time in steps": duration(seconds) if steps else UNKNOWN, "peak memory": memory(peak) if peak else UNKNOWN}


ROUTES = [Route("/runs", listed), Route("/compare", compared), Route("/compare/at", compared_at)]
