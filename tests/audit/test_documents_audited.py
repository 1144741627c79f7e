"""The five documents' own snippets and configs give the findings that were written down by hand; tuned files give none."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_subjects import UNKNOWN, cpu, examples, gpu, here, model
from document_cases import EXPECTED, Expected
from test_setting_rules import assert_each_cause_once

from powertrain.audit.audit import audit
from powertrain.audit.subject import Circumstances

DOCUMENTS, CLEAN = Path(__file__).parent / "documents", Path(__file__).parent / "clean"
PLACES = {"not known": UNKNOWN, "an H100": here(gpu()), "a CPU with bf16": here(cpu(8)),
          "an H100, with data": here(gpu(), examples(), model(layers=28, width=2048))}


@pytest.mark.parametrize("expected", EXPECTED, ids=[f"{case.file} on {case.where.hardware.name}" for case in EXPECTED
                                                    if case.where.hardware])
def test_a_document_gives_the_findings_that_one_expects(expected: Expected) -> None:
    found = audit(DOCUMENTS / expected.file, expected.where).findings
    assert {finding.rule: finding.severity for finding in found if finding.severity != "good"} == expected.found
    assert {finding.rule for finding in found if finding.severity == "good"} == expected.good
    assert_each_cause_once(found)


def test_every_document_is_a_case() -> None:
    assert {case.file for case in EXPECTED} == {path.name for path in DOCUMENTS.iterdir() if path.is_file()}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("file", sorted(path.name for path in CLEAN.iterdir() if path.is_file()))
def test_a_tuned_file_has_no_critical_or_moderate_finding(file: str, where: str) -> None:
    if where == "a CPU with bf16" and file in ("tuned_trl.py", "tuned_trainer.py"):
        pytest.skip("Trainer refuses bf16 without a GPU unless use_cpu is set, which is said")
    found = audit(CLEAN / file, PLACES[where]).findings
    assert [(finding.rule, finding.why) for finding in found if finding.severity in ("critical", "moderate")] == []


def test_a_script_for_a_gpu_is_told_that_it_will_not_start_on_a_cpu() -> None:
    found = audit(CLEAN / "tuned_trl.py", PLACES["a CPU with bf16"]).findings
    assert [finding.rule for finding in found if finding.severity in ("critical", "moderate")] == ["bf16_without_hardware"]


def test_what_is_done_well_is_said() -> None:
    found = audit(CLEAN / "tuned_trl.py", Circumstances(gpu())).findings
    assert {"good_precision", "good_packing", "good_batch"} <= {finding.rule for finding in found}
