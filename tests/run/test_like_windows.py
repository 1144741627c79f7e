"""Without what Windows lacks, the package imports, and trains, evaluates and writes on the CPU. See like_windows.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from driver import TINY, WITHIN_S
from powertrain.machine import own_folder

LIKE_WINDOWS = Path(__file__).with_name("like_windows.py")
# a locale without any letter beyond ASCII stands in for one of Windows: each file must name its encoding
PLAIN_TEXT = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a process holds open is read from Linux's /proc")


def like_windows(folder: Path, *words: str) -> str:
    """What the commands print in a process of their own, in `folder`."""
    done = subprocess.run([sys.executable, str(LIKE_WINDOWS), *words], cwd=folder, text=True, capture_output=True, check=False,
                          env=os.environ | PLAIN_TEXT | {"POWERTRAIN_CACHE": str(folder / "cache"), "PATH": ""},
                          timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_imports_without_what_windows_lacks(tmp_path: Path) -> None:
    files = Path(sys.modules["powertrain"].__path__[0]).rglob("*.py")
    assert int(like_windows(tmp_path)) == sum(file.name != "__main__.py" for file in files) - 1


def test_a_run_trains_is_evaluated_and_writes_without_what_windows_lacks(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the sum of one and two is three \u2013 d\u00e9j\u00e0 vu.\n" * 30, encoding="utf-8")
    like_windows(tmp_path, "train", "data=text.txt", *TINY, "--output", "runs/one", "--", "evaluate", "runs/one", "--",
                 "generate", "runs/one", "--prompt", "the", "--tokens", "5")
    assert {"model", "events.jsonl", "checkpoints"} <= {path.name for path in (tmp_path / "runs" / "one").iterdir()}
    assert b"\r" not in (tmp_path / "runs" / "one" / "events.jsonl").read_bytes()


def test_a_folder_on_windows_has_no_owner_and_mode_777(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.delattr(os, "geteuid")
    assert own_folder(tmp_path / "code").is_dir()
