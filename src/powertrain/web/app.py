"""The page as an application: which address is answered by what, and what happens to a request that goes wrong."""

import asyncio
import contextlib
import gzip
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from powertrain.records import WrongUse
from powertrain.report.formats import style
from powertrain.web import chat_pages, jobs_pages, looking_pages, models_pages, new_run_pages, run_pages, runs_pages
from powertrain.web.asking import Asking
from powertrain.web.chatting import Talks
from powertrain.web.guard import COOKIE, Guard
from powertrain.web.jobs import LOOK_S, Jobs
from powertrain.web.places import NotThere, Places
from powertrain.web.series import Index
from powertrain.web.sessions import KEPT_S, Sessions
from powertrain.web.site import Site, environment, fields, shown, site_of

PAGES = (new_run_pages, jobs_pages, runs_pages, run_pages, chat_pages, models_pages, looking_pages)
LOOKS = {421: "Wrong address", 404: "Not there", 413: "Too large", 408: "Too slow"}


def make_site(root: Path, more: Sequence[Path], cache: Path, environment: Mapping[str, str], *, most_upload_bytes: int,
              has_hub_token: bool) -> Site:
    """Return what the page of a folder works with. Raises WrongUse where one of its own folders is a link to elsewhere."""
    places = Places(root, tuple(more))
    for folder in (places.runs, places.studies, places.exports, places.uploads, places.jobs):
        places.inside(str(folder))           # a link to elsewhere needs --allow
    sessions = Sessions(cache, str(root))
    return Site(places, cache, Jobs(places.jobs, root, environment, sign=sessions.sign), sessions,
                Index(cache / "index-2.sqlite", places.opened), Asking(root, environment), Talks(root, environment),
                most_upload_bytes, has_hub_token, assets=read_assets())


def make_app(site: Site, hosts: Iterable[str], *, encrypted: bool, print_link: Callable[[], None]) -> Guard:
    """Return the page as an ASGI application that answers to these hosts only. `print_link` prints the newest token's link."""
    routes = [Route("/enter", enter), Route("/enter", exchange, methods=["POST"]), Route("/static/{name}", static),
              *(route for pages in PAGES for route in pages.ROUTES)]
    app = Starlette(routes=routes, lifespan=_looking_after_jobs, exception_handlers={
        WrongUse: refuse, HTTPException: refuse, Exception: confess})
    app.state.site = site
    app.state.encrypted, app.state.print_link = encrypted, print_link
    return Guard(app, site.sessions, hosts, encrypted=encrypted, most_upload_bytes=site.most_upload_bytes)


@contextlib.asynccontextmanager
async def _looking_after_jobs(app: Starlette) -> AsyncIterator[None]:
    site = app.state.site

    async def look() -> None:
        while True:
            await asyncio.to_thread(site.jobs.look)
            await site.talks.tend()
            await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await site.talks.tend(all_of_them=True)
        site.asking.end()


# ------------------------------------------------------------------------------------------------ getting in


def enter(request: Request) -> Response:
    """Show the page that sends the token of its own address, which no server sees, and gets a cookie."""
    digests = {name: digest for name, (_, _, digest) in site_of(request).assets.items()}
    return Response(environment().get_template("enter.html").render(digests=digests), media_type="text/html")


async def exchange(request: Request) -> Response:
    cookie = site_of(request).sessions.exchange(str((await fields(request)).get("token", "")))
    if cookie is None:
        return JSONResponse({"problem": "This link was used before; open the newest one that `powertrain ui` printed."}, 401)
    answer = JSONResponse({"go": "/"})
    answer.set_cookie(COOKIE, cookie, max_age=KEPT_S, path="/", httponly=True, samesite="strict",
                      secure=request.app.state.encrypted)
    request.app.state.print_link()
    return answer


# ------------------------------------------------------------------------------------------------ files and problems


def read_assets() -> dict[str, tuple[bytes, str, str]]:
    """Return what browsers load besides pages: its content as gzip, its type, and a digest that changes with it."""
    folder = resources.files("powertrain.web") / "static"
    texts = {"page.js": ((folder / "page.js").read_text(encoding="utf-8"), "text/javascript"),
             "page.css": (style("drawing.css") + style("page.css") + (folder / "web.css").read_text(
                 encoding="utf-8"), "text/css")}
    return {name: (gzip.compress(text.encode(), 9, mtime=0), kind, hashlib.sha256(text.encode()).hexdigest()[:12])
            for name, (text, kind) in texts.items()}


def static(request: Request) -> Response:
    found = site_of(request).assets.get(request.path_params["name"])
    if found is None:
        raise HTTPException(404, "There is no such file.")
    content, kind, _ = found
    return Response(content, media_type=kind, headers={"content-encoding": "gzip",
                                                       "cache-control": "private, max-age=31536000, immutable"})


def refuse(request: Request, error: Exception) -> Response:
    """Answer a request that the page understands and does not carry out, with the reason."""
    status = error.status_code if isinstance(error, HTTPException) else 404 if isinstance(error, NotThere) else 400
    problem = error.detail if isinstance(error, HTTPException) and error.detail != "Not Found" else \
        "There is no such page." if isinstance(error, HTTPException) else str(error)
    return _problem(request, status, problem)


def confess(request: Request, error: Exception) -> Response:
    """Answer a request at which the page itself went wrong; the terminal has the details."""
    return _problem(request, 500, "the page went wrong here, which is a fault in powertrain; the terminal that runs "
                                  "`powertrain ui` has the details, and runs go on without the page")


def _problem(request: Request, status: int, problem: str) -> Response:
    if request.method == "POST" or request.method == "PUT" or "fragment" in request.query_params:
        return JSONResponse({"problem": problem}, status)
    return shown(request, "problem.html", title=LOOKS.get(status, "This cannot be done"), status=status, problem=problem)
