"""Home, and a new run with its plan beside it."""

import datetime
import os
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from powertrain.recipe import resolve, shipped_recipes
from powertrain.records import Estimate, Facts, WrongUse
from powertrain.report import chart
from powertrain.report import plan as plan_report
from powertrain.report.chart import COMPONENT_COLOURS, Axis, Level, Rows
from powertrain.report.page import Figure, Table
from powertrain.report.plan_choices import choice_rows
from powertrain.report.words import memory
from powertrain.run.folder import missing_base
from powertrain.web.asking import Answer, Superseded
from powertrain.web.jobs import Job
from powertrain.web.places import children
from powertrain.web.runs_pages import row_of
from powertrain.web.settings import HOW, SETTINGS, WHAT, Asked, asked, values_of
from powertrain.web.site import Site, fields, shown, site_of

TRY = "docstrings"           # the recipe of "Try it": it needs no download and no data
RECENT_RUNS, MOST_MODELS = 5, 50
GIB = 2**30
FREE_BYTES = 1 << 30         # of the disk, that an upload leaves
MOST_UPLOADS = 200
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".md", ".parquet", ".arrow", ".yaml", ".yml", ".py")


def home(request: Request) -> Response:
    site = site_of(request)
    recent = sorted(children(site.places.runs, ("recipe.yaml", ".lock")), key=_changed, reverse=True)[:RECENT_RUNS]
    known = site.index.summaries(recent)
    rows = [row_of(known.get(run) or site.index.summary(run)) for run in recent]
    return shown(request, "home.html", title="Home", recent=rows, all_jobs=[
        job for job in site.jobs.all() if job.state != "ended"])


def _changed(path: os.PathLike[str]) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


async def machine(request: Request) -> Response:
    """Show what this machine is, as `powertrain facts` measures and stores it once."""
    facts = TypeAdapter(Facts).validate_python((await site_of(request).asking.ask(["facts", "default"])).event("facts"))
    return shown(request, "machine.html", title="This machine", text=plan_report.machine_row(facts.hardware)[1])


async def try_it(request: Request) -> Response:
    """Start the recipe that needs nothing but this machine."""
    await fields(request)
    return JSONResponse({"go": f"/jobs/{_start(site_of(request), TRY, [TRY]).id}"})


def _start(site: Site, name: str, words: Sequence[str]) -> Job:
    """Ask for a run in a folder of its own."""
    stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    run = f"runs/{stem}"
    if (site.places.root / run).exists():
        run += f"-{secrets.token_hex(2)}"
    return site.jobs.ask(f"Train {name}", ["train", *words, "--output", run], run)


# ------------------------------------------------------------------------------------------------ a new run


def form(request: Request) -> Response:
    """Show the form: empty, or filled as a run or a shipped recipe is."""
    site, query = site_of(request), request.query_params
    like, recipe = query.get("like", ""), query.get("recipe", "")
    values = {key: query[key][:4000] for key in ("data.source", "model.path") if key in query}
    if like:
        values |= values_of(resolve(str(site.places.run(like) / "recipe.yaml")).recipe, [one.key for one in SETTINGS])
    if recipe and recipe not in shipped_recipes():
        raise WrongUse(f"there is no shipped recipe {recipe[:60]!r}; choose one from the list")
    models = [f"runs/{run.name}" for run in children(site.places.runs, ("model",))][-MOST_MODELS:]
    return shown(request, "new.html", title="New run", like=like, recipe=recipe, recipes=list(shipped_recipes()), values=values,
                 what=WHAT, how=HOW, models=models, uploads=_uploads(site))


def _uploads(site: Site) -> list[str]:
    folder = site.places.uploads
    return sorted(f"uploads/{entry.name}" for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)) \
        if folder.is_dir() and not folder.is_symlink() else []


async def plan(request: Request) -> Response:
    """Show what the run of a form would be: what it needs, what is done for its speed and why, and how long it takes."""
    site = site_of(request)
    try:
        wanted = asked(await fields(request), site.places)
        answer = await site.asking.ask(["plan", *wanted.words], topic="plan")
    except Superseded:
        return JSONResponse({"aborted": True})
    except WrongUse as error:
        return shown(request, "plan.html", title="Plan", problem=str(error), plan=None, refused=True, command="")
    command = shlex.join(("powertrain", "train", *wanted.words))
    if answer.problem:
        return shown(request, "plan.html", title="Plan", problem=answer.problem, plan=None, command=command,
                     refused=not _may_start_unplanned(wanted))
    found = answer.event("plan")
    problem = _too_large(found)
    return shown(request, "plan.html", title="Plan", problem=problem, refused=bool(problem), command=command,
                 plan=_described(found))


def _may_start_unplanned(wanted: Asked) -> bool:
    """Return whether a run may begin that cannot be planned yet: it downloads its model, or trains the model's base first."""
    return wanted.may_download or missing_base(wanted.recipe) is not None


def _too_large(found: Mapping[str, Any]) -> str:
    """Return in words that a run does not fit the memory, and the smallest changes with which it would."""
    needed, room = found["memory"]["needed_bytes"], found["memory"]["room_bytes"]
    if needed <= room or found["recipe"]["memory_check"] == "off":
        return ""
    enough = [saving for saving in found["memory"]["savings"] if saving["enough"]]
    cure = "; ".join(f"`{' '.join(saving['words']) if isinstance(saving['words'], list) else saving['words']}`"
                     for saving in enough[:3]) or "a smaller model, or a shorter block"
    return f"This run needs {memory(needed)}, and {memory(room)} are free. It would fit with {cure}."


def _described(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what plan.html shows of a plan."""
    facts = TypeAdapter(Facts).validate_python(found["facts"])
    estimate = TypeAdapter(Estimate | None).validate_python(found["plan"]["estimate"])
    rows = [plan_report.machine_row(facts.hardware), plan_report.data_row(facts.data), plan_report.model_row(facts.model),
            plan_report.run_row(found["recipe"], facts.data, found["total_steps"]),
            *choice_rows(found["recipe"], facts.model),
            *plan_report.expected_rows(estimate, facts.hardware, facts.model)]
    figures = []
    room = found["memory"]["room_bytes"]
    if estimate is not None:
        bar = chart.Row("needed at the peak", chart.stacked(estimate.memory_bytes, GIB, COMPONENT_COLOURS),
                        says=memory(estimate.total_memory_bytes))
        rows_of_bytes = Table(("part", "bytes"), tuple(estimate.memory_bytes.items()))
        drawing = Rows(Axis("GiB", low=0.0), (bar,), (Level("free", room / GIB, "red"),))
        figures.append(Figure("memory", "Memory", (drawing,), "", (rows_of_bytes,), beside=True))
    techniques = [("on", step["technique"], step["does"], step["because"], plan_report.stored_claim(step["claim"]))
                  for step in found["plan"]["steps"]]
    techniques += [("off", one["technique"], one.get("does", ""), one["because"], "") for one in found["plan"]["refused"]]
    return {"rows": rows, "figures": figures, "techniques": techniques, "notes": [*found["notes"], *found["seen"]],
            "savings": [(one["words"], memory(one["bytes"])) for one in found["memory"]["savings"]]}


async def start(request: Request) -> Response:
    """Start the run of a form, if it fits."""
    site = site_of(request)
    wanted = asked(await fields(request), site.places)
    if not _may_start_unplanned(wanted):
        answer: Answer = await site.asking.ask(["plan", *wanted.words])
        if problem := answer.problem or _too_large(answer.event("plan")):
            raise WrongUse(problem)
    job = _start(site, wanted.recipe.name, wanted.words)
    there = (site.places.root / job.run / "recipe.yaml").is_file()
    return JSONResponse({"go": f"/{quote(job.run)}" if there else f"/jobs/{job.id}"})


# ------------------------------------------------------------------------------------------------ uploads


async def upload(request: Request) -> Response:
    """Store a file under a name of our own that keeps its ending. Nothing is opened or unpacked."""
    site, name = site_of(request), request.path_params["name"]
    ending = next((one for one in ENDINGS if name.lower().endswith(one)), None)
    if ending is None:
        raise WrongUse(f"a file of data ends with one of {', '.join(ENDINGS)}; unpack an archive first")
    folder = site.places.made(site.places.uploads)
    if len(_uploads(site)) >= MOST_UPLOADS:
        raise WrongUse(f"{MOST_UPLOADS} files were uploaded; delete some in uploads/ first")
    told = request.headers.get("content-length", "0")
    if shutil.disk_usage(folder).free < FREE_BYTES + (int(told) if told.isdecimal() else 0):
        raise WrongUse("the disk has no room for this file; delete something first")
    stem = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "-" for char in name[:-len(ending)])[:60]
    path = folder / f"{stem.strip('-') or 'data'}-{secrets.token_hex(3)}{ending}"
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "xb") as file:
            async for piece in request.stream():
                file.write(piece)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
    return JSONResponse({"path": site.places.shown(path)})


ROUTES = [Route("/", home), Route("/machine", machine), Route("/try", try_it, methods=["POST"]), Route("/new", form),
          Route("/new", start, methods=["POST"]), Route("/plan", plan, methods=["POST"]),
          Route("/uploads/{name}", upload, methods=["PUT"])]
