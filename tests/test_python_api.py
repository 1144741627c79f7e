"""The Python API: what docs/python.md shows runs as it stands there, and errors are exceptions."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import powertrain
from driver import TINY
from powertrain.records.errors import LossNotFinite, RunFailed, WrongUse, told_elsewhere

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
VALUES: dict[str, Any] = {key: ast.literal_eval(value) if re.fullmatch(r"[\d.e-]+", value) else value
                          for key, _, value in (word.partition("=") for word in TINY)}


@pytest.fixture
def values(text: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run that takes a second, in this test's folder."""
    monkeypatch.setenv("POWERTRAIN_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return {"data": text, **VALUES}


def test_the_page_runs_as_it_stands(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)).replace('"data.block": 64', (
        '"data.block": 16, "data.max_chars": 4000, "model.layers": 1, "model.width": 32, "model.heads": 2, '
        '"train_batch_size": 4, "sample.tokens": 2, "techniques": {"threads": "off"}'))
    done = subprocess.run([sys.executable, "-c", code + "\nassert len(losses) == 20"], cwd=tmp_path, capture_output=True,
                          text=True, check=False, env={**os.environ, "POWERTRAIN_CACHE": str(cache)})
    assert done.returncode == 0, done.stderr
    assert "wrong_use" in done.stdout


def test_importing_it_loads_no_torch_and_hardly_anything() -> None:
    code = "import sys, powertrain; powertrain.Run; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_names_every_name_and_every_name_is_there() -> None:
    assert all(hasattr(powertrain, name) for name in powertrain.__all__)
    assert all(f"| `{name}" in PAGE for name in ("train(", "plan(", "Run(", "open_model(", "events`", "UserError`"))
    assert {name for name in re.findall(r"powertrain\.(\w+)\b", PAGE) if name != "records"} <= set(powertrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        powertrain.trian  # noqa: B018


def test_a_run_is_trained_listened_to_and_opened(values: dict[str, Any]) -> None:
    heard: list[powertrain.events.Event] = []
    run = powertrain.train(values, output="run", on_event=heard.append)
    assert (run.state, run.path, run.recipe["train_batch_size"]) == ("finished", Path("run").resolve(), 14)
    steps = [event for event in run.events() if isinstance(event, powertrain.events.Step)]
    assert [event for event in heard if isinstance(event, powertrain.events.Step)] == steps
    assert len(steps) == 11
    assert run.model is not None
    assert "steps" in run.plan
    model = powertrain.open_model(run)
    assert model.generate("line", tokens=5, seed=1) == model.generate("line", tokens=5, seed=1)
    assert powertrain.Run("run") == run


def test_a_plan_says_what_would_happen(values: dict[str, Any]) -> None:
    planned = powertrain.plan(values, {"techniques": {"packing": "off"}})
    assert planned.fits
    assert planned.total_steps == 11
    assert "micro_batch" in planned.on
    assert "packing" in planned.off
    assert planned.recipe["train_batch_size"] == 14


def test_an_interrupt_stops_and_saves_and_the_run_goes_on(values: dict[str, Any]) -> None:
    def interrupt(event: powertrain.events.Event) -> None:
        if isinstance(event, powertrain.events.Step) and event.step == 2:
            signal.raise_signal(signal.SIGINT)           # as a notebook's stop button, within the caller's own code

    run = powertrain.train({**values, "max_steps": 2000, "logging_steps": 1}, output="run", on_event=interrupt)
    assert run.state == "stopped (SIGINT)"
    assert 2 <= run.events()[-1].step < 2000
    assert run.resume({"eval_steps": 0, "save_steps": 0}).state == "finished"


@pytest.mark.parametrize(("changed", "error", "says"), [
    ({"learning_rate": -1}, WrongUse, "learning_rate"), ({"learning_rat": 1}, WrongUse, "did you mean learning_rate"),
    ({"data": object()}, WrongUse, "a value of a recipe is text"), ({"data": "no-such-file"}, WrongUse, "no-such-file"),
    ({"learning_rate": 1e30, "max_grad_norm": 0}, RunFailed, "not finite"),
])
def test_an_error_is_an_exception_with_its_sentence(values: dict[str, Any], changed: dict[str, Any],
                                                    error: type[powertrain.UserError], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)) as raised:
        powertrain.train({**values, **changed}, output="run")
    assert isinstance(raised.value, powertrain.UserError)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="holds no run"):
        powertrain.Run(tmp_path)


def test_an_error_of_another_process_keeps_its_kind_and_fields() -> None:
    before = LossNotFinite(3, float("nan"), examples=(4, 5))
    after = told_elsewhere({"event": "error", "message": str(before), "exit_code": 1, **before.fields()})
    assert (type(after), str(after), after.fields()) == (LossNotFinite, str(before), before.fields())
    assert type(told_elsewhere({"message": "x", "exit_code": 2, "kind": "not_supported"})) is WrongUse
