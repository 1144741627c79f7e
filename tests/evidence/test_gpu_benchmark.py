"""`make bench-gpu` ends with a study and a table, whatever its cases do: with stand-ins for the cases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from powertrain.evidence import studies
from powertrain.records.evidence import Study

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import apart
from apart import DONE, FAILED, INTERRUPTED, KILLED, NO_MEMORY, NOT_BEGUN, TOO_LONG, Case, Outcome, outcomes

import gpu

BENCHMARKS = Path(gpu.__file__).parent
HEAD = "import json, os, signal, subprocess, sys, time\nout = open(sys.argv[-1], 'a')\n"
SLEEPER = "import time; time.sleep(600)"
ROW = {"model": "tiny", "arm": "the plan", "tokens_per_s": 1234.0, "share": 0.5, "peak_bytes": 2**30, "losses": [3.0, 2.0],
       "target": None, "predicted": 2**30}


def case(name: str, code: str, needs: str = "") -> Case:
    return Case(name, (sys.executable, "-c", HEAD + code), needs)


def first_measures(code: str) -> str:
    return f"out.write(json.dumps({{'row': {ROW}}}) + '\\n'); out.flush()\n" + code


GOOD = case("good", first_measures(""))
RAISES = case("raises", "print('trying'); raise ValueError('no such kernel')")
KILLED_CASE = case("killed", first_measures("os.kill(os.getpid(), signal.SIGKILL)"))
HANGS = case("hangs", first_measures(f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}])\n"
                                     "print(child.pid, flush=True); time.sleep(600)"))
NO_ROOM = case("no room", "raise RuntimeError('CUDA error: out of memory')")
AFTER_ONE_THAT_FAILED = case("after", "", needs="raises")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    cases = [RAISES, AFTER_ONE_THAT_FAILED, KILLED_CASE, HANGS, NO_ROOM, GOOD]
    return {outcome.case: outcome for outcome in outcomes(cases, 5.0, tmp_path_factory.mktemp("cases"))}


def test_each_failure_is_an_outcome_with_its_reason_and_the_others_go_on(found: dict[str, Outcome]) -> None:
    assert {name: outcome.status for name, outcome in found.items()} == {
        "raises": FAILED, "after": NOT_BEGUN, "killed": KILLED, "hangs": TOO_LONG, "no room": NO_MEMORY, "good": DONE}
    assert found["raises"].reason == "ValueError: no such kernel"
    assert found["raises"].last_lines[0] == "trying"
    assert found["after"].reason == "raises is not done"
    assert "SIGKILL" in found["killed"].reason
    assert found["hangs"].reason == "ended after 5 s"


def test_what_was_measured_before_a_failure_is_kept(found: dict[str, Outcome]) -> None:
    assert found["killed"].measured == found["hangs"].measured == found["good"].measured == ({"row": ROW},)


def test_what_a_case_has_started_ends_with_it(found: dict[str, Outcome]) -> None:
    child = int(found["hangs"].last_lines[-1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_study_holds_rows_and_failures(found: dict[str, Outcome], tmp_path: Path) -> None:
    folder = tmp_path / "study"
    shown = gpu.keep(folder, list(found.values())[:2], 1.0)
    assert "no such kernel" in shown
    shown = gpu.keep(folder, list(found.values()), 2.0)      # after more cases, over the study of fewer
    kept: Study = studies.load(folder)
    assert [row["arm"] for row in kept.findings["rows"]] == 3 * ["the plan"]
    assert {one["case"]: one["status"] for one in kept.findings["failures"]} == {
        name: outcome.status for name, outcome in found.items() if outcome.status != DONE}
    assert (folder / "table.txt").read_text() == shown + "\n"
    assert "1,234" in shown
    assert "ended after 5 s" in shown
    assert kept.machine["cores"]             # though no case has read the machine


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_keeps_what_was_measured(asked: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu
from apart import Case
sys.argv = ["gpu.py", "--tiny", "--study", "stopped"]
gpu.cases_of = lambda options, scratch: {[GOOD, HANGS, GOOD]!r}
gpu.main()
""", encoding="utf-8")
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=err, text=True,
                                   env=os.environ | {"TMPDIR": str(tmp_path)})
        until = time.monotonic() + 240
        while not any(file.stat().st_size for file in tmp_path.glob("*/case-1.log")) and time.monotonic() < until:
            time.sleep(0.1)                  # until the second case hangs
        process.send_signal(asked)
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 1, (tmp_path / "err").read_text()
    kept = studies.load(tmp_path / "studies" / "stopped")
    assert [one["status"] for one in kept.findings["failures"]] == [INTERRUPTED, NOT_BEGUN]
    assert len(kept.findings["rows"]) == 2
    assert "stored in" in out


def test_an_unfinished_line_of_results_counts_for_nothing(tmp_path: Path) -> None:
    results = tmp_path / "results"
    apart.tell(results, row=1)
    with results.open("a") as file:
        file.write('{"row": ')
    assert list(apart._measured(results)) == [{"row": 1}]


def test_every_case_of_the_benchmark_is_known_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--models", "0.6B", "8B"])
    names = [case.name for case in gpu.cases_of(gpu.parse(), tmp_path)]
    assert names[:4] == ["machine", "products", "attention", "0.6B weights"]
    assert {name.partition(" ")[2] for name in names[3:]} == {"weights", *gpu.PEERS, *gpu.rungs(every=True), "end"}
    assert len(names) == len(set(names))
