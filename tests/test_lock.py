"""The lock file, and what is said of it without a network."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "benchmarks" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lock"] = module
    spec.loader.exec_module(module)
    return module


def test_every_package_of_the_lock_has_a_version_and_a_sum_and_is_what_the_constraints_choose(lock: Any) -> None:
    found = lock.locked(lock.LOCK.read_text())
    assert len(found) > 50
    assert lock.not_chosen(found) == []
    assert lock.not_chosen({name: version for name, version in found.items() if name != "jinja2"})


@pytest.mark.parametrize("line", ["jinja2", "jinja2==3.1.6", "jinja2>=3 --hash=sha256:" + "0" * 64, "--extra-index-url x",
                                  "jinja2==3.1.6 --hash=md5:0"])
def test_a_package_without_version_and_sum_is_no_lock(lock: Any, line: str) -> None:
    with pytest.raises(SystemExit, match="without a version and a sum"):
        lock.locked(line)


def test_an_environment_that_differs_from_the_lock_is_told(lock: Any) -> None:
    locked = {"a": "1", "b": "2", "c": "3"}
    assert lock.wrong_with(locked, locked | {"pip": "9"}, dict.fromkeys(locked, "MIT")) == []
    assert lock.wrong_with(locked, {"a": "1", "b": "9", "x": "4"}, {"b": "MIT"}) == [
        "c 3 is locked and not installed", "b is 9, and 2 is locked", "x 4 is installed and not locked", "a names no licence"]


def test_a_package_that_nobody_looked_up_is_not_called_safe(lock: Any, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    """pip-audit passes over what it cannot look up, and says that there is no vulnerability."""
    report = tmp_path / "found.json"
    skipped = {"name": "torch", "skip_reason": "not found"}
    bad = {"name": "x", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
    for found, code, says in ((None, 0, "could not be reached"), ([skipped], 0, "none was looked up"),
                              ([skipped, {"name": "y", "version": "1", "vulns": []}], 0, "not looked up: torch"),
                              ([skipped, bad], 1, "x 1: CVE-1, mended in 2")):
        if found is not None:
            report.write_text(json.dumps({"dependencies": found}))
        assert lock.audit(report) == code
        assert says in capsys.readouterr().out
