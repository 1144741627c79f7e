"""The page without a browser: an application in a folder of its own, and a client that speaks to it as a browser would."""

import asyncio
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from powertrain.cli.page import answer
from powertrain.records import WrongUse
from powertrain.web.app import make_app, read_assets
from powertrain.web.asking import Answer as Answered
from powertrain.web.asking import Asking
from powertrain.web.chatting import Talks
from powertrain.web.guard import COOKIE, Guard
from powertrain.web.jobs import Jobs
from powertrain.web.places import Places
from powertrain.web.series import Index
from powertrain.web.sessions import Sessions
from powertrain.web.site import Site

HOST = "127.0.0.1:8790"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    app: Guard
    site: Site
    cookie: str
    host: str = HOST

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, value: object, **headers: str) -> Answer:
        return self.request("POST", path, json.dumps(value).encode(), {
            "content-type": "application/json", "origin": f"http://{HOST}", **headers})

    def put(self, path: str, content: bytes, **headers: str) -> Answer:
        return self.request("PUT", path, content, {
            "content-type": "application/octet-stream", "origin": f"http://{HOST}", **headers})

    def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None,
                drop: tuple[str, ...] = ()) -> Answer:
        """Send a request with a browser's headers, `headers` in their place, and without those in `drop`."""
        sent = {"host": HOST, "cookie": f"{COOKIE}={self.cookie}",
                **({"content-length": str(len(body))} if method in ("POST", "PUT") else {}),
                **{name.replace("_", "-"): value for name, value in (headers or {}).items()}}
        where = urlsplit(path)
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in sent.items() if name not in drop]
        return asyncio.run(_answer(self.app, {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": _unquoted(where.path), "raw_path": where.path.encode(), "query_string": quote(
                where.query, safe="=&%+?/:,;@!$'()*~-._[]").encode(), "root_path": "", "headers": raw,
            "client": ("127.0.0.1", 50000), "server": ("127.0.0.1", 8790)}, body))


def _unquoted(path: str) -> str:
    from urllib.parse import unquote

    return unquote(path)


async def _answer(app: Guard, scope: dict[str, Any], body: bytes) -> Answer:
    parts, started = [{"type": "http.request", "body": body, "more_body": False}], {}
    sent = bytearray()

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            sent.extend(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(started["status"], {name.decode().lower(): value.decode() for name, value in started["headers"]}, bytes(sent))


def end_all(jobs: Jobs) -> None:
    """End what the jobs have started, and what begins in its place."""
    while unfinished := [job for job in jobs.all() if job.state != "ended"]:
        for job in unfinished:
            jobs.stop(job.id, now=True)
        for child in [*jobs._children.values()]:
            child.wait(20)
        jobs.look()
    jobs.close()


@pytest.fixture
def ending() -> Callable[[Jobs], None]:
    return end_all


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the page was started."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def client(root: Path, tmp_path: Path) -> Iterator[Client]:
    """Yield a client that has used the link. What its jobs have started is ended at the end."""
    places, cache = Places(root), tmp_path / "cache" / "page"
    sessions = Sessions(cache, str(root))
    site = Site(places, cache, Jobs(places.jobs, root, dict(os.environ)), sessions,
                Index(cache / "index.sqlite", places.opened), Asking(root, dict(os.environ)), Talks(root, os.environ),
                10_000_000, assets=read_assets())
    app = make_app(site, [HOST], encrypted=False, print_link=lambda: None)
    cookie = sessions.exchange(sessions.token)
    assert cookie
    yield Client(app, site, cookie)
    end_all(site.jobs)
    site.asking.end()


class Here:
    """The process that answers quick questions, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch, self.asked, self.problem = monkeypatch, list[list[str]](), ""

    async def ask(self, words: Sequence[str], topic: str = "") -> Answered:
        self.asked.append([*words])
        if self.problem:
            raise WrongUse(self.problem)
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(words)))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            answer()
        found = json.loads(printed.getvalue())
        return Answered(found["code"], tuple(json.loads(line) for line in found["lines"] if line.startswith("{")))


@pytest.fixture
def page(client: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A page whose questions are answered in this process, and whose jobs only print their words."""
    monkeypatch.setenv("POWERTRAIN_CACHE", str(cache))
    client.site.jobs.program = (sys.executable, "-c", "import sys; print(sys.argv[1:])")
    client.site = client.app.app.state.site = replace(client.site, asking=Here(monkeypatch))
    return client
