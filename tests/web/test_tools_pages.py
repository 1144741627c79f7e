"""Audit, studies, claims, measuring and this machine: what is asked of other processes, and what is shown of their answers."""

import html
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs_written import write_run

from powertrain.web.asking import Answer
from powertrain.web.jobs_pages import STUDY

EVIL = "<script>alert(1)</script>"
SCRIPT = f"""from transformers import Trainer, TrainingArguments  # {EVIL}
args = TrainingArguments("{EVIL}", logging_steps=1, eval_steps=1, evaluation_strategy="steps")
Trainer(model="{EVIL}", args=args).train()
"""
STUDIES = Path(__file__).resolve().parents[2] / "studies"


def words_of(page: Any, answer: Any) -> Sequence[str]:
    words: Sequence[str] = page.site.jobs.get(answer.json()["go"].removeprefix("/jobs/")).words
    return words


# ------------------------------------------------------------------------------------------------ audit


def test_a_pasted_script_is_stored_and_its_findings_shown(page: Any, root: Path) -> None:
    answer = page.post("/audit", {"text": SCRIPT, "name": f"../../{EVIL}.py", "path": ""})
    stored = list((root / "uploads").iterdir())
    assert [file.read_text() for file in stored] == [SCRIPT]
    assert stored[0].name.startswith("script-")
    found = page.get(answer.json()["go"]).text
    assert page.site.asking.asked == [["audit", f"./uploads/{stored[0].name}"]]
    assert "Log every 10 steps" in found
    assert "in place of line 2:" in found
    assert "logging_steps=10" in found
    assert "<script>alert" not in found
    assert "&lt;script&gt;alert" in found


def test_a_folder_is_audited_file_by_file(page: Any, root: Path) -> None:
    (root / "scripts").mkdir()
    for name in ("one.py", "two.py"):
        (root / "scripts" / name).write_text(SCRIPT)
    found = page.get(page.post("/audit", {"path": "scripts"}).json()["go"]).text
    assert found.count("Log every 10 steps") == 2


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside.py", "link.py", "~/x.py", "a\0b", "x/" * 3000, "--apply"])
def test_scripts_outside_the_folders_are_not_read(page: Any, root: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "outside.py").write_text("SECRET = 1\n")
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    answer = page.post("/audit", {"path": path})
    if path == "--apply":                    # a name like any other
        page.get("/audit?file=--apply")
        assert page.site.asking.asked == [["audit", "./--apply"]]
        return
    assert answer.status == 400
    shown = page.get("/audit?file=" + path.replace("\0", "%00"))
    assert "class=\"problem\"" in shown.text
    assert "SECRET" not in shown.text
    assert not page.site.asking.asked


@pytest.mark.parametrize("given", [{}, {"text": " "}, {"text": "a" * 500_001}, {"text": 7, "path": 7}])
def test_what_is_no_script(page: Any, root: Path, given: dict[str, Any]) -> None:
    answer = page.post("/audit", given)
    assert answer.status == (200 if "path" in given else 400)            # "7" might be a script's path
    assert not (root / "uploads").exists() or "path" in given


def test_uploads_behind_a_link_are_refused(page: Any, root: Path, tmp_path: Path) -> None:
    (root / "uploads").symlink_to(tmp_path)
    assert "is a link" in page.post("/audit", {"text": SCRIPT}).json()["problem"]
    assert {one.name for one in tmp_path.iterdir()} == {"project", "cache"}


# ------------------------------------------------------------------------------------------------ studies and claims


def test_studies_are_listed_and_shown(page: Any, root: Path) -> None:
    shutil.copytree(STUDIES / "2026-11-23_bench-char-small", root / "studies" / "small")
    (root / "studies" / EVIL.replace("/", "")).mkdir()
    (root / "studies" / EVIL.replace("/", "") / "evidence.json").write_text("][")
    (root / "studies" / "link").symlink_to(STUDIES)
    listed = page.get("/studies").text
    assert "/studies/small" in listed
    assert json.loads((root / "studies" / "small" / "evidence.json").read_text())["what"] in html.unescape(listed)
    assert "<script>alert" not in listed
    assert "/studies/link" not in listed
    found = page.get("/studies/small").text
    assert page.site.asking.asked == [["page", "studies/small"]]
    assert found.count("<h1") == 1
    for name in ("link", "..", "nothing", "%2e%2e", EVIL):
        assert page.get(f"/studies/{name}").status == 404


def test_claims_have_their_verdicts_and_are_measured_by_jobs(page: Any, root: Path) -> None:
    found = page.get("/claims").text
    assert "not applicable here" in found or "not measured yet" in found
    words = words_of(page, page.post("/measure", {"what": "claim", "id": "000-03", "budget": "10m"}))
    assert words == ("claims", "run", "000-03", "--budget", "10m")
    assert "there is no claim" in page.post("/measure", {"what": "claim", "id": "--json", "budget": "5m"}).json()["problem"]


def test_a_measured_claim_links_to_its_study(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured:
        async def ask(self, words: Sequence[str]) -> Answer:
            line = {"event": "claim", "id": "1", "what": EVIL, "claimed": "2x", "verdict": "confirmed", "because": EVIL,
                    "study": EVIL}
            return Answer(0, (line, {**line, "id": "2", "verdict": "not applicable here", "study": None}))

    page.app.app.state.site = replace(page.site, asking=Measured())
    found = page.get("/claims").text
    assert "<strong>confirmed</strong>" in found
    assert "<script>alert" not in found
    assert found.count("data-post") == 1     # what this machine cannot decide is not measured


# ------------------------------------------------------------------------------------------------ measuring


@pytest.mark.parametrize(("given", "words"), [
    ({"what": "tune", "recipe": "docstrings", "budget": "5m"}, ("tune", "docstrings", "--budget", "5m")),
    ({"what": "diagnose", "like": "one"}, ("diagnose", "runs/one/recipe.yaml", "--budget", "2m")),
    ({"what": "ablate", "more": "seed=7"}, ("ablate", "seed=7", "--budget", "2m"))])
def test_measuring_is_a_job(page: Any, root: Path, given: Mapping[str, str], words: Sequence[str]) -> None:
    write_run(root / "runs" / "one", 4)
    assert page.get("/measure").status == 200
    assert words_of(page, page.post("/measure", given)) == words


@pytest.mark.parametrize("given", [
    {"what": "train"}, {"what": "tune", "budget": "9h"}, {"what": "tune", "recipe": "../x"}, {"what": "tune", "like": "../x"},
    {"what": "diagnose", "more": "--apply"}, {"what": "tune", "more": "data.source=/etc/passwd"},
    {"what": "tune", "more": "model.trust_remote_code=true"}, {"what": "tune", "more": "nonsense=1"}, {}])
def test_what_is_not_measured(page: Any, root: Path, given: Mapping[str, str]) -> None:
    answer = page.post("/measure", given)
    assert answer.status in (400, 404)
    assert answer.json()["problem"]
    assert not page.site.jobs.all()


def test_a_job_that_measured_links_to_its_study(page: Any, root: Path) -> None:
    job = page.site.jobs.ask("Tune", ["tune"])
    (root / "studies" / "2026-11-24_tuning-2").mkdir(parents=True)
    output = page.site.jobs.folder / f"{job.id}.out"
    output.write_text(f"studies/2026-11-24_tuning\nStudy  studies/2026-11-24_tuning-2/\nstudies/../x studies/{EVIL}\n")
    assert STUDY.findall(output.read_text()) == ["2026-11-24_tuning", "2026-11-24_tuning-2"]
    assert "See the study" not in page.get(f"/jobs/{job.id}").text       # it is not saved yet
    (root / "studies" / "2026-11-24_tuning-2" / "evidence.json").touch()
    assert '<a href="/studies/2026-11-24_tuning-2">See the study</a>' in page.get(f"/jobs/{job.id}").text


# ------------------------------------------------------------------------------------------------ this machine


def test_this_page_and_this_machine(page: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz012345")
    (page.site.cache.parent / "tokens").mkdir(parents=True)
    (page.site.cache.parent / "tokens" / "x").write_bytes(b"x" * 3072)
    page.app.app.state.site = replace(page.site, has_hub_token=True)
    found = page.get("/system").text
    assert str(root) in found
    assert "http://127.0.0.1:8790" in found
    assert "3 KiB" in found
    assert "hf_" not in found
    assert re.search(r"Hub token<+set<", re.sub(r"\s*<[^>]*>", "<", found))
    assert "powertrain facts --share" in found


def test_facts_are_those_of_the_machine_with_their_sources(page: Any) -> None:
    found = page.get("/facts").text
    assert "psutil" in found
    assert "torch" in found
    assert "not usable" in found             # and why not
    assert "vocabulary" not in found         # of no recipe


def test_facts_that_are_not_known_are_said_once(page: Any) -> None:
    page.site.asking.problem = "the process that answers has ended"
    answer = page.get("/facts")
    assert answer.status == 200              # so that the page is not asked for again and again
    assert "has ended" in answer.text
