"""What every part of the page works with: its folders, its jobs, and how a page is written."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from powertrain.records import WrongUse
from powertrain.records.redaction import redacted
from powertrain.report import formats
from powertrain.report.words import count, duration, memory
from powertrain.web.asking import Asking
from powertrain.web.chatting import Talks
from powertrain.web.jobs import Jobs
from powertrain.web.places import Places
from powertrain.web.series import Index
from powertrain.web.sessions import Sessions

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")           # what could steer a terminal, once it is copied
# the pages that the head of each page names
MENU = {"Home": "/", "New run": "/new", "Runs": "/runs", "Chat": "/chat", "Models": "/models", "Data": "/data",
        "Measure": "/measure", "Studies": "/studies", "Claims": "/claims", "Audit": "/audit", "Jobs": "/jobs",
        "System": "/system"}


@dataclass
class Streams:
    """How many tabs are listening, and how long the last drawing of a run took."""

    open: int = 0
    drawing_s: float = 0.1


@dataclass(frozen=True)
class Diagnosed:
    """What was found in the events of a run up to a place of its log, and when."""

    at_s: float = -math.inf                  # of the monotonic clock
    took_s: float = 0.0
    end: int = -1
    why_not: str = ""
    findings: Sequence[Mapping[str, Any]] = ()           # as `powertrain diagnose --json` prints them


@dataclass(frozen=True)
class Site:
    places: Places
    cache: Path                              # what may be deleted: the secret of the cookies, the index of runs
    jobs: Jobs
    sessions: Sessions
    index: Index
    asking: Asking
    talks: Talks
    most_upload_bytes: int
    has_hub_token: bool = False
    streams: Streams = field(default_factory=Streams)
    diagnosed: dict[Path, Diagnosed] = field(default_factory=dict)
    assets: Mapping[str, tuple[bytes, str, str]] = field(default_factory=dict)       # by name: content, type, digest


def site_of(request: Request) -> Site:
    found: Site = request.app.state.site
    return found


def shown(request: Request, template: str, *, title: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page: a template of this room, filled. All values are escaped; secrets and control characters are not shown."""
    site = site_of(request)
    text = environment().get_template(template).render(
        title=title, menu=MENU, path=quote(request.scope["path"]),
        jobs=[job for job in site.jobs.all() if job.state != "ended"],
        digests={name: digest for name, (_, _, digest) in site.assets.items()}, **values)
    return HTMLResponse(CONTROL.sub("?", redacted(text)).encode(errors="replace"), status)


@cache
def environment() -> Environment:
    found = Environment(loader=PackageLoader("powertrain.web", "templates"), autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"count": count, "duration": duration, "memory": memory, "prose": formats.html_prose,
                      "blocks": formats.html_blocks}
    return found


async def show_report(request: Request, folder: Path, title: str, back: str) -> HTMLResponse:
    """Show the report of a run's or a study's folder, which another process reads and writes as HTML."""
    site = site_of(request)
    answer = await site.asking.ask(["page", site.places.shown(folder)])
    return shown(request, "report.html", title=title, back=back, report=Markup(answer.event("page")["html"]))


async def fields(request: Request) -> dict[str, object]:
    """Return the JSON object of a request. Raises WrongUse for anything else."""
    try:
        found = await request.json()
    except (ValueError, RecursionError):
        raise WrongUse("the request is no JSON") from None
    if not isinstance(found, dict):
        raise WrongUse("the request is no JSON object")
    return found
