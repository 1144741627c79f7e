"""The pages of the other kinds of study: tuning, comparison, bench, and predictions of speed and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from powertrain.records.timeline import quantile
from powertrain.report.chart import Axis, Level, Point, Row, Rows, Segment
from powertrain.report.comparisons import (
    Findings,
    Study,
    compared,
    counted,
    intervals,
    loss_difference,
    noise_band,
    noise_words,
    paired_windows,
    speed_words,
)
from powertrain.report.figures import duration, memory
from powertrain.report.figures_machine import COMPONENT_COLOURS
from powertrain.report.page import Block, Cell, Figure, Missing, Number, Section, Table, Text

LATE = "not reached within the budget"       # of candidates in studies from before `reached` was stored
ORDER = ("faster", "no effect", "inconclusive", "harmful", "invalid")


def tuning(study: Study) -> Findings:
    findings, found = study["findings"], compared(study)
    total = None if findings.get("total") is None else found[findings["total"]]
    candidates, chosen = findings["candidates"], findings["chosen"]
    tried = [candidate for candidate in candidates if candidate["rounds"]]
    speed = total.comparison["speed"] if total is not None and chosen else None
    verdict = (f"The tuned plan ({_pins(chosen)}) is {speed_words(speed)} as the untuned one." if speed else
               f"The untuned plan stays: none of the {len(tried)} plans that were tried was shown to be faster.")
    numbers = [Number(f"x {speed['median']:.3g}", "tuned over untuned",
                      f"95% interval {speed['low']:.3g} to {speed['high']:.3g}, on fresh windows")] if speed else \
        [Number("x 1", "tuned over untuned", "the untuned plan stays")]
    numbers.append(Number(f"{len(tried)} of {len(candidates)}", "plans were measured", "the others were not tried, or not run"))
    if study.get("noise_floor") is not None:
        numbers.append(Number(f"{study['noise_floor']:.1%}", "noise floor", "how far two equal plans lie apart here"))
    cautions = ["The best of many noisy numbers is partly luck; that is why the chosen plan was compared once more, on fresh "
                "windows, and only that comparison counts."] if tried else []
    late = [candidate["name"] for candidate in candidates if not candidate.get("reached", candidate["why"] != LATE)]
    cautions += [f"Not reached within the budget: {', '.join(late)}."] if late else []
    return Findings(verdict, "good" if speed else "open", tuple(numbers), tuple(cautions), (
        Section("The candidates", (_candidates(study, candidates), _candidate_table(candidates))),
        Section("The comparisons behind it", (intervals(study, found, "comparisons", f"All {len(found)} comparisons"),
                                              paired_windows(study, found),
                                              loss_difference([total] if total is not None else [])))))


def _pins(pins: Mapping[str, Any]) -> str:
    said = []
    for name, pin in pins.items():
        values = f" ({', '.join(f'{key}={value}' for key, value in pin.items())})" if isinstance(pin, Mapping) and pin else ""
        said.append(f"{name} off" if pin == "off" else f"{name}{values}")
    return ", ".join(said) or "nothing changed"


def _candidates(study: Study, candidates: Sequence[Mapping[str, Any]]) -> Figure | Missing:
    tried = [candidate for candidate in candidates if candidate["rounds"]]
    if not tried:
        return Missing("candidates by round", "No candidate was measured.")
    rows = []
    for candidate in sorted(tried, key=lambda one: (len(one["rounds"]), one["rounds"][-1]["median"]), reverse=True):
        *early, last = candidate["rounds"]
        colour = "green" if candidate["kept"] else "blue"
        points = tuple(Point(one["median"], "grey", label="earlier rounds", shape="ring") for one in early)
        rounds = f"{len(candidate['rounds'])} round{'s' if len(candidate['rounds']) > 1 else ''}"
        rows.append(Row(candidate["name"], (), (*points, Point(last["median"], colour, last["low"], last["high"],
                        "last round, chosen" if candidate["kept"] else "last round")),
                        f"chosen, {rounds}" if candidate["kept"] else rounds, "good" if candidate["kept"] else "quiet"))
    kept = [candidate["name"] for candidate in candidates if candidate["kept"]]
    title = f"Chosen: {', '.join(kept)}" if kept else "No change of one technique was worth keeping"
    return Figure("candidates", title, (Rows(Axis("times as fast as the untuned plan", log=True), tuple(rows),
                                             (Level("the untuned plan", 1.0),), noise_band(study)),),
                  "Each candidate is the untuned plan with one technique changed. After a round the slower half is dropped and "
                  f"the others are measured with more pairs (successive halving). Whisker: 95% interval. {noise_words(study)}",
                  title, (Table(("candidate", "round", "times as fast", "from", "to", "chosen"),
                                tuple((candidate["name"], number + 1, one["median"], one["low"], one["high"],
                                       "yes" if candidate["kept"] else "no")
                                      for candidate in tried for number, one in enumerate(candidate["rounds"]))),))


def _candidate_table(candidates: Sequence[Mapping[str, Any]]) -> Table:
    return Table(("candidate", "change", "rounds", "kept", "why", "slower start (s)", "break-even (steps)"),
                 tuple((candidate["name"], _pins(candidate["pins"]), len(candidate["rounds"]),
                        "yes" if candidate["kept"] else "no", candidate["why"], candidate.get("compile_s"),
                        candidate.get("break_even_steps"))
                       for candidate in candidates), "Every candidate")


def comparison(study: Study) -> Findings:
    found = compared(study)
    verdicts = [one.comparison["verdict"] for one in found]
    first = found[0].comparison if found else None
    verdict = (f"{first['b']} is {speed_words(first['speed'])} as {first['a']}: {first['verdict']}."
               if first and len(found) == 1 else f"Of {len(found)} comparisons {counted(verdicts, ORDER)}.")
    numbers = tuple(Number(f"x {one.comparison['speed']['median']:.3g}", one.name,
                           f"95% interval {one.comparison['speed']['low']:.3g} to {one.comparison['speed']['high']:.3g}, "
                           f"{one.comparison['pairs']} pairs") for one in found[:3] if one.comparison["speed"])
    return Findings(verdict, "bad" if "harmful" in verdicts or "invalid" in verdicts else "good", numbers, (), (
        Section("Speed", (intervals(study, found, "comparisons", verdict.rstrip(".")), paired_windows(study, found))),
        Section("The same losses", (loss_difference(found),))))


def peers(study: Study) -> Findings:
    """Ours against other trainers, and where the time of our step goes."""
    findings, plain = study["findings"], comparison(study)
    step_s = sum(findings["profile"].values())
    parts = sorted(findings["profile"].items(), key=lambda part: -part[1])
    share = Number(f"{findings['products_share']:.0%}", "of the measured GEMM limit", "exact FLOPs of our arm, per second")
    apart = Table(("peer", "steps", "first step", "mean", "mean of the distances", "largest"), tuple(
        (one["peer"], one["steps"], one["first"], one["mean"], one["mean_absolute"], one["largest"])
        for one in findings["losses"]), "Our loss less the peer's, step by step")
    under = findings.get("conditions") or ()
    columns = ("peer", "tokens/s alone", "tokens/s beside ours", "slower beside ours", "used by others", "not clean")
    alone: Block = Table(columns, tuple(
        (one["peer"], one["alone_tokens_per_s"], one["beside_tokens_per_s"], f"{one['slower']:.1%}",
         f"{one['others_share']:.1%}", "; ".join(one["unclean"])) for one in under),
        "Every peer alone, over the same steps") if under else \
        Missing("the peers alone", "The peers were not measured alone, so nothing shows that they were undisturbed.")
    unclean = tuple(f"Not clean: {why}." for one in under for why in one["unclean"]) if under else \
        ("The peers were not measured alone, so the ratios may be too large.",)
    return replace(plain, numbers=(*plain.numbers, share), cautions=(*unclean, *plain.cautions), sections=(
        *plain.sections, Section("Conditions", (alone,)), Section("How far apart", (apart,)),
        Section("Where our step's time goes", (Table(
            ("class of work", "ms", "share"),
            tuple((name, 1e3 * seconds, f"{seconds / step_s:.0%}") for name, seconds in parts)),))))


def bench(study: Study) -> Findings:
    findings, found = study["findings"], compared(study)
    assertions = findings["assertions"]
    broken = [assertion for assertion in assertions if not assertion["holds"]]
    verdict = (f"All {len(assertions)} assertions hold." if not broken else
               f"{len(broken)} of {len(assertions)} assertions do not hold: {broken[0]['what']}.")
    tables = [Table(tuple(map(str, table["columns"])), tuple(tuple(row) for row in table["rows"]), name)
              for name, table in findings["tables"].items()]
    cautions = [f"{assertion['what']} does not hold: {assertion['because']}." for assertion in broken]
    cautions += [f"{note}." for note in findings.get("notes") or []]
    cautions += [f"Not reached within the budget: {', '.join(map(str, findings['not_reached']))}."] \
        if findings.get("not_reached") else []
    blocks: list[Block] = [block for table in tables for block in (_bench_chart(table), table) if block is not None]
    return Findings(verdict, "bad" if broken else "good", (
        Number(f"{len(assertions) - len(broken)} of {len(assertions)}", "assertions hold", "of memory and losses"),
        Number(str(len(tables)), "tables", ", ".join(table.title for table in tables))), tuple(cautions), (
        Section("Assertions", (Table(("assertion", "", "numbers"), tuple(
            (assertion["what"], "holds" if assertion["holds"] else "does not hold", assertion["because"])
            for assertion in assertions)),)),
        Section("Tables", tuple(blocks)),
        Section("The comparisons behind it", (
            intervals(study, found, "comparisons", f"Speed of the {len(found)} comparisons"), paired_windows(study, found)))))


def _bench_chart(table: Table) -> Figure | None:
    """Measured memory beside its prediction, where a table has both."""
    wanted = ("peak MiB", "predicted MiB")
    if not all(column in table.columns for column in wanted):
        return None
    at, expected = (table.columns.index(column) for column in wanted)
    rows = [row for row in table.rows if isinstance(row[at], (int, float))]
    if not rows:
        return None
    shown = tuple(Row(f"{table.columns[0]} {row[0]}", (Segment(0.0, float(row[at] or 0), "blue", "measured"),),
                      (Point(_number(row[expected]), "red", label="predicted", shape="bar"),)) for row in rows)
    worst = max((abs(float(row[expected] or 0) / float(row[at] or 1) - 1) for row in rows if row[expected] is not None),
                default=None)
    title = f"Peak memory by {table.columns[0]}" + (f": predicted within {worst:.1%}" if worst is not None else "")
    return Figure(f"bench-{table.title.replace(' ', '-')}", title, (Rows(Axis("MiB allocated at the peak", low=0.0), shown),),
                  "Bar: the allocated peak of one step after the first, by a ledger of real allocations. Stroke: what the "
                  "formula says beforehand.", title,
                  (Table((table.columns[0], *wanted), tuple((row[0], row[at], row[expected]) for row in rows)),))


def _number(cell: Cell) -> float | None:
    return float(cell) if isinstance(cell, (int, float)) else None


def speed(study: Study) -> Findings:
    """Expected and measured seconds of a step."""
    rows = study["findings"]["rows"]
    inside = [row for row in rows if row["expected_s"][0] <= row["measured_s"]["median"] <= row["expected_s"][1]]
    drawn = tuple(_speed_row(row, is_inside=row in inside) for row in rows)
    title = f"{len(inside)} of {len(rows)} measured step times lie inside what was expected"
    figure: Block = Figure(
        "speed", title, (Rows(Axis("seconds of a step", log=True), drawn),),
        "Pale bar: the interval expected before the run. Point: the measured median with its 95% interval. Stroke: what "
        "compute or memory traffic alone takes at the measured peaks.", title,
        (Table(("recipe", "expected from (s)", "to (s)", "measured (s)", "low", "high", "floor (s)"),
               tuple((" ".join(map(str, row["recipe"])), *row["expected_s"], row["measured_s"]["median"],
                      row["measured_s"]["low"], row["measured_s"]["high"], row.get("floor_s")) for row in rows)),)
    ) if rows else \
        Missing("expected and measured step times", "The study has no rows.")
    slowest = max((row["measured_s"]["median"] for row in rows), default=0.0)
    return Findings(f"{title}.", "good" if len(inside) == len(rows) else "open",
                    (Number(f"{len(inside)} of {len(rows)}", "inside the expected interval",
                            f"steps up to {duration(slowest)}"),), (), (Section("Expected and measured", (figure,)),))


def _speed_row(row: Mapping[str, Any], *, is_inside: bool) -> Row:
    (low, high), found = row["expected_s"], row["measured_s"]
    floor = (Point(row["floor_s"], "red", label="floor of this machine", shape="bar"),) if row.get("floor_s") else ()
    return Row(" ".join(map(str, row["recipe"])), (Segment(low, high, "grey", "expected", thin=True),),
               (Point(found["median"], "blue", found["low"], found["high"], "measured"), *floor),
               "inside" if is_inside else "outside", "good" if is_inside else "open")


def memory_predictions(study: Study) -> Findings:
    """Predicted peak by component, beside the ledger of real allocations."""
    rows = study["findings"]["rows"]
    if not rows:
        return Findings("Nothing was measured.", "open", (), (), (Section("Memory", (Text("The study has no rows."),)),))
    errors = [abs(row["error"]) for row in rows]
    names = list(dict.fromkeys(name for row in rows for name, size in row["predicted"].items() if size))
    colours = {name: COMPONENT_COLOURS[i % len(COMPONENT_COLOURS)] for i, name in enumerate(names)}
    title = (f"{len(rows)} configurations: the median prediction is off by {quantile(errors, 0.5):.1%}, the worst by "
             f"{max(errors):.1%}")
    drawn = tuple(Row(row["what"], _components(row["predicted"], row["measured_bytes"], colours),
                      (Point(100.0, "ink", label="measured", shape="bar"),), f"{row['error']:+.1%}",
                      "good" if abs(row["error"]) <= 0.05 else "bad") for row in rows)
    stacked = Figure("memory", title, (Rows(Axis("% of the measured peak", low=0.0), drawn),),
                     "Bar: the predicted components at the fullest moment of a step, as a share of what was allocated (stroke "
                     "at 100%), by a ledger of real allocations on a CPU and by torch's statistics on a GPU.", title,
                     (Table(("configuration", "predicted (bytes)", "measured (bytes)", "error (%)",
                             *(f"{name.replace('_', ' ')} (bytes)" for name in names)),
                            tuple((row["what"], sum(row["predicted"].values()), row["measured_bytes"], 100 * row["error"],
                                   *(row["predicted"].get(name) for name in names)) for row in rows)),))
    worst = max(rows, key=lambda row: abs(row["error"]))
    return Findings(f"{title}.", "good" if max(errors) <= 0.05 else "open", (
        Number(f"{quantile(errors, 0.5):.1%}", "median error", f"of {len(rows)} configurations"),
        Number(f"{max(errors):.1%}", "worst error", worst["what"]),
        Number(memory(max(row["measured_bytes"] for row in rows)), "largest measured peak", "allocated")), (),
        (Section("Predicted and measured", (stacked,)),))


def _components(predicted: Mapping[str, float], measured: float, colours: Mapping[str, str]) -> tuple[Segment, ...]:
    at, segments = 0.0, []
    for name, size in predicted.items():
        if size:
            segments.append(Segment(100 * at / measured, 100 * (at + size) / measured, colours[name], name.replace("_", " ")))
            at += size
    return tuple(segments)
