"""The pages of the benchmarks of whole runs: rows prepared per second, seconds to the first step, and crippled recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.report.chart import Axis, Level, Point, Row, Rows, Segment
from powertrain.report.comparisons import Findings, Study, compared, intervals, paired_windows
from powertrain.report.figures import duration, memory
from powertrain.report.page import Figure, Missing, Number, Section, Table

FLAT = 1.1                   # times the memory that fewer rows took: no more than this is flat
Case = Mapping[str, Any]
PART_COLOURS = ("blue", "orange", "green", "purple")


def prepare(study: Study) -> Findings:
    """Rows from a file to token ids on disk, against datasets.map."""
    found: Mapping[str, Any] = study["findings"]
    numbers = tuple(Number(f"{one['ratio']['median']:.2f} times", f"as fast with rows of {kind}",
                           f"{one['ratio']['low']:.2f} to {one['ratio']['high']:.2f}, {one['rows_per_s']:,.0f} rows/s")
                    for kind, one in found.items())
    slowest = min(one["ratio"]["low"] for one in found.values())
    ratios = _listed([f"{one['ratio']['median']:.2f}" for one in found.values()])
    kinds = _listed(list(found))
    verdict = f"Rows of {kinds} are prepared {ratios} times as fast as by datasets.map, to the same trained tokens."
    growing = [f"With rows of {kind}, memory grew from {memory(one['resident_bytes_of_fewer'])} to "
               f"{memory(one['resident_bytes'])} with the number of rows." for kind, one in found.items()
               if one["resident_bytes"] > FLAT * one["resident_bytes_of_fewer"]]
    return Findings(verdict, "good" if slowest > 1 else "bad", numbers, tuple(growing), (
        Section("Against datasets.map", (_ratios(found, verdict), _each_side(found))),
        Section("Memory", (_memory(found),))))


def _ratios(found: Mapping[str, Any], title: str) -> Figure:
    rows = tuple(Row(kind, (), (_point(one["ratio"], "blue", "from the file on", "circle"),
                                _point(one["ratio_to_map_alone"], "grey", "less the peer's loading of the file", "ring")),
                     f"{one['ratio']['median']:.2f}") for kind, one in found.items())
    table = Table(("rows of", "times as fast", "low", "high", "against map alone"), tuple(
        (kind, one["ratio"]["median"], one["ratio"]["low"], one["ratio"]["high"], one["ratio_to_map_alone"]["median"])
        for kind, one in found.items()))
    return Figure("prepare", title, (Rows(Axis("times as fast as datasets.map", low=0.0), rows, (Level("equal", 1.0),)),),
                  "Medians of the ratios of runs by turns, with their 95% intervals. Each run is a fresh process with empty "
                  "caches; what it imports is not timed.", title, (table,))


def _point(found: Mapping[str, float], colour: str, label: str, shape: str) -> Point:
    return Point(found["median"], colour, found["low"], found["high"], label, shape)


def _each_side(found: Mapping[str, Any]) -> Table:
    return Table(("rows of", "rows", "rows/s", "processes", "datasets.map, rows/s", "its processes", "trained tokens"), tuple(
        (kind, one["rows"], one["rows_per_s"], one.get("processes", 1), one["peer_rows_per_s"], one["peer_processes"],
         one["trained_tokens"]) for kind, one in found.items()), "What each side does in a second")


def _memory(found: Mapping[str, Any]) -> Table:
    return Table(("rows of", "most resident (MiB)", "with fewer rows (MiB)", "datasets.map (MiB)"), tuple(
        (kind, *(one[name] / 2**20 for name in ("resident_bytes", "resident_bytes_of_fewer", "peer_resident_bytes")))
        for kind, one in found.items()), "Memory at its most, of all processes of ours and of the peer's largest")


# ------------------------------------------------------------------------------------------------ the first step


def start(study: Study) -> Findings:
    """Seconds from the command to the first step, with warm caches and with empty ones."""
    findings = study["findings"]
    seconds: Mapping[str, Mapping[str, float]] = findings["to_first_step"]
    ours = {kind: found for kind, found in seconds.items() if kind != "peer"}
    after = _listed([f"{duration(found['median'])} ({kind})" for kind, found in ours.items()])
    theirs = f"; the peer's after {duration(seconds['peer']['median'])}" if "peer" in seconds else ""
    verdict = f"The first step is done {after} after the command{theirs}."
    numbers = tuple(Number(duration(found["median"]), f"to the first step, {kind}",
                           f"{duration(found['low'])} to {duration(found['high'])}") for kind, found in seconds.items())
    return Findings(verdict, "open", numbers, (), (
        Section("Where the time goes", (_stages(findings["medians"], seconds, verdict),)),
        Section("Every run", (_runs(findings),))))


def _stages(medians: Mapping[str, Mapping[str, float]], seconds: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    rows = [Row(kind, _between(stamps), (_whole(seconds[kind]),), duration(seconds[kind]["median"]))
            for kind, stamps in medians.items()]
    rows += [Row(kind, (), (_whole(found),), duration(found["median"]))
             for kind, found in seconds.items() if kind not in medians]
    stages = list(dict.fromkeys(name for stamps in medians.values() for name in stamps))
    table = Table(("caches", *(f"{name} (s)" for name in stages)),
                  tuple((kind, *(stamps.get(name) for name in stages)) for kind, stamps in medians.items()))
    return Figure("start", title, (Rows(Axis("seconds after the command", low=0.0), tuple(rows)),),
                  "Bars: medians of when each stage was over. Point: the end of the first step, with its 95% interval.", title,
                  (table,))


def _between(stamps: Mapping[str, float]) -> tuple[Segment, ...]:
    ends = list(stamps.values())
    return tuple(Segment(before, end, PART_COLOURS[number % len(PART_COLOURS)], name)
                 for number, (name, before, end) in enumerate(zip(stamps, [0.0, *ends], ends, strict=False)))


def _whole(found: Mapping[str, float]) -> Point:
    return _point(found, "ink", "first step done", "circle")


def _runs(findings: Mapping[str, Any]) -> Table:
    runs = [(kind, run) for kind, some in findings["runs"].items() for run in some]
    runs += [("peer", run) for run in findings.get("peer_runs") or []]
    names = list(dict.fromkeys(name for _, run in runs for name in run))
    return Table(("caches", *(f"{name} (s)" for name in names)),
                 tuple((kind, *(run.get(name) for name in names)) for kind, run in runs), "Seconds after the command")


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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
    return Findings(verdict, "good" if len(held) == len(cases) else "bad", numbers, tuple(_case_cautions(cases)), (
        Section("Predicted and measured", (_gains(cases),)),
        Section("The cases", (_case_table(cases), _case_answers(cases))),
        Section("The comparisons behind it", (
            intervals(study, found, "comparisons", f"Speed of the {len(found)} cures that act on steps"),
            paired_windows(study, found)))))


def _case_cautions(cases: Sequence[Case]) -> list[str]:
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


def _case_table(cases: Sequence[Case]) -> Table:
    return Table(("crippled by", "planted cause", "named first", "share of the time (%)", "bound (times as fast)", "cure",
                  "holds"),
                 tuple((case["name"], case["planted"], case.get("named") or "nothing",
                        None if case.get("share") is None else 100 * case["share"], case.get("bound"),
                        " ".join(case.get("cure") or ()), "yes" if case["holds"] else "no") for case in cases), "Every case")


def _case_answers(cases: Sequence[Case]) -> Table:
    rows = []
    for case in cases:
        seen = "; ".join(case.get("evidence") or [case.get("failed") or ""])
        others = ", ".join(f"{one['name']} {one['predicted']:.2f}" for one in case.get("others") or ())
        rows.append((case["name"], " ".join(case["words"]), seen, case.get("basis"), others))
    return Table(("crippled by", "recipe", "seen", "the prediction rests on", "named next"), tuple(rows), "What diagnose said")
