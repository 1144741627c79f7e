"""The pages of the benchmarks of whole runs: rows prepared per second, seconds to the first step, and crippled recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from powertrain.report.chart import Row, Segment
from powertrain.report.figures import duration, memory
from powertrain.report.page import Figure, Missing, Number, Section, Table, listed
from powertrain.report.study import Findings, Study, behind, chart, compared, interval_point, table

FLAT = 1.1                   # times the memory that fewer rows took: no more than this is flat
Case = Mapping[str, Any]
STAGE_COLOURS = ("blue", "orange", "green", "purple")


def prepare(study: Study) -> Findings:
    """Rows from a file to token ids on disk, against datasets.map."""
    found = [{"kind": kind, **one} for kind, one in study["findings"].items()]
    numbers = tuple(Number(f"{one['ratio']['median']:.2f} times", f"as fast with rows of {one['kind']}",
                           f"{one['ratio']['low']:.2f} to {one['ratio']['high']:.2f}, {one['rows_per_s']:,.0f} rows/s")
                    for one in found)
    ratios = listed([f"{one['ratio']['median']:.2f}" for one in found])
    kinds = listed([one["kind"] for one in found])
    verdict = f"Rows of {kinds} are prepared {ratios} times as fast as by datasets.map, to the same trained tokens."
    growing = tuple(f"With rows of {one['kind']}, memory grew from {memory(one['resident_bytes_of_fewer'])} to "
                    f"{memory(one['resident_bytes'])} with the number of rows." for one in found
                    if one["resident_bytes"] > FLAT * one["resident_bytes_of_fewer"])
    rows = [Row(one["kind"], (), (*interval_point(one["ratio"], "blue", "from the file on"),
                                  *interval_point(one["ratio_to_map_alone"], "grey", "less the peer's loading of the file",
                                                  "ring")), f"{one['ratio']['median']:.2f}") for one in found]
    tone = "good" if min(one["ratio"]["low"] for one in found) > 1 else "bad"
    return Findings(verdict, tone, numbers, growing, (
        Section("Against datasets.map", (chart("prepare", verdict, rows, table("prepare", found)), table("each side", found))),
        Section("Memory", (table("prepared memory", found),))))


def start(study: Study) -> Findings:
    """Seconds from the command to the first step, with warm caches and with empty ones."""
    findings = study["findings"]
    seconds: Mapping[str, Mapping[str, float]] = findings["to_first_step"]
    after = listed([f"{duration(found['median'])} ({kind})" for kind, found in seconds.items() if kind != "peer"])
    theirs = f"; the peer's after {duration(seconds['peer']['median'])}" if "peer" in seconds else ""
    verdict = f"The first step is done {after} after the command{theirs}."
    numbers = tuple(Number(duration(found["median"]), f"to the first step, {kind}",
                           f"{duration(found['low'])} to {duration(found['high'])}") for kind, found in seconds.items())
    medians: Mapping[str, Mapping[str, float]] = findings["medians"]
    rows = [Row(kind, _between(medians.get(kind, {})), interval_point(seconds[kind], "ink", "first step done"),
                duration(seconds[kind]["median"])) for kind in dict.fromkeys((*medians, *seconds))]
    runs = [(kind, run) for kind, some in (*findings["runs"].items(), ("peer", findings.get("peer_runs") or []))
            for run in some]
    return Findings(verdict, "open", numbers, (), (
        Section("Where the time goes", (chart("start", verdict, rows, _stamps(list(medians.items()))),)),
        Section("Every run", (_stamps(runs, "Seconds after the command"),))))


def _between(stamps: Mapping[str, float]) -> tuple[Segment, ...]:
    return tuple(Segment(before, end, STAGE_COLOURS[number % len(STAGE_COLOURS)], name)
                 for number, (name, (before, end)) in enumerate(zip(stamps, pairwise((0.0, *stamps.values())), strict=True)))


def _stamps(found: Sequence[tuple[str, Mapping[str, float]]], title: str = "") -> Table:
    """Return when each stage was over, one row for each of `found`."""
    stages = list(dict.fromkeys(name for _, stamps in found for name in stamps))
    return Table(("caches", *(f"{name} (s)" for name in stages)),
                 tuple((kind, *(stamps.get(name) for name in stages)) for kind, stamps in found), title)


# ------------------------------------------------------------------------------------------------ crippled recipes


def diagnosis(study: Study) -> Findings:
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
        Section("The cases", (table("cases", cases), table("answers", cases))),
        behind(study, found, f"Speed of the {len(found)} cures that act on steps")))


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
        colour, tone, says = ("green", "good", "holds") if case["holds"] else ("red", "bad", "less than half")
        rows.append(Row(case["name"], (Segment(1.0, case["predicted"], "blue", "predicted", thin=True),),
                        interval_point({"median": case["measured"], "low": low, "high": high}, colour, "measured"), says, tone))
    title = f"{sum(case['holds'] for case in shown)} of {len(shown)} cures give at least half of what was predicted"
    return chart("gains", title, rows, table("gains", shown))
