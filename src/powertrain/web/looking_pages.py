"""Pages that look: data as a model sees them, other people's scripts, this machine, studies and claims."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from powertrain.recipe import shipped_recipes
from powertrain.records import Facts, WrongUse
from powertrain.report import plan as plan_report
from powertrain.report.chart import Axis, Plot, Stack
from powertrain.report.page import Block, Figure, Table
from powertrain.report.words import memory
from powertrain.web.places import Places, children
from powertrain.web.settings import asked
from powertrain.web.site import fields, show_report, shown, site_of

EXAMPLES = 4                 # that are shown
MOST_PROBLEMS = 100
MOST_SCRIPT = 500_000        # characters
BUDGETS = ("60s", "2m", "5m", "10m", "30m")


# ------------------------------------------------------------------------------------------------ data


async def data(request: Request) -> Response:
    """Show rows as a model would see them, what is wrong with some, and how long they are."""
    site, query = site_of(request), request.query_params
    values = {key: query.get(key, "") for key in ("data.source", "model.path", "data.format", "data.max_length")}
    page: dict[str, Any] = {"found": None, "examples": [], "blocks": [], "problem": ""}
    if values["data.source"]:
        try:
            words = asked(values, site.places).words
            if not values["model.path"]:
                raise WrongUse("name the model too: its tokenizer and chat template decide what it sees. Text for a new model "
                               "is cut into blocks; its plan (New run) says how many")
            found = (await site.asking.ask(["data", "check", *words])).event("data")
            number = found["training_examples"] + found["validation_examples"]
            page["examples"] = [(await site.asking.ask(["data", "show", *words, "--index", str(index)])).event("example")
                                for index in range(min(EXAMPLES, number))]
            page |= {"found": found, "blocks": _of_data(found)}
        except WrongUse as error:
            page["problem"] = str(error)
    return shown(request, "data.html", title="Data", values=values, **page)


def _of_data(found: Mapping[str, Any]) -> list[Block]:
    bins = found["histogram"]
    blocks: list[Block] = []
    if bins:
        edges = (float(bins[0]["first"]), *(float(one["last"]) + 1 for one in bins))
        layer = ("examples", "blue", tuple(float(one["examples"]) for one in bins))
        plot = Plot(Axis("tokens"), Axis("examples", low=0.0), (Stack(edges, (layer,)),), height=170.0, legend=False)
        rows = tuple((one["first"], one["last"], one["examples"]) for one in bins)
        blocks.append(Figure("lengths", "How long the examples are", (plot,), "", (Table(("from", "to", "examples"), rows),),
                             beside=True))
    blocks.append(Table(("in a batch", "padding, share of what is computed"), tuple(
        (name, f"{share:.1%}") for name, share in found["padding_shares"].items()), "Padding"))
    if problems := found["problems"]:
        blocks.append(Table(("what", "where", "why"), tuple((one["kind"], one["origin"], one["reason"])
                                                           for one in problems[:MOST_PROBLEMS]), "Rows to look at"))
    return blocks


# ------------------------------------------------------------------------------------------------ other people's scripts


async def audit(request: Request) -> Response:
    """Show what to change in a script or config, or in those of a folder. They are read, and not run."""
    site, path = site_of(request), request.query_params.get("file", "")
    found: list[Mapping[str, Any]] = []
    problem = ""
    if path:
        try:
            answer = await site.asking.ask(["audit", site.places.command(site.places.inside(path))])
            found, problem = [line for line in answer.lines if line.get("event") == "audit"], answer.problem
        except WrongUse as error:
            problem = str(error)
    return shown(request, "audit.html", title="Audit", audits=found, problem=problem, file=path)


async def audit_text(request: Request) -> Response:
    """Store a script that was pasted, under a name of our own, and lead to its audit."""
    site, given = site_of(request), await fields(request)
    text, name, path = (str(given.get(key, "")) for key in ("text", "name", "path"))
    if path.strip():
        return _to_audit(site.places, site.places.inside(path.strip()))
    if not text.strip() or len(text) > MOST_SCRIPT:
        raise WrongUse(f"paste a script or a config of 1 to {MOST_SCRIPT:,} characters, or name its path")
    folder = site.places.made(site.places.uploads)
    ending = next((one for one in (".yaml", ".yml", ".json", ".toml", ".ipynb", ".sh") if name.lower().endswith(one)), ".py")
    file = folder / f"script-{secrets.token_hex(4)}{ending}"
    with open(file, "x", encoding="utf-8", errors="replace") as opened:
        opened.write(text)
    return _to_audit(site.places, file)


def _to_audit(places: Places, file: Path) -> Response:
    return JSONResponse({"go": f"/audit?file={quote(places.shown(file), safe='')}"})


# ------------------------------------------------------------------------------------------------ studies and claims


def studies(request: Request) -> Response:
    site = site_of(request)
    found = []
    for folder in reversed(list(children(site.places.studies, ("evidence.json",)))):
        try:
            evidence = site.places.json(site.places.study(folder.name) / "evidence.json")
            found.append((folder.name, str(evidence.get("kind", "")), str(evidence.get("what", ""))))
        except (WrongUse, OSError) as error:
            found.append((folder.name, "damaged", str(error)))
    return shown(request, "studies.html", title="Studies", studies=found)


async def study(request: Request) -> Response:
    name = request.path_params["name"]
    return await show_report(request, site_of(request).places.study(name), name, "/studies")


async def claims(request: Request) -> Response:
    """List the speed claims of five training systems, and what was measured of them on this machine."""
    answer = await site_of(request).asking.ask(["claims", "report"])
    if answer.problem:
        raise WrongUse(answer.problem)
    return shown(request, "claims.html", title="Claims", claims=[line for line in answer.lines if line["event"] == "claim"],
                 budgets=BUDGETS)


# ------------------------------------------------------------------------------------------------ measuring, by jobs


def measuring(request: Request) -> Response:
    """Show the forms that start a diagnosis or a search for the fastest plan."""
    site = site_of(request)
    runs = [run.name for run in children(site.places.runs, ("recipe.yaml",))]
    return shown(request, "measure.html", title="Measure", recipes=list(shipped_recipes()), runs=runs[-200:],
                 budgets=BUDGETS)


async def measure(request: Request) -> Response:
    """Start a command that measures, as a job."""
    site, given = site_of(request), await fields(request)
    what, budget = str(given.get("what", "")), str(given.get("budget", "2m"))
    if budget not in BUDGETS:
        raise WrongUse(f"a budget is one of {', '.join(BUDGETS)}")
    if what == "claim":
        known = [line["id"] for line in (await site.asking.ask(["claims", "list"])).lines if line["event"] == "claim"]
        claim = str(given.get("id", ""))
        if claim not in known:
            raise WrongUse(f"there is no claim {claim[:40]!r}; the list of claims shows what is there")
        job = site.jobs.ask(f"Measure claim {claim}", ["claims", "run", claim, "--budget", budget])
    elif what in ("diagnose", "tune", "ablate"):
        words = asked({key: given.get(key, "") for key in ("recipe", "like", "more")}, site.places).words
        job = site.jobs.ask(f"{what.capitalize()} {words[0] if words else ''}".strip(), [what, *words, "--budget", budget])
    else:
        raise WrongUse("the page measures a claim, or does diagnose, tune or ablate")
    return JSONResponse({"go": f"/jobs/{job.id}"})


# ------------------------------------------------------------------------------------------------ this machine


def system(request: Request) -> Response:
    site = site_of(request)
    disks = [(name, str(path), f"{memory(disk.free)} free of {memory(disk.total)}") for name, path in (
        ("runs", site.places.root), ("caches", site.cache.parent)) if path.exists() and (disk := psutil.disk_usage(str(path)))]
    sizes = [(path.name, str(path), memory(_size(path))) for path in sorted(site.cache.parent.iterdir()) if path.is_dir()]
    limits = (("Address", f"{request.url.scheme}://{request.url.netloc}"), ("Folder", str(site.places.root)),
              *(("Folder besides", str(path)) for path in site.places.more),
              ("Largest upload", memory(site.most_upload_bytes)), ("Hub token", "set" if site.has_hub_token else "not set"))
    return shown(request, "system.html", title="System", limits=Table(("", ""), limits),
                 disks=Table(("for", "folder", "space"), tuple(disks)),
                 caches=Table(("cache", "folder", "size"), tuple(sizes)))


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:                  # deleted meanwhile
                continue
    return total


async def facts(request: Request) -> Response:
    """Show what is known of machine and software, each fact with its source."""
    rows, problem = [], ""
    try:
        found = (await site_of(request).asking.ask(["facts", "default"])).event("facts")
        rows = plan_report.machine_rows(TypeAdapter(Facts).validate_python(found))
    except WrongUse as error:
        problem = str(error)
    return shown(request, "facts.html", title="Facts", problem=problem,
                 blocks=[Table(("fact", "value", "source"), tuple(rows))] if rows else [])


ROUTES = [Route("/data", data), Route("/audit", audit), Route("/audit", audit_text, methods=["POST"]),
          Route("/studies", studies), Route("/studies/{name}", study), Route("/claims", claims),
          Route("/measure", measuring), Route("/measure", measure, methods=["POST"]), Route("/system", system),
          Route("/facts", facts)]
