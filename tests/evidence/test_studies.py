"""What is written down of a measurement, and that it can be read again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from powertrain.evidence import studies
from powertrain.records import Facts, WrongUse, to_plain
from powertrain.records.evidence import FASTER, Arm, ArmRun, Comparison, Interval, Parity, Study, Window

WINDOW = Window(140, 120, 1.23456, 122880, 122880, 0, {"data": 0.0123, "copy": 0.00012, "forward": 0.3123, "backward": 0.7123,
                                                      "optimizer": 0.1123})
RUN = ArmRun("with", 2.5, 0.3, 3, (WINDOW, WINDOW), (3.0, 2.5, 2.25), (1.0, 0.5, 0.25), 12345, ("bf16",))
PLAN = {"steps": [{"technique": "bf16", "settings": {}}], "refused": [], "estimate": None}


def a_study() -> Study:
    parity = Parity("ROUNDING", True, "close", 4, 1e-6, 2e-6)
    comparison = Comparison("without", "with", Interval(1.1, 1.05, 1.2), 6, FASTER, "measured", (100.0, 110.0), (5, 6), 0.5, 30,
                            parity)
    invalid = replace(comparison, speed=None, parity=None)
    return Study("", "comparison", "two arms", "2026-11-21", "powertrain ablate", "abc+", {"name": "a machine"}, {"torch": "2"},
                 (Arm("without", ("default",)), Arm("with", ("default",), PLAN)), (replace(RUN, arm="without"), RUN),
                 (comparison, invalid), 0.012, {"recipe": ["default"], "rows": [{"bound": None, "x": [1, 2.5]}]}, 12.5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return studies.new_folder("comparison")


def test_a_study_is_read_as_it_was_written(folder: Path, facts: Facts) -> None:
    study = replace(a_study(), name=folder.name)
    studies.save(folder, study, facts)
    assert studies.load(folder) == study
    assert json.loads((folder / "plans.json").read_text()) == {"with": PLAN}
    assert json.loads((folder / "facts.json").read_text())["model"] == to_plain(facts.model)


def test_nothing_is_written_over(folder: Path, facts: Facts) -> None:
    studies.save(folder, a_study(), facts)
    before = (folder / "evidence.json").read_bytes()
    with pytest.raises(WrongUse, match="is not overwritten"):
        studies.save(folder, a_study(), facts)
    with pytest.raises(WrongUse, match="is not overwritten"):
        studies.new_folder("comparison", folder.name)
    assert (folder / "evidence.json").read_bytes() == before
    assert studies.new_folder("comparison").name == f"{folder.name}-2"


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".."])
def test_a_study_has_a_plain_name(name: str) -> None:
    with pytest.raises(WrongUse, match="not the name of a folder"):
        studies.new_folder("comparison", name)


def test_long_curves_are_thinned_and_what_is_not_finite_stays_so(folder: Path, facts: Facts) -> None:
    long = replace(RUN, losses=tuple(1 / (step + 1) for step in range(1000)), grad_norms=(math.nan,) * 1000)
    studies.save(folder, replace(a_study(), runs=(long,)), facts)
    written = json.loads((folder / "evidence.json").read_text())["runs"][0]
    assert written["curves_every_steps"] == 17
    assert written["grad_norms"] == [None] * 59
    found = studies.load(folder).runs[0]
    assert found.losses[1] == pytest.approx(1 / 18, rel=1e-5)
    assert all(map(math.isnan, found.grad_norms))


def test_a_study_of_twenty_comparisons_stays_light(folder: Path, facts: Facts) -> None:
    """Every one with a dozen windows, and steps in the hundreds."""
    run = replace(RUN, windows=(WINDOW,) * 12, losses=(2.345678,) * 250, grad_norms=(0.123456,) * 250)
    studies.save(folder, replace(a_study(), runs=(run,) * 40), facts)
    assert (folder / "evidence.json").stat().st_size < 200_000


def test_no_path_of_this_machine_is_written_down(folder: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/somewhere/bin/powertrain", "ablate", "data=/home/someone/texts/all.txt"])
    hardware = replace(facts.hardware, sources={"peak": "measured now, kept in /home/someone/.cache/hardware/abc.json"})
    study = replace(a_study(), command=studies.command(), arms=(Arm("with", ("data=/home/someone/texts/all.txt",), PLAN),),
                    what="tokens/s and https://arxiv.org/abs/1/2 stay, as do models/ and a/b")
    studies.save(folder, study, replace(facts, hardware=hardware))
    text = "".join(path.read_text() for path in folder.iterdir())
    assert "someone" not in text
    assert "/opt" not in text
    assert "powertrain ablate data=all.txt" in text
    assert "tokens/s and https://arxiv.org/abs/1/2 stay, as do models/ and a/b" in text
    assert studies.load(folder).arms[0].words == ("data=all.txt",)


def test_a_study_says_where_and_with_what_it_was_made(facts: Facts) -> None:
    found = studies.describe(facts)
    assert found["machine"]["name"] == facts.hardware.name
    assert found["machine"]["cores"] == facts.hardware.cores
    assert "torch" in found["versions"]
    assert replace(a_study(), **found).commit == studies.commit()


def test_the_commit_is_that_of_this_checkout_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = studies.commit()
    assert found is None or len(found.rstrip("+")) == 12
    monkeypatch.setattr(studies, "PACKAGE", tmp_path)
    assert studies.commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    (tmp_path / "__init__.py").touch()
    assert studies.commit() is None, "that checkout is of something else, in which this was installed"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "b"], check=True)
    clean = studies.commit()
    (tmp_path / "__init__.py").write_text("changed")
    assert clean is not None
    assert studies.commit() == f"{clean}+"


@pytest.mark.parametrize("text", [None, "{", "{}", "[]", '{"arms": 3}'])
def test_what_is_no_study_is_said_to_be_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "evidence.json").write_text(text)
    with pytest.raises(WrongUse, match="no study"):
        studies.load(tmp_path)
