"""The page of a run: its numbers as they come, its curves, its causes, and what can be done with it."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from powertrain.records import WrongUse, timeline
from powertrain.records.checkpoints import checkpoints_in
from powertrain.records.events import End, RunWarning, Sample, Uploaded, UploadFailed
from powertrain.records.timeline import last_of
from powertrain.report.formats import html_blocks
from powertrain.report.page import Block, Figure, Table
from powertrain.report.plan import stored_claim
from powertrain.report.result import printable
from powertrain.report.run_figures import memory_by_component
from powertrain.report.words import memory, with_settings
from powertrain.run.folder import RunFolder, check_step, is_being_written, trainer_here
from powertrain.web import live
from powertrain.web.curves import View, asked_place, charts, values_at, xs_of
from powertrain.web.places import Places, size_of
from powertrain.web.series import Series
from powertrain.web.site import Diagnosed, fields, show_report, shown, site_of

MOST_DRAWN = 8               # views of one run that are kept as they were drawn
MOST_SAMPLES = 4
MOST_LINES = 300             # of the log that the page shows at first
MOST_WARNINGS = 8
DIAGNOSED_EVERY_S = 30.0
DIAGNOSED_SHARE = 300.0      # at most for one part in so many of the time
LIVING = ("running", "running or killed")


def show(request: Request) -> Response:
    """Show a run."""
    site, name = site_of(request), request.path_params["name"]
    run, view, began = site.places.run(name), View.of(request.query_params), time.monotonic()
    folder, series = RunFolder(run), site.index.series(run)
    state = series.state(folder)
    xs = xs_of(series, view.x)
    ended = last_of(End, series.others)
    page = shown(
        request, "run.html", title=name, name=name, state=state, series=series, view=view, views=view.choices(),
        moves=view.moved(float(xs[0]), float(xs[-1])) if len(xs) else {}, numbers=live.numbers(series, folder, state),
        charts=_drawn(series, view), memory=_memory(site.places, series, folder),
        failure=printable(ended.message) if ended and ended.reason == "failed" else "",
        warnings=[printable(one.sentence) for one in series.others if isinstance(one, RunWarning)][-MOST_WARNINGS:],
        samples=[(one.step, printable(one.text)) for one in series.others if isinstance(one, Sample)][-MOST_SAMPLES:][::-1],
        checkpoints=_checkpoints(folder, series), plan=_plan(site.places, folder),
        log=live.lines_of(series.others)[-MOST_LINES:],
        resume=_resume(folder, state, series), job=site.jobs.of_run(f"runs/{name}"), has_model=folder.model.is_dir())
    site.streams.drawing_s = time.monotonic() - began
    return page


async def causes(request: Request) -> Response:
    """Show what diagnose finds. It is looked for anew where events are new and the last look is not a moment ago."""
    site, name = site_of(request), request.path_params["name"]
    run = site.places.run(name)
    series = await run_in_threadpool(site.index.series, run)
    found, began = site.diagnosed.get(run, Diagnosed()), time.monotonic()
    if found.end != series.end and began - found.at_s > max(DIAGNOSED_EVERY_S, DIAGNOSED_SHARE * found.took_s):
        answer = await site.asking.ask(["diagnose", f"runs/{name}", "--no-probe"])
        found = Diagnosed(time.monotonic(), time.monotonic() - began, series.end, answer.problem,
                          [line for line in answer.lines if line.get("event") == "finding"])
        site.diagnosed[run] = found
    return shown(request, "causes.html", title=name, name=name, diagnosed=found,
                 again=series.state(RunFolder(run)) in LIVING or found.end != series.end)


@dataclass(frozen=True)
class Drawn:
    """A curve as it stands in the page."""

    key: str                                 # of the view that shows it large; "" where there is none
    title: str
    html: Markup


_drawn_before: WeakKeyDictionary[Series, dict[View, list[Drawn]]] = WeakKeyDictionary()      # a run that has not gone on


def _drawn(series: Series, view: View) -> list[Drawn]:
    """Return the curves, drawn once for what the run has written until now."""
    views = _drawn_before.setdefault(series, {})
    if view not in views:
        if len(views) >= MOST_DRAWN:
            views.clear()
        views[view] = [Drawn(*((chart.key, chart.title) if isinstance(chart, Figure) else ("", "")), html_blocks([chart]))
                       for chart in charts(series, view)]
    return views[view]


def _memory(places: Places, series: Series, folder: RunFolder) -> list[Block]:
    history = timeline.read(series.others)
    plan = _json(places, folder.plan)
    return [memory_by_component(history, timeline.estimate_of(history, plan), history.start.device)]


def _json(places: Places, path: Path) -> Mapping[str, Any]:
    try:
        return places.json(path)
    except (WrongUse, OSError):
        return {}


def _plan(places: Places, folder: RunFolder) -> Table | None:
    plan = _json(places, folder.plan)
    try:
        rows = [("on", with_settings(step["technique"], step["settings"]),
                 f"{step['because']} [{stored_claim(step['claim'])}]")
                for step in plan["steps"]]
        return Table(("", "technique", "because"), (*rows, *(("off", one["technique"], one["because"])
                                                             for one in plan["refused"])))
    except (LookupError, TypeError):         # of another version, or damaged: `powertrain runs show` says what is wrong
        return None


def _checkpoints(folder: RunFolder, series: Series) -> list[dict[str, Any]]:
    uploaded = {one.name: f"uploaded and verified ({memory(one.bytes)})" for one in series.others if isinstance(one, Uploaded)}
    failed = {one.name: f"not uploaded: {printable(one.why)}" for one in series.others if isinstance(one, UploadFailed)}
    rows, found = [], checkpoints_in(folder.checkpoints)
    for step, path in found.items():
        where = uploaded.get(path.name) or failed.get(path.name) or "here"
        rows.append({"step": step, "size": memory(size_of(path)), "where": where,
                     "later": [f"{one:,}" for one in found if one > step]})
    return rows


def _resume(folder: RunFolder, state: str, series: Series) -> str:
    """Return from where the run would go on, in the words of a button; "" where it trains or is complete."""
    if state in LIVING or (state == "finished" and folder.model.is_dir()):
        return ""
    steps = list(checkpoints_in(folder.checkpoints))
    return f"Resume from step {steps[-1]:,}" if steps else "Resume from step 0: no checkpoint was saved"


def at(request: Request) -> Response:
    """Tell the numbers of the step that lies at a place of the curves."""
    site, query = site_of(request), request.query_params
    series = site.index.series(site.places.run(request.path_params["name"]))
    return JSONResponse({"says": [values_at(series, View.of(query).x, asked_place(query))]})


def stream(request: Request) -> Response:
    site, name = site_of(request), request.path_params["name"]

    def is_awaited() -> bool:
        job = site.jobs.of_run(f"runs/{name}")
        return job is not None and job.state != "ended"

    return live.stream(request, site.places.run(name), site.index, site.streams, is_awaited)


async def report(request: Request) -> Response:
    """Show the whole report of a run."""
    name = request.path_params["name"]
    return await show_report(request, site_of(request).places.run(name), name, f"/runs/{quote(name)}")


async def stop(request: Request) -> Response:
    """Let a run finish its step and save, or end it now; whoever has started it."""
    site, name = site_of(request), request.path_params["name"]
    how = (await fields(request)).get("how")
    if how not in ("well", "now"):
        raise WrongUse("a run is stopped `well` or `now`")
    folder = RunFolder(site.places.run(name))
    job = site.jobs.of_run(f"runs/{name}")
    if job is not None and job.state != "ended":
        site.jobs.stop(job.id, now=how == "now")
    elif is_being_written(folder) and (pid := trainer_here(folder)) is not None:
        try:
            os.kill(pid, signal.SIGKILL if how == "now" else signal.SIGTERM)
        except PermissionError:
            raise WrongUse(f"another user's process {pid} trains in runs/{name}; only that user can stop it") from None
    else:
        raise WrongUse(f"nobody on this machine trains in runs/{name}")
    return JSONResponse({"refresh": True})


async def resume(request: Request) -> Response:
    """Go on with a run: from its newest checkpoint, or from that of the step that is named."""
    site, name, step = site_of(request), request.path_params["name"], (await fields(request)).get("step")
    if step is not None and (type(step) is not int or not 0 <= step < 10**12):
        raise WrongUse("a step is a whole number, such as 100")
    folder = RunFolder(site.places.run(name))
    if is_being_written(folder):
        raise WrongUse(f"a process trains in runs/{name} already")
    if step is not None:
        check_step(folder, step)
    title, back = (f"Resume {name}", []) if step is None else (f"Resume {name} from step {step:,}", ["--from-step", str(step)])
    job = site.jobs.ask(title, ["train", "--resume", f"runs/{name}", *back], f"runs/{name}")
    return JSONResponse({"go": f"/runs/{quote(name)}" if job.state == "running" else f"/jobs/{job.id}"})


ROUTES = [Route("/runs/{name}", show), Route("/runs/{name}/stream", stream), Route("/runs/{name}/at", at),
          Route("/runs/{name}/report", report),
          Route("/runs/{name}/causes", causes),
          Route("/runs/{name}/stop", stop, methods=["POST"]), Route("/runs/{name}/resume", resume, methods=["POST"])]
