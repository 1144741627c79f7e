"""The page of a study of `powertrain diagnose`: recipes crippled on purpose, what was named first, what the cures gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.report.chart import Axis, Level, Point, Row, Rows, Segment
from powertrain.report.comparisons import Study, compared, intervals, paired_windows
from powertrain.report.page import Figure, Missing, Number, Section, Table
from powertrain.report.study import Findings

Case = Mapping[str, Any]


def read(study: Study) -> Findings:
    cases, found = study["findings"]["cases"], compared(study)
    named = [case for case in cases if case.get("named") == case["planted"]]
    held = [case for case in cases if case["holds"]]
    verdict = (f"diagnose named the planted cause first in {len(named)} of {len(cases)} crippled recipes, and in {len(held)} "
               "of them the cure gave at least half of the gain that was predicted.")
    ratios = [case["ratio"] for case in cases if case.get("ratio") is not None]
    numbers = (Number(f"{len(named)} of {len(cases)}", "named first", "the cause that was planted"),
               Number(f"{len(held)} of {len(cases)}", "cures that keep their word", "at least half of the predicted gain"),
               *([Number(f"{min(ratios):.0%}", "least of a predicted gain", "measured over predicted gain, the worst case")]
                 if ratios else []))
    return Findings(verdict, "good" if len(held) == len(cases) else "bad", numbers, tuple(_cautions(cases)), (
        Section("Predicted and measured", (_gains(cases),)),
        Section("The cases", (_table(cases), _verdicts(cases))),
        Section("The comparisons behind it", (
            intervals(study, found, "comparisons", f"Speed of the {len(found)} cures that act on steps"),
            paired_windows(study, found)))))


def _cautions(cases: Sequence[Case]) -> list[str]:
    said = [f"{case['name']}: {case['failed']}" if case.get("failed") else
            f"{case['name']}: {case['named']} was named, and {case['planted']} was planted"
            for case in cases if case.get("named") != case["planted"]]
    by_runs = [case["name"] for case in cases if case.get("measured") is not None and case.get("by_runs")]
    if by_runs:
        said.append(f"Whole runs in turns measured {', '.join(by_runs)}: few of them, so their span is no 95% interval.")
    return said


def _gains(cases: Sequence[Case]) -> Figure | Missing:
    shown = [case for case in cases if case.get("measured") is not None]
    if not shown:
        return Missing("predicted and measured gains", "No cure was measured.")
    rows = []
    for case in shown:
        low, high = case.get("interval") or (None, None)
        tone, says = ("good", "holds") if case["holds"] else ("bad", "less than half")
        rows.append(Row(case["name"], (Segment(1.0, case["predicted"], "blue", "predicted", thin=True),),
                        (Point(case["measured"], "green" if case["holds"] else "red", low, high, "measured"),), says, tone))
    title = f"{sum(case['holds'] for case in shown)} of {len(shown)} cures give at least half of what was predicted"
    return Figure("gains", title, (Rows(Axis("times as fast with the cure", log=True), tuple(rows), (Level("no gain", 1.0),)),),
                  "Pale bar: from the crippled recipe to what the cure was predicted to give. Point: what it gave, with its "
                  "interval; where whole runs were measured, from the least to the most of them.", title,
                  (Table(("crippled by", "predicted (times as fast)", "measured (times as fast)", "from", "to",
                          "measured over predicted gain"),
                         tuple((case["name"], case["predicted"], case["measured"], *(case.get("interval") or (None, None)),
                                case.get("ratio")) for case in shown)),))


def _table(cases: Sequence[Case]) -> Table:
    return Table(("crippled by", "planted cause", "named first", "share of the time (%)", "bound (times as fast)", "cure",
                  "holds"),
                 tuple((case["name"], case["planted"], case.get("named") or "nothing",
                        None if case.get("share") is None else 100 * case["share"], case.get("bound"),
                        " ".join(case.get("cure") or ()), "yes" if case["holds"] else "no") for case in cases), "Every case")


def _verdicts(cases: Sequence[Case]) -> Table:
    rows = []
    for case in cases:
        seen = "; ".join(case.get("evidence") or [case.get("failed") or ""])
        others = ", ".join(f"{one['name']} {one['predicted']:.2f}" for one in case.get("others") or ())
        rows.append((case["name"], " ".join(case["words"]), seen, case.get("basis"), others))
    return Table(("crippled by", "recipe", "seen", "the prediction rests on", "named next"), tuple(rows), "What diagnose said")
