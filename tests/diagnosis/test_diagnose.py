"""A diagnosis as a whole: what becomes of pins that cannot be and of runs that cannot start, and how bad what is found is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from observations import GOOD, seen, tried

from powertrain.diagnosis import diagnose as diagnosing
from powertrain.diagnosis.diagnose import Diagnosis, check, prepare_for_diagnosis, severity_of
from powertrain.diagnosis.verdict import causes
from powertrain.recipe import resolve_words
from powertrain.records import NotApplied, RunFailed, WrongUse
from powertrain.records.findings import SEVERITIES
from powertrain.records.plan import PinRefused
from powertrain.run.prepare import Prepared

Make = Callable[..., Prepared]


def diagnosed(prepared: Prepared, monkeypatch: pytest.MonkeyPatch, error: Exception) -> Diagnosis:
    """Of a run whose probe raises that."""
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(diagnosing, "probe", fails)
    return diagnosing.diagnose([], prepared, {}, cache=Path("."), budget_s=1.0, say=lambda said: None)


@pytest.mark.parametrize(("error", "says"), [
    (RunFailed("the loss is not finite"), "the loss is not finite"), (WrongUse("too few steps"), "too few steps"),
    (NotApplied("bf16: it is off"), "bf16: it is off; pin the technique off to train without it"),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), "out of memory"),
    (MemoryError(), "out of memory (MemoryError)")])
def test_a_run_that_cannot_start_is_critical_and_has_its_checks(well_prepared: Make, monkeypatch: pytest.MonkeyPatch,
                                                                error: Exception, says: str) -> None:
    found = diagnosed(well_prepared(), monkeypatch, error)
    assert found.failed is not None
    assert found.failed.startswith(says)
    assert (found.severity, found.causes, found.forecast) == ("critical", (), None)
    assert found.findings


def test_a_fault_of_ours_is_not_called_the_runs(well_prepared: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        diagnosed(well_prepared(), monkeypatch, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_pins_that_cannot_be_are_taken_out_and_told(source: Path, cache: Path, tiny: list[str]) -> None:
    resolved = resolve_words([*tiny, "techniques.tf32=on"])
    prepared, refused = prepare_for_diagnosis(resolved, cache, lambda said: None)
    assert list(refused) == ["tf32"]
    assert isinstance(refused["tf32"], PinRefused)
    assert "tf32" not in prepared.recipe.techniques


def test_what_is_wrong_besides_pins_is_still_refused(cache: Path, tiny: list[str]) -> None:
    with pytest.raises(WrongUse, match="no_such_technique"):
        prepare_for_diagnosis(resolve_words([*tiny, "techniques.no_such_technique=on"]), cache, lambda said: None)


def test_the_worst_findings_come_first(situation: Callable[..., Any]) -> None:
    where = situation("warmup_steps=100", "lora.r=8")
    found = [SEVERITIES.index(finding.severity) for finding in check(where.prepared, where.machine, {})]
    assert found == sorted(found)
    assert found[0] == SEVERITIES.index("critical")


@pytest.mark.parametrize(("speed", "severity"), [(1.6, "critical"), (1.2, "moderate"), (1.05, "low"), (1.0, "low")])
def test_a_cause_is_as_bad_as_its_cure_is_good(speed: float, severity: str) -> None:
    compute = next(cause for cause in causes(seen(remedies=(tried("compute", "techniques.bf16=on", speed),)))
                   if cause.name == "compute")
    assert severity_of(compute) == severity


def test_a_diagnosis_is_as_bad_as_its_worst_part() -> None:
    assert Diagnosis({}, ()).severity == "good"
    assert Diagnosis({}, (), tuple(causes(GOOD))).severity == "low"
    slow = causes(seen(remedies=(tried("compute", "techniques.bf16=on", 2.0),)))
    assert Diagnosis({}, (), tuple(slow)).severity == "critical"
    assert Diagnosis({}, (), failed="out of memory").severity == "critical"
