"""`powertrain train --quiet` still says that a GPU stands idle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from powertrain.cli.training import train
from powertrain.facts.hardware import read_hardware
from powertrain.records import IdleGpu
from powertrain.run import prepare


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_quiet_run_says_that_a_gpu_stands_idle_and_nothing_else(
        dry_run: bool, tiny: list[str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    idle = IdleGpu("NVIDIA L4", "old_driver", "the driver 550 of NVIDIA L4 is too old for this torch", "install a newer driver")
    monkeypatch.setenv("POWERTRAIN_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "read_hardware", lambda cache: replace(read_hardware(cache), idle_gpu=idle))
    assert train([*tiny, "max_steps=2"], quiet=True, dry_run=dry_run) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("...")]
    assert said == [f"... the run will use the CPU: {idle.because}; {idle.cure}"]
