"""The page of an ablation: the ladder from no technique to the plan, each technique left out, profile, memory, parity."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from powertrain.report import study as studies
from powertrain.report.chart import Point, Row, Segment, stacked
from powertrain.report.page import Figure, Findings, Missing, Number, Section, Table
from powertrain.report.study import Compared, Study
from powertrain.report.words import count, memory

ORDER = ("faster", "no effect", "inconclusive", "harmful", "invalid", "not applicable here")
CLASS_COLOURS = {"products": "blue", "attention": "sky", "loss": "purple", "elementwise": "yellow", "optimizer": "green",
                 "data": "orange", "copy": "red"}
INTERACTION = 0.05           # by which the product of the rungs may miss the direct measurement before it is said

Technique = Mapping[str, Any]


def read(study: Study) -> Findings:
    findings, found = study["findings"], studies.compared(study)
    techniques = findings["techniques"]
    total, control = studies.picked(study, found, "total"), studies.picked(study, found, "control")
    verdicts = [technique["verdict"] for technique in techniques]
    whole = (f"The plan is {studies.speed_words(total.speed)} as no technique at all" if total is not None and total.speed else
             "The plan was not timed against no technique at all")
    tone = "bad" if {"harmful", "invalid"} & set(verdicts) else "good" if "faster" in verdicts else "open"
    sections = (
        Section("Speed", (_ladder(techniques, found, total), _left_out(study, techniques, found),
                          studies.table("techniques", techniques), studies.table("reasons", techniques),
                          studies.paired_windows(study, found))),
        Section("Where a step's time goes", (_profile(findings.get("profile") or {}),)),
        Section("Memory", (_memory(techniques),)),
        Section("The same losses", (_parity(techniques), studies.loss_difference([one for one in (control, total) if one]))))
    return Findings(f"{whole}; of {len(techniques)} techniques {studies.counted(verdicts, ORDER)}.", tone,
                    (*_numbers(total, techniques), *studies.noise_number(study)),
                    tuple(_cautions(techniques, found, total)), sections)


def _numbers(total: Compared | None, techniques: Sequence[Technique]) -> Iterator[Number]:
    if total is not None and total.speed:
        yield studies.speed_number(total.speed, "speed of the plan over no technique", f"{total.comparison['pairs']} pairs")
        before, after = total.comparison["tokens_per_s"]
        yield Number(f"{count(after)} tokens/s", "with the plan", f"{count(before)} without any technique")
    works = _named(techniques, "faster")
    if works and total is None:
        yield Number(str(len(works)), "techniques make it faster", ", ".join(works))


def _named(techniques: Sequence[Technique], verdict: str) -> list[str]:
    return [technique["name"] for technique in techniques if technique["verdict"] == verdict]


def _cautions(techniques: Sequence[Technique], found: Sequence[Compared], total: Compared | None) -> Iterator[str]:
    for technique in techniques:
        if technique["verdict"] in ("harmful", "invalid"):
            yield f"{technique['name']} is {technique['verdict']} here: {technique['why']}."
    if undecided := _named(techniques, "inconclusive"):
        yield f"Undecided: {', '.join(undecided)}. A longer budget or a quieter machine decides them."
    rungs = _rungs(techniques, found)
    product = math.prod(rung.speed["median"] for _, rung in rungs if rung.speed)
    if total is not None and total.speed and rungs and abs(product / total.speed["median"] - 1) > INTERACTION:
        yield (f"The rungs multiply to {product:.3g} and the direct measurement says {total.speed['median']:.3g}: noise adds "
               "up along a ladder, and the direct one counts.")
    if broken := [one["name"] for one in techniques if one.get("parity") and not one["parity"]["holds"]]:
        yield f"The losses are not the same with and without {', '.join(broken)}."


def _rungs(techniques: Sequence[Technique], found: Sequence[Compared]) -> list[tuple[str, Compared]]:
    """Return name and comparison of each rung, the lowest first; techniques that were joined share a rung."""
    names: dict[int, list[str]] = {}
    for technique in techniques:
        if technique.get("ladder") is not None:
            names.setdefault(technique["ladder"], []).append(technique["name"])
    return [(" and ".join(joined), found[index]) for index, joined in names.items()]


def _ladder(techniques: Sequence[Technique], found: Sequence[Compared], total: Compared | None) -> Figure | Missing:
    rungs = _rungs(techniques, found)
    if not rungs:
        return Missing("speed ladder", "No rung was measured within the budget.")
    height, numbers = 1.0, []
    rows = [Row("no technique", points=(Point(1.0, "ink", shape="bar"),))]
    for name, rung in rungs:
        numbers.append({**rung.comparison, "name": name})
        speed, verdict = rung.speed, rung.verdict
        if speed is None:
            rows.append(Row(f"+ {name}", says=verdict, tone=studies.tone_of(verdict)))
            continue
        top = numbers[-1]["top"] = height * speed["median"]
        rows.append(Row(f"+ {name}", (Segment(height, top, studies.colour_of(verdict)),),
                        (Point(top, "ink", height * speed["low"], height * speed["high"]),),
                        f"x {speed['median']:.3g} {verdict}", studies.tone_of(verdict)))
        height = top
    if total is not None and total.speed:
        rows.append(Row("full plan, measured directly", (), studies.interval_point(total.speed, "blue"),
                        f"x {total.speed['median']:.3g}"))
    title = f"From no technique up, the plan's techniques multiply to {height:.3g} times the speed"
    return studies.chart("ladder", title, rows, studies.table("ladder", numbers))


def _left_out(study: Study, techniques: Sequence[Technique], found: Sequence[Compared]) -> Figure | Missing:
    shown = [technique for technique in techniques if technique.get("left_out") is not None]
    rows = []
    for technique in shown:
        bound = technique.get("bound")
        segments = (Segment(1 / bound, bound, "sky", "Amdahl's bound", thin=True),) if bound and bound < 100 else ()
        rows.append(studies.verdict_row(technique["name"], technique["speed"], technique["verdict"], segments=segments))
    faster = _named(shown, "faster")
    title = (f"Left out of the full plan, {', '.join(faster)} {'is' if len(faster) == 1 else 'are'} missed" if faster
             else "Left out of the full plan, no technique is clearly missed")
    left_out = [found[technique["left_out"]].comparison for technique in shown]
    return studies.chart("left-out", title, rows, studies.table("left-out", left_out), study=study)


def _profile(profile: Mapping[str, Any]) -> Figure | Missing:
    if not profile:
        return Missing("profile", "No step was profiled.")
    rows, numbers = [], []
    for key, name in (("plain", "no technique"), ("plan", "full plan")):
        if key in profile:
            classes, step_s = profile[key]["classes"], profile[key]["step_s"]
            rows.append(Row(name, stacked(classes, 1e-3, CLASS_COLOURS), says=f"{1e3 * step_s:.4g} ms"))
            numbers += [{"name": name, "part": part, "seconds": seconds, "step_s": step_s}
                        for part, seconds in (*classes.items(), ("all (the step)", step_s))]
    last = profile.get("plan") or profile["plain"]
    largest = max(last["classes"], key=lambda part: last["classes"][part])
    title = f"With the plan, {last['classes'][largest] / last['step_s']:.0%} of a step are {largest}"
    return studies.chart("profile", title, rows, studies.table("profile", numbers))


def _memory(techniques: Sequence[Technique]) -> Figure | Missing:
    known = [technique for technique in techniques if technique.get("memory_bytes") is not None]
    if not known:
        return Missing("memory of each technique", "No allocated peak was measured.")
    rows = [Row(technique["name"], (Segment(0.0, size / 2**20, "green" if size <= 0 else "red"),),
                says=("-" if size < 0 else "+") + memory(abs(size)))
            for technique in known for size in [technique["memory_bytes"]]]
    least = min(known, key=lambda technique: technique["memory_bytes"])
    title = (f"{least['name']} saves the most memory, {memory(-least['memory_bytes'])} of the peak" if least["memory_bytes"] < 0
             else "No technique saves memory here")
    return studies.chart("memory-change", title, rows, studies.table("memory-change", known), key="memory")


def _parity(techniques: Sequence[Technique]) -> Table | Missing:
    known = [technique for technique in techniques if technique.get("parity")]
    return studies.table("parity", known) if known else \
        Missing("losses with and without each technique", "They were not compared.")
