"""What became of a run: the symptoms that its events show, the worst first, and what it was bound by."""

from __future__ import annotations

from collections.abc import Iterable

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms import SYMPTOMS
from powertrain.records.findings import SEVERITIES, Finding


def symptoms_of(run: RunRecord) -> list[Finding]:
    """The worst first; of two with one cause, the one that explains the other."""
    found = {symptom: list(symptom.find(run)) for symptom in SYMPTOMS}
    there = {symptom.name for symptom, findings in found.items() if findings}
    return by_severity(finding for symptom, findings in found.items() if not symptom.gives_way_to & there
                       for finding in findings)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
