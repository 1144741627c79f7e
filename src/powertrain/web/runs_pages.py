"""Pages of all runs, and of several beside each other."""

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from powertrain.records import WrongUse
from powertrain.records.events import Evaluated
from powertrain.records.timeline import last_of
from powertrain.report.page import Cell, Table
from powertrain.report.words import count, duration
from powertrain.run.folder import RunFolder, RunSummary, stored_recipe
from powertrain.web.curves import SMOOTHED, View, X, over_each_other
from powertrain.web.places import children
from powertrain.web.site import Site, shown, site_of

PATIENCE_S = 0.5             # of one request, for runs that nobody has read yet; the page asks again
ON_A_PAGE = 100
MOST_COMPARED = 8
RESULTS = ("run", "state", "steps", "last loss", "held-out loss", "tokens/s", "time in steps")
OWN = ("name", "description", "output_dir", "corrections")      # keys that say nothing of how a run trains


def show(request: Request) -> Response:
    """List the runs, the newest first: those that are read, and how many are not yet."""
    site, query = site_of(request), request.query_params
    found, waiting = runs_of(site, PATIENCE_S)
    text, state = query.get("text", "")[:100], query.get("state", "")[:20]
    chosen = [run for run in found if run.state.startswith(state) and
              text.lower() in f"{run.folder.name} {run.name}".lower()]
    number = int(query["page"]) if query.get("page", "").isdecimal() and len(query["page"]) < 6 else 1
    pages = max(1, -(-len(chosen) // ON_A_PAGE))
    number = min(max(1, number), pages)
    here = chosen[(number - 1) * ON_A_PAGE:number * ON_A_PAGE]
    return shown(request, "runs.html", title="Runs", runs=here, waiting=waiting, read=len(found), number=number,
                 pages=pages, text=text, state=state,
                 states=sorted({run.state for run in found}), speed=_speed)


def _speed(run: RunSummary) -> str:
    return "" if run.tokens_per_s is None else count(run.tokens_per_s)


def runs_of(site: Site, patience_s: float) -> tuple[list[RunSummary], int]:
    """Return the runs that could be read within this time, the newest first, and how many are left to read."""
    until, found, waiting = time.monotonic() + patience_s, list[RunSummary](), 0
    folders = list(children(site.places.runs, ("recipe.yaml",)))
    known = site.index.summaries(folders)
    for folder in folders:
        summary = known.get(folder)
        if summary is None and time.monotonic() < until:
            summary = site.index.summary(folder)
        if summary is None:
            waiting += 1
        else:
            found.append(summary)
    return sorted(found, key=lambda run: (-run.began, run.folder.name)), waiting


def compare(request: Request) -> Response:
    """Show runs beside each other: what differs first, then curves and results."""
    site = site_of(request)
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 2 <= len(names) <= MOST_COMPARED:
        raise WrongUse(f"choose 2 to {MOST_COMPARED} runs to compare; {len(names)} are chosen (see the list of runs)")
    view = View.of(request.query_params)
    folders = {name: RunFolder(site.places.run(name)) for name in names}
    series = {name: site.index.series(folder.path) for name, folder in folders.items()}
    chosen = "&".join(f"run={_quoted(name)}" for name in names)
    views = [(label, [(words, "/compare" + view.query(**{key: value}) + f"&{chosen}", getattr(view, key) == value)
                      for value, words in options]) for label, key, options in (
        ("Across", "x", [*X.items()]), ("Scale", "log", [(False, "linear"), (True, "logarithmic")]),
        ("Smoothing", "smooth", [(name, name) for name in SMOOTHED]))]
    rows: list[tuple[Cell, ...]] = []
    for name, written in series.items():
        held, seconds = last_of(Evaluated, written.others), float(written["seconds"].sum())
        taken = len(written.steps)
        rows.append((name, written.state(folders[name]), int(written["step"][-1]) if taken else 0,
                     float(written["loss"][-1]) if taken else None, held.loss if held else None,
                     round(float(written["real_tokens"].sum()) / seconds, 1) if seconds else None, duration(seconds)))
    return shown(request, "compare.html", title="Compare", names=names, views=views, differing=differing(folders),
                 results=Table(RESULTS, tuple(rows)), charts=over_each_other(series, view))


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def differing(folders: dict[str, RunFolder]) -> Table:
    """Return the keys of the recipes that differ, with each run's value."""
    recipes = {name: {key: value for key, (value, _) in stored_recipe(folder).items() if key not in OWN}
               for name, folder in folders.items()}
    keys: Sequence[str] = list(dict.fromkeys(key for recipe in recipes.values() for key in recipe))
    rows = [(key, *(_said(recipe.get(key)) for recipe in recipes.values())) for key in keys
            if len({repr(recipe.get(key)) for recipe in recipes.values()}) > 1]
    return Table(("setting", *recipes), tuple(rows))


def _said(value: object) -> str:
    return "" if value is None else str(value)


ROUTES = [Route("/runs", show), Route("/compare", compare)]
