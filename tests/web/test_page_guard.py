"""What is refused before any page looks at it: docs/page.md, "What keeps others out", has a row for each."""

import asyncio
import re
import time
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from powertrain.web import guard
from powertrain.web.guard import COOKIE
from powertrain.web.sessions import Sessions

HOST = "127.0.0.1:8790"
OWN = f"http://{HOST}"
JSON = {"content-type": "application/json", "origin": OWN}


@pytest.mark.parametrize("host", ["evil.test", "127.0.0.1.evil.test", "127.0.0.1", "127.0.0.1:8791", "LOCALHOST:8790", "",
                                  "127.0.0.1:8790.", "127.0.0.1:8790@evil.test"])
def test_another_host_is_misdirected(client, host):
    assert client.get("/jobs", host=host).status == 421
    assert client.get("/static/page.js", host=host).status == 421


def test_no_host_and_two_hosts_are_misdirected(client):
    assert client.request("GET", "/jobs", drop=("host",)).status == 421
    # headers are a mapping here: the second one is written beside it
    assert client.get("/jobs").status == 200
    assert client.request("GET", "/jobs", headers={"host": f"{HOST},{HOST}"}).status == 421


@pytest.mark.parametrize("origin", ["http://evil.test", "null", "https://127.0.0.1:8790", "http://127.0.0.1:8791", ""])
def test_another_origin_is_refused(client, origin):
    assert client.get("/jobs", origin=origin).status == 403
    assert client.post("/jobs/x/stop", {"how": "well"}, origin=origin).status == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site", "nonsense"])
def test_requests_that_another_site_makes_are_refused(client, site):
    assert client.get("/jobs", sec_fetch_site=site).status == 403


def test_a_change_needs_its_own_origin_and_json(client):
    assert client.request("POST", "/jobs/x/stop", b"{}", {"content-type": "application/json"}).status == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert client.request("POST", "/jobs/x/stop", b"{}", {"content-type": kind, "origin": OWN}).status == 415
    assert client.post("/jobs/x/stop", {"how": "well"}).status == 404         # it may go on, and finds no such job


@pytest.mark.parametrize("method", ["DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(client, method):
    assert client.request(method, "/jobs").status == 405


def test_get_changes_nothing(client):
    for path in ("/jobs/x/stop", "/jobs/x/move"):
        assert client.get(path).status in (404, 405)


def test_without_the_cookie_nothing_is_shown(client):
    for path in ("/", "/jobs", "/runs", "/runs/x", "/models", "/nothing", "/%2e%2e/"):
        for cookie in ("", f"{COOKIE}=", f"{COOKIE}=9999999999.0", f"{COOKIE}={client.cookie[:-1]}x", "powertrain", ";;;=",
                       f"{COOKIE}=99999999999.{client.cookie.partition('.')[2]}"):
            answer = client.get(path, cookie=cookie)
            assert answer.status == 401, (path, cookie)
            assert "powertrain ui" in answer.text
    assert client.request("POST", "/jobs/x/stop", b"{}", JSON, drop=("cookie",)).status == 401


def test_a_token_in_the_query_opens_nothing(client):
    assert client.get(f"/jobs?t={client.site.sessions.token}", cookie="").status == 401


def test_the_token_works_once_and_gives_a_cookie_that_scripts_cannot_read(client):
    token = client.site.sessions.token
    answer = client.post("/enter", {"token": token}, cookie="")
    assert answer.json() == {"go": "/"}
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(answer.headers["set-cookie"].split("; "))
    cookie = answer.headers["set-cookie"].partition(";")[0]
    assert client.get("/jobs", cookie=cookie).status == 200
    assert client.post("/enter", {"token": token}, cookie="").status == 401
    for wrong in ("", "x", None, 5, {"a": 1}, "é" * 40):
        assert client.post("/enter", {"token": wrong}, cookie="").status == 401


def test_a_cookie_ends_and_opens_one_folder_only(client, tmp_path, monkeypatch):
    other = Sessions(client.site.cache, str(tmp_path / "other"))
    assert client.site.sessions.is_good(client.cookie)
    assert not other.is_good(client.cookie)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert not client.site.sessions.is_good(client.cookie)


def test_the_secret_is_this_users_and_survives(client, tmp_path):
    secret = client.site.cache / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    again = Sessions(client.site.cache, client.site.sessions.scope)
    assert again.is_good(client.cookie)
    secret.write_bytes(b"cut off")
    assert not Sessions(client.site.cache, client.site.sessions.scope).is_good(client.cookie)


def test_every_answer_carries_the_policy(client):
    answers = [client.get("/jobs"), client.get("/nothing"), client.get("/static/page.css"), client.get("/jobs", cookie=""),
               client.get("/jobs", host="evil.test"), client.post("/enter", {}), client.post("/jobs/x/stop", {})]
    for answer in answers:
        for name, value in guard.ANSWERS.items():
            assert answer.headers[name.lower()] == value
        assert "access-control-allow-origin" not in answer.headers
        assert "unsafe" not in answer.headers["content-security-policy"]
    assert answers[0].headers["cache-control"] == "no-store"


def test_a_body_may_be_so_large_only(client):
    large = b'{"token": "' + b"x" * guard.MOST_JSON_BYTES + b'"}'
    assert client.request("POST", "/enter", large, JSON).status == 413
    assert client.request("POST", "/enter", large, {**JSON, "content-length": "5"}).status == 413          # it lies
    assert client.request("POST", "/enter", b"{}", {**JSON, "content-length": "10000000000"}).status == 413
    assert client.request("POST", "/enter", b"no json", JSON).status == 400
    assert client.request("POST", "/enter", b"[" * 100_000, JSON).status == 400


def test_script_and_style_are_small(client):
    sizes = [len(client.get(f"/static/{name}").body) for name in client.site.assets]
    assert len(sizes) == 2
    assert sum(sizes) <= 60_000              # as they are sent: gzip


def test_no_template_or_script_of_the_page_holds_inline_script_or_style():
    folder = Path(guard.__file__).parent
    for file in (folder / "templates").glob("*.html"):
        text = file.read_text()
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! src=)|javascript:|https?://|\| *safe", text), file
    script = (folder / "static" / "page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|https?://", script)


def test_no_address_but_the_entrance_opens_without_the_cookie(client):
    shown = [(method, route.path) for route in client.app.app.routes for method in route.methods
             if client.request(method, re.sub(r"\{\w+\}", "x", route.path), b"{}" if method == "POST" else b"", {
                 **({} if method in ("GET", "HEAD") else {"origin": OWN}),
                 **({"content-type": "application/octet-stream" if method == "PUT" else "application/json"}
                    if method in ("POST", "PUT") else {})}, drop=("cookie",)).status != 401]
    assert len(client.app.app.routes) > 30
    assert {path for _, path in shown} == {"/enter", "/static/{name}"}


def test_a_body_that_stops_coming_is_given_up(monkeypatch):
    async def silent():
        await asyncio.Event().wait()

    monkeypatch.setattr(guard, "SILENCE_S", 0.05)
    with pytest.raises(HTTPException) as refused:
        asyncio.run(guard._limited(silent, 100, "50")())
    assert refused.value.status_code == 408
