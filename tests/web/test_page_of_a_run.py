"""The page of a run says what its events say, and does to it only what is asked."""

import html
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import numpy as np
import pytest
from runs_written import line_of, write_run

from powertrain.run.folder import RunFolder, is_being_written
from powertrain.web.curves import ACROSS, View, thinned

HOLDS = """
import os, socket, sys, time
from pathlib import Path
from powertrain.run.folder import RunFolder, locked
folder = RunFolder(Path(sys.argv[1]))
with locked(folder):
    folder.lock.write_text(f"{os.getpid()} {socket.gethostname()} 0")
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(root):
    return write_run(root / "runs" / "one", 50)


CURVE = re.compile(r'<path d="(M[^"]*L[^"]*)" class="s-blue line')


def highest(text, figure):
    """Return how high the curve of a figure reaches: the value on its y axis, by the ticks."""
    svg = text.partition(f'<figure id="{figure}"')[2].partition("</svg>")[0]
    ticks = [(float(y) - 4, float(value)) for y, value in
             re.findall(r'y="([\d.]+)" text-anchor="end" class="f-quiet">([\d.]+)</text>', svg)]
    (low_px, low), (high_px, high) = max(ticks), min(ticks)
    top_px = min(float(y) for path in CURVE.findall(svg) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path))
    return low + (low_px - top_px) / (low_px - high_px) * (high - low)


def test_its_numbers_are_those_of_the_events(client, run):
    text = client.get("/runs/one").text
    assert client.get("/runs/one").status == 200
    assert "finished" in text
    assert re.search(r'data-field="step">50<', text)
    assert "2.5000 at step 50" in text
    for figure in ("loss", "speed", "gradient", "rate", "parts"):
        assert f'<figure id="{figure}"' in text


def test_a_spike_of_one_step_among_100_000_is_visible_zoomed_out(client, root):
    write_run(root / "runs" / "long", 100_000, spike=61_234)
    text = client.get("/runs/long?chart=loss").text
    assert highest(text, "loss") == pytest.approx(40.0, abs=0.5)
    assert len(text) < 400_000


def test_thinning_keeps_the_least_and_the_greatest_of_each_column_and_gaps():
    random = np.random.default_rng(1)
    xs, ys = np.arange(1.0, 50_001.0), random.normal(size=50_000)
    ys[777], ys[12_345:12_400], ys[30_000] = 9.0, np.nan, np.inf
    points = thinned(xs, ys, 1.0, 50_000.0)
    columns = ((xs - 1.0) / 49_999.0 * ACROSS).astype(int)
    kept = {}
    for x, y in points:
        kept.setdefault(columns[int(x) - 1], []).append(y)
    for column in range(ACROSS):
        real = ys[(columns == column) & np.isfinite(ys)]
        shown = [y for y in kept[column] if y is not None]
        assert (min(shown), max(shown)) == (real.min(), real.max()) if len(real) else not shown
    assert sum(y is None for _, y in points) == 56
    assert len(points) <= 3 * (ACROSS + 1) + 56
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_zooming_in_shows_every_step_of_the_range(client, run):
    text = client.get("/runs/one?from=10&to=14&smooth=none&chart=loss").text
    assert len(re.findall("[ML]", CURVE.search(text)[1])) == 5


@pytest.mark.parametrize("query", ["x=tokens", "x=time&log=yes", "from=30&to=10", "from=x&to=nan", "from=900&to=901",
                                   "chart=none", "smooth=much&x=nonsense", "from=-1e308&to=1e308", "chart=%3Cscript%3E"])
def test_any_view_can_be_asked_for(client, run, query):
    answer = client.get(f"/runs/one?{query}")
    assert answer.status == 200
    assert "<script>" not in answer.text


def test_a_view_says_itself_in_its_address():
    view = View("tokens", True, "much", 2.0, 9.5, "loss")
    assert View.of(dict(parse_qsl(view.query()[1:]))) == view
    assert View.of({}).query() in ("", "?")


def test_numbers_that_are_not_finite_and_damaged_lines_are_shown(client, run):
    with open(run / "events.jsonl", "a") as log:
        log.write(line_of(51).replace('"loss": ', '"loss": "nan", "was": ') + "{torn\n" + line_of(52))
    text = client.get("/runs/one").text
    assert "damaged and left out" in text
    assert re.search(r'data-field="step">52<', text)


def test_a_run_that_has_not_begun_has_a_page(client, root):
    run = write_run(root / "runs" / "new", 1)
    (run / "events.jsonl").unlink()
    assert client.get("/runs/new").status == 200


@pytest.mark.parametrize("name", ["none", "..", "%2e%2e%2fruns", "a%00b", "one%2F..%2Fone"])
def test_only_folders_of_runs_are_shown(client, run, name):
    for path in (f"/runs/{name}", f"/runs/{name}/stream"):
        assert client.get(path).status == 404


def test_what_a_run_says_is_text(client, run):
    nasty = "<script>alert(1)</script>\x1b[31m"
    with open(run / "events.jsonl", "a") as log:
        log.write(json.dumps({"event": "sample", "time": 1.7e9, "step": 50, "text": nasty}) + "\n")
        log.write(json.dumps({"event": "end", "time": 1.7e9, "step": 50, "reason": "failed", "message": nasty}) + "\n")
    text = client.get("/runs/one").text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("how", "code"), [("well", -signal.SIGTERM), ("now", -signal.SIGKILL)])
def test_a_run_that_somebody_else_has_started_can_be_stopped(client, root, how, code):
    run = write_run(root / "runs" / "one", 5, ended=False)
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(run)], stdout=subprocess.PIPE, env=dict(os.environ)) as child:
        try:
            assert child.stdout.readline() == b"held\n"
            assert "Stop now" in client.get("/runs/one").text
            assert client.post("/runs/one/stop", {"how": how}).status == 200
            assert child.wait(20) == code
        finally:
            child.kill()
    text = client.get("/runs/one").text
    assert "killed" in text
    assert "Stop now" not in text


def test_nobody_is_killed_by_a_stale_lock(client, run):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as bystander:
        (run / ".lock").write_text(f"{bystander.pid} {socket.gethostname()} 0")
        answer = client.post("/runs/one/stop", {"how": "now"})
        time.sleep(0.1)
        try:
            assert answer.status == 400
            assert bystander.poll() is None
        finally:
            bystander.kill()


@pytest.mark.parametrize("value", [{}, {"how": "later"}, {"how": ["now"]}])
def test_stopping_needs_a_way(client, run, value):
    assert client.post("/runs/one/stop", value).status == 400


def test_only_a_run_that_is_not_complete_offers_to_go_on(client, run):
    assert "/runs/one/resume" in client.get("/runs/one").text        # finished by its events, but its model is gone
    (run / "model").mkdir()
    text = client.get("/runs/one").text
    assert "/runs/one/resume" not in text
    assert "/chat?model=runs/one" in text
    assert is_being_written(RunFolder(run)) is False


@pytest.fixture
def stopped(run):
    """A run that was stopped after step 50, with the checkpoints of three steps."""
    log = run / "events.jsonl"
    log.write_text(log.read_text().replace('"reason": "finished"', '"reason": "stopped", "signal": "SIGTERM"'))
    for step in (20, 40, 50):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    return run


def test_a_run_goes_on_from_any_of_its_checkpoints(client, stopped, monkeypatch):
    text = client.get("/runs/one").text
    assert "Resume from step 50" in text
    offered = re.findall(r"data-send='({\"step\": \d+})' data-ask=\"([^\"]+)\"", text)
    assert [json.loads(value) for value, _ in offered] == [{"step": 20}, {"step": 40}]          # the newest is above
    assert "later steps (40, 50) are set aside, not deleted" in offered[0][1]
    monkeypatch.setattr(client.site.jobs, "_start", lambda job: None)
    assert client.post("/runs/one/resume", {"step": 20}).status == 200
    assert client.post("/runs/one/resume", {}).status == 200
    assert {job.words for job in client.site.jobs.all()} == {
        ("train", "--resume", "runs/one", "--from-step", "20"), ("train", "--resume", "runs/one")}


@pytest.mark.parametrize(("step", "problem"), [
    (30, "has no checkpoint of step 30"), (-1, "a step is a whole number"), (True, "a step is a whole number"),
    ("20; rm", "a step is a whole number"), (10**30, "a step is a whole number"), (20.5, "a step is a whole number")])
def test_a_step_that_is_not_there_is_refused_at_once(client, stopped, step, problem):
    answer = client.post("/runs/one/resume", {"step": step})
    assert answer.status == 400
    assert problem in answer.json()["problem"]
    assert client.site.jobs.all() == []


def test_a_complete_run_offers_no_way_back(client, stopped):
    (stopped / "model").mkdir()
    assert "data-send='{\"step\"" not in client.get("/runs/one").text
    assert "has its final model" in client.post("/runs/one/resume", {"step": 20}).json()["problem"]


@pytest.mark.parametrize(("place", "step"), [
    ("at=20", 20), ("at=20.4", 20), ("at=20.6", 21), ("at=-5", 1), ("at=1e9", 50), ("x=tokens&at=5120", 10),
    ("x=time&at=2.04", 20)])
def test_a_place_on_the_curves_tells_its_step(client, run, place, step):
    (says,) = client.get(f"/runs/one/at?{place}").json()["says"]
    assert says.startswith(f"step {step}: loss {json.loads(line_of(step))['loss']:.4f}, 5,000 tokens/s, gradient norm ")
    assert says.endswith("learning rate 0.001, 0.1 s")


@pytest.mark.parametrize("place", ["", "at=", "at=x", "at=nan", "at=inf"])
def test_a_place_is_a_number(client, run, place):
    assert client.get(f"/runs/one/at?{place}").status == 400


def test_a_place_of_several_runs_tells_each_step(client, run, root):
    write_run(root / "runs" / "two", 10)
    says = client.get("/compare/at?run=one&run=two&at=30").json()["says"]
    assert [line.partition(": loss")[0] for line in says] == ["one: step 30", "two: step 10"]


@pytest.mark.parametrize("name", ["50%41 off", "a?b", "a#b", "a&b=c", "-rf", "a'b\"c", "a+b", "größe"])
def test_every_address_of_a_page_is_that_runs_whatever_its_name(page, root, name):
    write_run(root / "runs" / name, 30)
    for path in ("", "/report", "/causes"):
        text = page.get(f"/runs/{quote(name)}{path}").text
        found = {html.unescape(one) for one in re.findall(r'(?:href|data-[a-z]+)="(/runs/[^"]+)"', text)}
        assert found
        assert {unquote(urlsplit(one).path).removeprefix(f"/runs/{name}") for one in found} <= {
            "", "/at", "/causes", "/report", "/resume", "/stream"}
