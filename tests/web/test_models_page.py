"""Models: what may be exported and deleted from a browser, and what may not."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import wait_until
from runs_written import write_run

from powertrain.cli.exporting import DTYPES
from powertrain.run.folder import RunFolder, locked
from powertrain.web.models_pages import FORMATS

EVIL = "<img src=x onerror=alert(1)>'\""


@pytest.fixture
def page(client: Any) -> Any:
    """A page whose jobs wait until a file `go` is there, and print their words."""
    client.site.jobs.program = (sys.executable, "-c", "import os, sys, time\nprint(sys.argv[1:])\n"
                                                      "while not os.path.exists('go'): time.sleep(0.02)")
    return client


def finished(root: Path, name: str, base: str = "", *, adapter: bool = False) -> Path:
    run = write_run(root / "runs" / name, 4)
    (run / "model").mkdir()
    (run / "model" / "model.safetensors").write_bytes(b"x" * 2048)
    if adapter:
        (run / "model" / "adapter_config.json").write_text("{}")
    if base:
        (run / "facts.json").write_text(json.dumps({"model": {"path": str(root / "runs" / base / "model")}}))
    return run


def end_jobs(page: Any, root: Path) -> None:
    (root / "go").touch()
    wait_until(lambda: page.site.jobs.look() or all(job.state == "ended" for job in page.site.jobs.all()), 20)


def test_formats_are_those_of_the_command() -> None:
    assert {name: dtypes for name, (_, dtypes) in FORMATS.items()} == DTYPES


def test_models_and_exports_are_listed_as_text(page: Any, root: Path) -> None:
    finished(root, "whole")
    finished(root, EVIL, adapter=True)
    write_run(root / "runs" / "unfinished", 2)
    (root / "exports" / "one").mkdir(parents=True)
    (root / "exports" / "one" / "weights").write_bytes(b"x" * 1024)
    (root / "exports" / "graph").mkdir()
    (root / "exports" / "graph" / "model.onnx").touch()
    (root / "exports" / "link").symlink_to(root / "runs")
    found = page.get("/models").text
    assert "/chat?model=exports/one" in found
    assert "/chat?model=exports/graph" not in found
    assert "<img" not in found
    assert "A whole model, 2 KiB" in found
    assert "Adapters, 2 KiB" in found
    assert "exports/one" in found
    assert "exports/link" not in found
    assert "runs/unfinished" not in found
    whole = found[found.index('value="runs/whole"'):]
    assert "gguf" in whole
    assert 'value="adapter"' not in whole[:whole.index("</form>")]


def test_an_export_is_a_job(page: Any, root: Path) -> None:
    finished(root, "one")
    answer = page.post("/models/export", {"model": "runs/one", "to": "gguf", "dtype": "q8_0"}).json()
    job = page.site.jobs.get(answer["go"].removeprefix("/jobs/"))
    assert job.words == ("export", "./runs/one", "--to", "gguf", "--output", "exports/one-gguf-q8_0", "--dtype", "q8_0")
    assert page.post("/models/evaluate", {"model": "runs/one"}).json()["go"].startswith("/jobs/")
    assert {job.words for job in page.site.jobs.all()} == {job.words, ("evaluate", "./runs/one")}


@pytest.mark.parametrize(("given", "says"), [
    ({"to": "exe"}, "merged, adapter, gguf"), ({"to": "merged", "dtype": "q8_0"}, "not possible for merged"),
    ({"to": "adapter", "dtype": "float16"}, "leave them open"), ({"to": "adapter"}, "has no adapter"),
    ({"model": "runs/../one"}, "no run"), ({"model": "/etc"}, "outside"), ({"model": "runs/gone"}, "no run"),
    ({"dtype": "float16; rm -rf"}, "not possible")])
def test_an_export_that_cannot_be(page: Any, root: Path, given: dict[str, str], says: str) -> None:
    finished(root, "one")
    answer = page.post("/models/export", {"model": "runs/one", "to": "merged", "dtype": "", **given})
    assert answer.status in (400, 404)
    assert says in answer.json()["problem"]
    assert not page.site.jobs.all()


def test_an_export_overwrites_nothing(page: Any, root: Path, tmp_path: Path) -> None:
    finished(root, "one")
    (root / "exports").mkdir()
    (root / "exports" / "one-merged").symlink_to(tmp_path / "nowhere")
    ask = {"model": "runs/one", "to": "merged", "dtype": ""}
    assert "is there already" in page.post("/models/export", ask).json()["problem"]
    shutil.rmtree(root / "exports")
    (root / "exports").symlink_to(tmp_path)
    assert "is a link" in page.post("/models/export", ask).json()["problem"]


def test_a_run_and_an_export_are_deleted_whole(page: Any, root: Path, tmp_path: Path) -> None:
    run = finished(root, "one")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (run / "link").symlink_to(tmp_path / "kept")
    (root / "exports" / "one-merged").mkdir(parents=True)
    assert page.post("/models/delete", {"what": "exports/one-merged"}).json() == {"refresh": True}
    assert page.post("/models/delete", {"what": "runs/one"}).json() == {"refresh": True}
    assert not list((root / "runs").iterdir())
    assert not list((root / "exports").iterdir())
    assert (tmp_path / "kept" / "file").exists()


@pytest.mark.parametrize("what", [
    "", "runs", "runs/", "runs/.", "runs/..", "runs/../exports", "runs/one/model", "runs//one", "../runs/one", "/etc",
    "uploads/a", "jobs/x", "studies/s", "runs/link", "exports/link", "runs/notes", "runs/.hidden",
    "runs/a\0b", "runs/\ud800", "runs/*", f"runs/{'é' * 150}"])
def test_nothing_else_is_deleted(page: Any, root: Path, tmp_path: Path, what: str) -> None:
    finished(root, "one")
    for path in ("uploads/a", "studies/s", "jobs/x", "runs/notes", "runs/.hidden", "exports/e"):
        (root / path).mkdir(parents=True, exist_ok=True)
    (tmp_path / "outside").mkdir()
    for kind in ("runs", "exports"):
        (root / kind / "link").symlink_to(tmp_path / "outside")
    before = {path for path in tmp_path.rglob("*") if "jobs" not in path.parts}
    answer = page.post("/models/delete", {"what": what})
    assert answer.status in (400, 404), answer.text
    assert {path for path in tmp_path.rglob("*") if "jobs" not in path.parts} == before


def test_nothing_is_deleted_behind_a_link(page: Any, root: Path, tmp_path: Path) -> None:
    finished(tmp_path, "one")
    (root / "runs").symlink_to(tmp_path / "runs")
    assert "is a link" in page.post("/models/delete", {"what": "runs/one"}).json()["problem"]
    assert (tmp_path / "runs" / "one" / "model").is_dir()


def test_a_run_in_which_a_process_trains_stays(page: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.run.folder.PATIENCE_S", 0.1)
    run = finished(root, "one")
    with locked(RunFolder(run)):
        answer = page.post("/models/delete", {"what": "runs/one"})
    assert answer.status == 400
    assert "another process is training in" in answer.json()["problem"]
    assert (run / "model" / "model.safetensors").exists()
    assert page.post("/models/delete", {"what": "runs/one"}).status == 200


def test_what_a_job_uses_stays_until_it_ends(page: Any, root: Path) -> None:
    for name in ("one", "one2", "three"):
        finished(root, name)
    page.post("/models/export", {"model": "runs/one", "to": "merged", "dtype": ""})
    page.site.jobs.ask("Train", ["train", "model.path='runs/three'", "--output", "runs/four"], "runs/four")
    for what in ("runs/one", "runs/three"):
        assert f"uses {what}" in page.post("/models/delete", {"what": what}).json()["problem"]
    assert page.post("/models/delete", {"what": "runs/one2"}).status == 200
    end_jobs(page, root)
    assert page.post("/models/delete", {"what": "runs/one"}).status == 200


def test_the_base_of_other_runs_stays(page: Any, root: Path) -> None:
    finished(root, "base")
    finished(root, "tuned", "base", adapter=True)
    assert "runs/base is the base of tuned" in page.post("/models/delete", {"what": "runs/base"}).json()["problem"]
    assert page.post("/models/delete", {"what": "runs/tuned"}).status == 200
    assert page.post("/models/delete", {"what": "runs/base"}).status == 200


def test_what_cannot_be_deleted_is_said(page: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    finished(root, "one")
    monkeypatch.setattr(shutil, "rmtree", refuse)
    answer = page.post("/models/delete", {"what": "runs/one"})
    assert answer.status == 400
    assert "cannot be deleted (Permission denied)" in answer.json()["problem"]


@pytest.fixture
def with_token(page: Any) -> Any:
    page.site = page.app.app.state.site = replace(page.site, has_hub_token=True)
    return page


def test_without_a_token_nothing_is_pushed(page: Any, root: Path) -> None:
    finished(root, "one")
    found = page.get("/models").text
    assert "hf auth login" in found
    assert "/models/push" not in found
    assert "no hub token" in page.post("/models/push", {"model": "runs/one", "name": "me/one"}).json()["problem"]


def test_a_push_is_a_job_that_somebody_has_agreed_to(with_token: Any, root: Path) -> None:
    finished(root, "one", adapter=True)
    assert with_token.get("/models").text.count('data-post="/models/push"') == 1
    for more, says, words in (
            ({}, "It is private", []), ({"public": "yes", "sure": True}, "It is private", []),
            ({"public": True, "overwrite": True}, "Everybody may read it. It replaces", ["--public", "--overwrite"]),
            ({"base": "org/base"}, "It is private", ["--base", "org/base"])):
        jobs, given = len(with_token.site.jobs.all()), {"model": "runs/one", "name": "me/one", **more}
        asks = with_token.post("/models/push", given).json()["ask"]
        assert asks.startswith("Send runs/one to the Hugging Face hub as me/one? ")
        assert says in asks
        assert len(with_token.site.jobs.all()) == jobs       # nobody has agreed yet
        job = with_token.post("/models/push", {**given, "sure": asks}).json()["go"].removeprefix("/jobs/")
        assert with_token.site.jobs.get(job).words == ("push", "./runs/one", "me/one", "--yes", *words)
    private = with_token.post("/models/push", {"model": "runs/one", "name": "me/one"}).json()
    public = {"model": "runs/one", "name": "me/one", "public": True}
    assert "Everybody" in with_token.post("/models/push", {**public, "sure": private["ask"]}).json()["ask"]


@pytest.mark.parametrize("given", [
    {"name": ""}, {"name": "--public"}, {"name": "a/b/c"}, {"name": "a b"}, {"name": "../x"}, {"base": "--public"},
    {"base": "/etc"}, {"model": "/etc"}, {"model": "runs/gone"}, {"model": "runs/../../x"}, {"model": "org/model"},
    {"model": "exports/gone"}, {"model": ["runs/one"]}])
def test_what_may_not_be_pushed(with_token: Any, root: Path, given: Any) -> None:
    finished(root, "one")
    answer = with_token.post("/models/push", {"model": "runs/one", "name": "me/one", **given})
    assert answer.status in (400, 404), answer.text
    assert with_token.site.jobs.all() == []
