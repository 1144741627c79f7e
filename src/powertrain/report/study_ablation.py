"""The page of an ablation: the ladder from no technique to the plan, each technique left out, profile, memory, parity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from powertrain.report.chart import Axis, Level, Point, Row, Rows, Segment
from powertrain.report.comparisons import (
    RATIO,
    Compared,
    Findings,
    Study,
    colour_of,
    compared,
    comparison_table,
    counted,
    interval_point,
    loss_difference,
    noise_band,
    noise_words,
    paired_windows,
    speed_words,
    tone_of,
)
from powertrain.report.figures import count, memory
from powertrain.report.page import Cell, Figure, Missing, Number, Section, Table

ORDER = ("faster", "no effect", "inconclusive", "harmful", "invalid", "not applicable here")
CLASS_COLOURS = {"products": "blue", "attention": "sky", "loss": "purple", "elementwise": "yellow", "optimizer": "green",
                 "data": "orange", "copy": "red"}
INTERACTION = 0.05           # by which the product of the rungs may miss the direct measurement before it is said

Technique = Mapping[str, Any]


def read(study: Study) -> Findings:
    findings, found = study["findings"], compared(study)
    techniques = findings["techniques"]
    total = None if findings.get("total") is None else found[findings["total"]]
    control = None if findings.get("control") is None else found[findings["control"]]
    verdicts = [technique["verdict"] for technique in techniques]
    whole = (f"The plan is {speed_words(total.comparison['speed'])} as no technique at all"
             if total is not None and total.comparison["speed"] else "The plan was not timed against no technique at all")
    chosen = [one for one in (control, total) if one is not None]
    sections = (
        Section("Speed", (_ladder(techniques, found, total), _left_out(study, techniques, found),
                          _verdicts(techniques), _reasons(techniques), paired_windows(study, found))),
        Section("Where a step's time goes", (_profile(findings.get("profile") or {}),)),
        Section("Memory", (_memory(techniques),)),
        Section("The same losses", (_parity(techniques), loss_difference(chosen))))
    return Findings(f"{whole}; of {len(techniques)} techniques {counted(verdicts, ORDER)}.", _tone(verdicts),
                    tuple(_numbers(study, total, techniques)), tuple(_cautions(techniques, found, total)), sections)


def _tone(verdicts: Sequence[str]) -> str:
    if "harmful" in verdicts or "invalid" in verdicts:
        return "bad"
    return "good" if "faster" in verdicts else "open"


def _numbers(study: Study, total: Compared | None, techniques: Sequence[Technique]) -> Iterator[Number]:
    if total is not None and total.comparison["speed"]:
        speed = total.comparison["speed"]
        yield Number(f"x {speed['median']:.3g}", "speed of the plan over no technique",
                     f"95% interval {speed['low']:.3g} to {speed['high']:.3g}, {total.comparison['pairs']} pairs")
        before, after = total.comparison["tokens_per_s"]
        yield Number(f"{count(after)} tokens/s", "with the plan", f"{count(before)} without any technique")
    works = [technique["name"] for technique in techniques if technique["verdict"] == "faster"]
    if len(works) and total is None:
        yield Number(str(len(works)), "techniques make it faster", ", ".join(works))
    if study.get("noise_floor") is not None:
        yield Number(f"{study['noise_floor']:.1%}", "noise floor", "how far two equal plans lie apart here")


def _cautions(techniques: Sequence[Technique], found: Sequence[Compared], total: Compared | None) -> Iterator[str]:
    for technique in techniques:
        if technique["verdict"] in ("harmful", "invalid"):
            yield f"{technique['name']} is {technique['verdict']} here: {technique['why']}."
    open_ones = [technique["name"] for technique in techniques if technique["verdict"] == "inconclusive"]
    if open_ones:
        yield f"Undecided: {', '.join(open_ones)}. A longer budget or a quieter machine decides them."
    rungs = _rungs(techniques, found)
    product = math.prod(rung.comparison["speed"]["median"] for _, rung in rungs if rung.comparison["speed"])
    if total is not None and total.comparison["speed"] and rungs:
        ratio = product / total.comparison["speed"]["median"]
        if abs(ratio - 1) > INTERACTION:
            yield (f"The rungs multiply to {product:.3g} and the direct measurement says "
                   f"{total.comparison['speed']['median']:.3g}: noise adds up along a ladder, and the direct one counts.")
    broken = [technique["name"] for technique in techniques if technique.get("parity") and not technique["parity"]["holds"]]
    if broken:
        yield f"The losses are not the same with and without {', '.join(broken)}."


def _rungs(techniques: Sequence[Technique], found: Sequence[Compared]) -> list[tuple[str, Compared]]:
    """Names and comparison of each rung, from the foot up; what was joined shares one."""
    names: dict[int, list[str]] = {}
    for technique in techniques:
        if technique.get("ladder") is not None:
            names.setdefault(technique["ladder"], []).append(technique["name"])
    return [(" and ".join(joined), found[index]) for index, joined in names.items()]


def _ladder(techniques: Sequence[Technique], found: Sequence[Compared], total: Compared | None) -> Figure | Missing:
    rungs = _rungs(techniques, found)
    if not rungs:
        return Missing("speed ladder", "No rung was measured within the budget.")
    height, rows, table = 1.0, [Row("no technique", (), (Point(1.0, "ink", shape="bar"),))], []
    for name, rung in rungs:
        speed, verdict = rung.comparison["speed"], rung.comparison["verdict"]
        if speed is None:
            rows.append(Row(f"+ {name}", says=verdict, tone=tone_of(verdict)))
            table.append((name, None, None, None, None, verdict, rung.comparison["because"]))
            continue
        top = height * speed["median"]
        rows.append(Row(f"+ {name}", (Segment(height, top, colour_of(verdict)),),
                        (Point(top, "ink", height * speed["low"], height * speed["high"]),),
                        f"x {speed['median']:.3g} {verdict}", tone_of(verdict)))
        table.append((name, speed["median"], speed["low"], speed["high"], top, verdict, rung.comparison["because"]))
        height = top
    if total is not None and total.comparison["speed"]:
        speed = total.comparison["speed"]
        rows.append(Row("full plan, measured directly", (), (Point(speed["median"], "blue", speed["low"], speed["high"]),),
                        f"x {speed['median']:.3g}", "ink"))
    title = f"From no technique up, the plan's techniques multiply to {height:.3g} times the speed"
    return Figure(
        "ladder", title,
        (Rows(Axis("times as fast as no technique", log=True), tuple(rows), (Level("no technique", 1.0),),
              legend=(("faster", "green"), ("harmful", "red"), ("no effect", "grey"), ("inconclusive", "orange"))),),
        "Each bar is one comparison of its own: the rung against the one below it, in the plan's order; bars that go back are "
        "shown as they are. Whisker: the 95% interval of that rung alone. Another order would give other bars, because "
        "techniques act on each other; the last line is the direct measurement of both ends.", title,
        (Table(("technique", "times as fast as the rung below", "from", "to", "times as fast as no technique", "verdict",
                "because"), tuple(table), "rungs, in this order"),))


def _left_out(study: Study, techniques: Sequence[Technique], found: Sequence[Compared]) -> Figure | Missing:
    shown = [technique for technique in techniques if technique.get("left_out") is not None]
    if not shown:
        return Missing("techniques left out one by one", "None was timed within the budget.")
    rows = []
    for technique in shown:
        bound = technique.get("bound")
        segments = (Segment(1 / bound, bound, "sky", "Amdahl's bound", thin=True),) if bound and bound < 100 else ()
        rows.append(Row(technique["name"], segments, interval_point(technique["speed"], technique["verdict"]),
                        technique["verdict"], tone_of(technique["verdict"])))
    faster = [technique["name"] for technique in shown if technique["verdict"] == "faster"]
    title = (f"Left out of the full plan, {', '.join(faster)} {'is' if len(faster) == 1 else 'are'} missed" if faster
             else "Left out of the full plan, no technique is clearly missed")
    return Figure(
        "left-out", title, (Rows(Axis(RATIO, log=True), tuple(rows), (Level("the same speed", 1.0),), noise_band(study)),),
        "The full plan against the same plan less one technique. Point: median of paired windows, with its 95% interval. Pale "
        "bar: the most that the technique could do by the share of a step that it acts on, either way. "
        f"{noise_words(study)}", title, (comparison_table([found[technique["left_out"]] for technique in shown]),))


def _verdicts(techniques: Sequence[Technique]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for technique in techniques:
        claim, speed = technique.get("claim") or {}, technique.get("speed") or {}
        claimed = " to ".join(f"{1 / one:.3g}" for one in sorted(claim.get("step_time") or (), reverse=True) if one)
        rows.append((technique["name"], technique["verdict"], speed.get("median"), speed.get("low"), speed.get("high"), claimed,
                     technique.get("bound"), technique["exactness"].lower(), technique["why"]))
    return Table(("technique", "verdict", "times as fast", "from", "to", "claimed by the plan", "bound", "exactness", "why"),
                 tuple(rows), "Every technique and its verdict")


def _reasons(techniques: Sequence[Technique]) -> Table:
    return Table(("technique", "settings", "in the plan because", "basis of its claim", "acts on"), tuple(
        (technique["name"], ", ".join(f"{key}={value}" for key, value in (technique.get("settings") or {}).items()),
         technique["because"], (technique.get("claim") or {}).get("basis", ""), ", ".join(technique.get("acts_on") or ()))
        for technique in techniques), "Why the plan has them")


def _profile(profile: Mapping[str, Any]) -> Figure | Missing:
    if not profile:
        return Missing("profile", "No step was profiled.")
    rows, table = [], []
    for key, name in (("plain", "no technique"), ("plan", "full plan")):
        if key not in profile:
            continue
        at, segments = 0.0, []
        for part, seconds in profile[key]["classes"].items():
            segments.append(Segment(1e3 * at, 1e3 * (at + seconds), CLASS_COLOURS.get(part, "grey"), part))
            table.append((name, part, 1e3 * seconds, 100 * seconds / profile[key]["step_s"]))
            at += seconds
        rows.append(Row(name, tuple(segments), says=f"{1e3 * profile[key]['step_s']:.4g} ms"))
        table.append((name, "all (the step)", 1e3 * profile[key]["step_s"], 100.0))
    last = profile.get("plan") or profile["plain"]
    largest = max(last["classes"], key=lambda part: last["classes"][part])
    title = f"With the plan, {last['classes'][largest] / last['step_s']:.0%} of a step are {largest}"
    return Figure("profile", title, (Rows(Axis("milliseconds of a step", low=0.0), tuple(rows)),),
                  "Shares of the work by class from torch's profiler, over the time of steps without it (the profiler itself "
                  "slows a step, so only its shares are used). The bounds above come from these shares.", title,
                  (Table(("plan", "class", "ms a step", "%"), tuple(table)),))


def _memory(techniques: Sequence[Technique]) -> Figure | Missing:
    known = [technique for technique in techniques if technique.get("memory_bytes") is not None]
    if not known:
        return Missing("memory of each technique", "No allocated peak was measured.")
    rows = tuple(Row(technique["name"], (Segment(0.0, technique["memory_bytes"] / 2**20,
                                                 "green" if technique["memory_bytes"] <= 0 else "red"),),
                     says=("-" if technique["memory_bytes"] < 0 else "+") + memory(abs(technique["memory_bytes"])))
                 for technique in known)
    least = min(known, key=lambda technique: technique["memory_bytes"])
    title = (f"{least['name']} saves the most memory, {memory(-least['memory_bytes'])} of the peak" if least["memory_bytes"] < 0
             else "No technique saves memory here")
    return Figure("memory", title, (Rows(Axis("MiB of the allocated peak, with it less without it"), rows, (Level("", 0.0),),
                                         legend=(("saves", "green"), ("takes", "red"))),),
                  "Allocated peak of one optimizer step after the first, in fresh processes, with the technique less without.",
                  title, (Table(("technique", "bytes", "MiB"),
                                tuple((t["name"], t["memory_bytes"], t["memory_bytes"] / 2**20) for t in known)),))


def _parity(techniques: Sequence[Technique]) -> Table | Missing:
    known = [(technique, technique["parity"]) for technique in techniques if technique.get("parity")]
    if not known:
        return Missing("losses with and without each technique", "They were not compared.")
    columns = ("technique", "demanded", "", "largest loss difference", "largest gradient-norm difference", "steps", "because")
    return Table(columns, tuple((technique["name"], parity["demanded"].lower(), "holds" if parity["holds"] else "does not hold",
                        parity["loss_difference"], parity["grad_norm_difference"], parity["steps"], parity["because"])
                       for technique, parity in known), "Losses with and without each technique, as its exactness demands")
