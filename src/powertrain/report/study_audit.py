"""The page of a study of the audit: what it found in public files, against what a reader expected."""

from collections.abc import Mapping
from typing import Any

from powertrain.report.chart import Row, Segment
from powertrain.report.page import Findings, Number, Section, Table
from powertrain.report.study import Study, chart

HELD_OUT = "held-out"
COLUMNS = ("files", "severity", "expected", "found", "findings", "right")
ENOUGH = {"critical": 0.95, "moderate": 0.9}             # of the findings of a severity, that are right
RECALL = 0.6                                             # of the expected defects that crash or mistrain, that are found


def audit(study: Study) -> Findings:
    halves: Mapping[str, Any] = study["findings"]["halves"]
    own = halves[HELD_OUT]
    recall = _share(own["critical"], "expected_found", "expected")
    right = {severity: _share(own[severity], "right", "findings") for severity in ENOUGH}
    holds = recall >= RECALL and all(right[severity] >= enough for severity, enough in ENOUGH.items())
    numbers = (Number(f"{recall:.0%}", "of what crashes or mistrains is found", f"in {own['files']} held-out files"),
               *(Number(f"{right[severity]:.0%}", f"of the {severity} findings are right", "each read and judged")
                 for severity in ENOUGH))
    rows = tuple((f"{half}: {counts['files']}", severity, *(str(counts[severity][name]) for name in (
        "expected", "expected_found", "findings", "right"))) for half, counts in halves.items() for severity in ENOUGH)
    bars = [Row(f"{half}: {severity} {what}", (Segment(0.0, share, "ink"),), says=f"{share:.0%}")
            for half, counts in halves.items() for severity in ENOUGH for what, share in (
                ("defects found", _share(counts[severity], "expected_found", "expected")),
                ("findings right", _share(counts[severity], "right", "findings")))]
    cautions = ("One reader wrote the expectations of both halves before any audit, made the rules on the development half, "
                "and judged the findings.",)
    verdict = f"In files that no rule was made for, the audit finds {recall:.0%} of what crashes or mistrains."
    return Findings(verdict, "good" if holds else "open", numbers, cautions,
                    (Section("Both halves of the files", (
                        chart("shares", "Found and right", bars, Table(COLUMNS, rows, "counts")),)),))


def _share(counts: Mapping[str, int], part: str, whole: str) -> float:
    return counts[part] / counts[whole] if counts[whole] else 1.0
