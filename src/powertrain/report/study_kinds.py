"""The pages of most kinds of study: of plans (tuning, comparison, peers, bench, predictions of speed and memory), of crippled
recipes, and of what documents claim.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from powertrain.records import several
from powertrain.records.timeline import quantile
from powertrain.report import study as studies
from powertrain.report.chart import COMPONENT_COLOURS, Point, Row, Segment, stacked
from powertrain.report.page import Block, Figure, Findings, Missing, Number, Section, Table, Text
from powertrain.report.study import Study
from powertrain.report.words import duration, is_number, memory, pins_in_words

LATE = "not reached within the budget"       # of candidates in studies from before `reached` was stored
ORDER = ("faster", "no effect", "inconclusive", "harmful", "invalid")
PEAK, PREDICTED = "peak MiB", "predicted MiB"            # columns of a bench's table
Case = Mapping[str, Any]
CLAIM_ORDER = ("confirmed", "better", "smaller than claimed", "no effect", "harmful", "inconclusive", "not applicable here")
SUPPORTED, CONTRADICTED, UNDECIDED = CLAIM_ORDER[:2], CLAIM_ORDER[2:5], CLAIM_ORDER[5:]
BEYOND = 2.0                 # times the rest of its chart: how far an open end of a claim's range is drawn


def tuning(study: Study) -> Findings:
    findings, found = study["findings"], studies.compared(study)
    total = studies.picked(study, found, "total")
    candidates, chosen = findings["candidates"], findings["chosen"]
    tried = [candidate for candidate in candidates if candidate["rounds"]]
    speed = total.speed if total is not None and chosen else None
    verdict = (f"The tuned plan ({pins_in_words(chosen)}) is {studies.speed_words(speed)} as the untuned one." if speed else
               f"The untuned plan stays: none of the {len(tried)} plans that were tried was shown to be faster.")
    numbers = (studies.speed_number(speed, "tuned over untuned", "on fresh windows") if speed else
               Number("x 1", "tuned over untuned", "the untuned plan stays"),
               Number(f"{len(tried)} of {len(candidates)}", "plans were measured", "the others were not tried, or not run"),
               *studies.noise_number(study))
    cautions = ["The best of many noisy numbers is partly luck; that is why the chosen plan was compared once more, on fresh "
                "windows, and only that comparison counts."] if tried else []
    late = [candidate["name"] for candidate in candidates if not candidate.get("reached", candidate["why"] != LATE)]
    cautions += [f"Not reached within the budget: {', '.join(late)}."] if late else []
    return Findings(verdict, "good" if speed else "open", numbers, tuple(cautions), (
        Section("The candidates", (_candidates(study, tried), studies.table("every candidate", candidates))),
        studies.behind(study, found, f"All {len(found)} comparisons",
                       studies.loss_difference([total] if total is not None else []))))


def _candidates(study: Study, tried: Sequence[Mapping[str, Any]]) -> Figure | Missing:
    rows = []
    for candidate in sorted(tried, key=lambda one: (len(one["rounds"]), one["rounds"][-1]["median"]), reverse=True):
        *early, last = candidate["rounds"]
        colour, chosen, tone = ("green", "chosen, ", "good") if candidate["kept"] else ("blue", "", "quiet")
        points = tuple(Point(one["median"], "grey", label="earlier rounds", shape="ring") for one in early)
        label = "last round, chosen" if chosen else "last round"
        rows.append(Row(candidate["name"], (), (*points, *studies.interval_point(last, colour, label)),
                        f"{chosen}{several(len(candidate['rounds']), 'round')}", tone))
    kept = [candidate["name"] for candidate in tried if candidate["kept"]]
    title = f"Chosen: {', '.join(kept)}" if kept else "No change of one technique was worth keeping"
    numbers = studies.table("candidates", [{**candidate, **one, "number": number} for candidate in tried
                                           for number, one in enumerate(candidate["rounds"], 1)])
    return studies.chart("candidates", title, rows, numbers, study=study)


def comparison(study: Study) -> Findings:
    found = studies.compared(study)
    verdicts = [one.verdict for one in found]
    first = found[0].comparison if found else None
    verdict = (f"{first['b']} is {studies.speed_words(first['speed'])} as {first['a']}: {first['verdict']}."
               if first and len(found) == 1 else f"Of {len(found)} comparisons {studies.counted(verdicts, ORDER)}.")
    numbers = tuple(studies.speed_number(one.speed, one.name, f"{one.comparison['pairs']} pairs")
                    for one in found[:3] if one.speed)
    return Findings(verdict, "bad" if "harmful" in verdicts or "invalid" in verdicts else "good", numbers, (), (
        studies.behind(study, found, verdict.rstrip("."), of="Speed"),
        Section("The same losses", (studies.loss_difference(found),))))


def peers(study: Study) -> Findings:
    """Read a study of powertrain against other trainers, with a profile of our step."""
    findings, plain = study["findings"], comparison(study)
    step_s = sum(findings["profile"].values())
    parts = [{"name": name, "seconds": seconds, "share": f"{seconds / step_s:.0%}"}
             for name, seconds in sorted(findings["profile"].items(), key=lambda part: -part[1])]
    share = Number(f"{findings['products_share']:.0%}", "of the measured GEMM limit", "exact FLOPs of our arm, per second")
    under = findings.get("conditions") or ()
    alone: Block = studies.table("peers alone", under) if under else \
        Missing("the peers alone", "The peers were not measured alone, so nothing shows that they were undisturbed.")
    unclean = tuple(f"Not clean: {why}." for one in under for why in one["unclean"]) if under else \
        ("The peers were not measured alone, so the ratios may be too large.",)
    return replace(plain, numbers=(*plain.numbers, share), cautions=(*unclean, *plain.cautions), sections=(
        *plain.sections, Section("Conditions", (alone,)),
        Section("How far apart", (studies.table("peers apart", findings["losses"]),)),
        Section("Where our step's time goes", (studies.table("peers profile", parts),))))


def bench(study: Study) -> Findings:
    findings, found = study["findings"], studies.compared(study)
    assertions = findings["assertions"]
    broken = [assertion for assertion in assertions if not assertion["holds"]]
    verdict = (f"All {len(assertions)} assertions hold." if not broken else
               f"{len(broken)} of {len(assertions)} assertions do not hold: {broken[0]['what']}.")
    tables = [Table(tuple(map(str, one["columns"])), tuple(tuple(row) for row in one["rows"]), name)
              for name, one in findings["tables"].items()]
    cautions = [f"{assertion['what']} does not hold: {assertion['because']}." for assertion in broken]
    cautions += [f"{note}." for note in findings.get("notes") or []]
    cautions += [f"Not reached within the budget: {', '.join(map(str, findings['not_reached']))}."] \
        if findings.get("not_reached") else []
    blocks: list[Block] = [block for one in tables for block in (_bench_chart(one), one) if block is not None]
    return Findings(verdict, "bad" if broken else "good", (
        Number(f"{len(assertions) - len(broken)} of {len(assertions)}", "assertions hold", "of memory and losses"),
        Number(str(len(tables)), "tables", ", ".join(one.title for one in tables))), tuple(cautions), (
        Section("Assertions", (studies.table("assertions", assertions),)), Section("Tables", tuple(blocks)),
        studies.behind(study, found, f"Speed of the {len(found)} comparisons")))


def _bench_chart(given: Table) -> Figure | Missing | None:
    """Plot measured memory beside its prediction; None where the table does not have both."""
    if not {PEAK, PREDICTED} <= set(given.columns):
        return None
    at, expected = given.columns.index(PEAK), given.columns.index(PREDICTED)
    known: list[tuple[Any, Any, Any]] = [(row[0], row[at], row[expected]) for row in given.rows if is_number(row[at])]
    if not known:
        return None
    rows = [Row(f"{given.columns[0]} {name}", (Segment(0.0, float(peak), "blue", "measured"),),
                (Point(predicted if is_number(predicted) else None, "red", label="predicted", shape="bar"),))
            for name, peak, predicted in known]
    worst = max((abs(predicted / (peak or 1) - 1) for _, peak, predicted in known if predicted is not None), default=None)
    title = f"Peak memory by {given.columns[0]}" + (f": predicted within {worst:.1%}" if worst is not None else "")
    return studies.chart("bench memory", title, rows, Table((given.columns[0], PEAK, PREDICTED), tuple(known)),
                         key=f"bench-{given.title.replace(' ', '-')}")


def speed(study: Study) -> Findings:
    """Read a study of expected and measured step times."""
    found = study["findings"]["rows"]
    rows = []
    for row in found:
        (low, high), measured, floor_s = row["expected_s"], row["measured_s"], row.get("floor_s")
        floor = (Point(floor_s, "red", label="floor of this machine", shape="bar"),) if floor_s else ()
        says, tone = ("inside", "good") if low <= measured["median"] <= high else ("outside", "open")
        rows.append(Row(" ".join(map(str, row["recipe"])), (Segment(low, high, "grey", "expected", thin=True),),
                        (*studies.interval_point(measured, "blue", "measured"), *floor), says, tone))
    inside = sum(row.says == "inside" for row in rows)
    title = f"{inside} of {len(rows)} measured step times lie inside what was expected"
    figure = studies.chart("speed", title, rows, studies.table("speed", found))
    slowest = max((row["measured_s"]["median"] for row in found), default=0.0)
    return Findings(f"{title}.", "good" if inside == len(rows) else "open",
                    (Number(f"{inside} of {len(rows)}", "inside the expected interval", f"steps up to {duration(slowest)}"),),
                    (), (Section("Expected and measured", (figure,)),))


def memory_predictions(study: Study) -> Findings:
    """Read a study of predicted and measured peak memory."""
    found = study["findings"]["rows"]
    if not found:
        return Findings("Nothing was measured.", "open", (), (), (Section("Memory", (Text("The study has no rows."),)),))
    errors = [abs(row["error"]) for row in found]
    names = list(dict.fromkeys(name for row in found for name, size in row["predicted"].items() if size))
    colours = {name: COMPONENT_COLOURS[i % len(COMPONENT_COLOURS)] for i, name in enumerate(names)}
    title = (f"{len(found)} configurations: the median prediction is off by {quantile(errors, 0.5):.1%}, the worst by "
             f"{max(errors):.1%}")
    rows = [Row(row["what"], stacked(row["predicted"], row["measured_bytes"] / 100, colours),
                (Point(100.0, "ink", label="measured", shape="bar"),), f"{row['error']:+.1%}",
                "good" if abs(row["error"]) <= 0.05 else "bad") for row in found]
    numbers = Table(("configuration", "predicted (bytes)", "measured (bytes)", "error (%)",
                     *(f"{name.replace('_', ' ')} (bytes)" for name in names)),
                    tuple((row["what"], sum(row["predicted"].values()), row["measured_bytes"], 100 * row["error"],
                           *(row["predicted"].get(name) for name in names)) for row in found))
    worst = max(found, key=lambda row: abs(row["error"]))
    return Findings(f"{title}.", "good" if max(errors) <= 0.05 else "open", (
        Number(f"{quantile(errors, 0.5):.1%}", "median error", f"of {len(found)} configurations"),
        Number(f"{max(errors):.1%}", "worst error", worst["what"]),
        Number(memory(max(row["measured_bytes"] for row in found)), "largest measured peak", "allocated")), (),
        (Section("Predicted and measured", (studies.chart("memory", title, rows, numbers),)),))


# ------------------------------------------------------------------------------------------------ crippled recipes and claims


def diagnosis(study: Study) -> Findings:
    cases, found = study["findings"]["cases"], studies.compared(study)
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
        Section("The cases", (studies.table("cases", cases), studies.table("answers", cases))),
        studies.behind(study, found, f"Speed of the {len(found)} cures that act on steps")))


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
    rows = []
    for case in shown:
        low, high = case.get("interval") or (None, None)
        colour, tone, says = ("green", "good", "holds") if case["holds"] else ("red", "bad", "less than half")
        rows.append(Row(case["name"], (Segment(1.0, case["predicted"], "blue", "predicted", thin=True),),
                        studies.interval_point({"median": case["measured"], "low": low, "high": high}, colour, "measured"),
                        says, tone))
    title = f"{sum(case['holds'] for case in shown)} of {len(shown)} cures give at least half of what was predicted"
    return studies.chart("gains", title, rows, studies.table("gains", shown))


# ------------------------------------------------------------------------------------------------ claims


def claims(study: Study) -> Findings:
    """Read what documents claim, beside what was measured here, each claim with its verdict."""
    given: Sequence[Case] = study["findings"]["claims"]
    found = studies.compared(study)
    timed = [one for one in found if one.comparison["b"] != f"{one.comparison['a']} again"]
    by_document = {claim["document"]: [one for one in given if one["document"] == claim["document"]] for claim in given}
    sections = (
        Section("Claimed against measured", tuple(_claim_figures(given))),
        *(Section(f"Document {document}", (studies.table("claims of a document", some, several(len(some), "claim")),))
          for document, some in by_document.items()),
        Section("The comparisons behind it", (
            studies.intervals(study, timed, f"Speed of the {len(timed)} pairs of arms, as it was measured"),
            studies.paired_windows(study, found), studies.loss_difference(timed))))
    verdicts = [claim["verdict"] for claim in given]
    supported, contradicted, undecided = ([verdict for verdict in verdicts if verdict in some]
                                          for some in (SUPPORTED, CONTRADICTED, UNDECIDED))
    decided = len(supported) + len(contradicted)
    return Findings(
        f"Of {len(given)} claims {studies.counted(verdicts, CLAIM_ORDER)}.", "open",
        (Number(f"{len(supported)} of {decided}", "decided claims hold here", "confirmed or better"),
         Number(str(len(contradicted)), "claims do not hold here", studies.counted(contradicted, CLAIM_ORDER)),
         Number(str(len(given) - decided), "not decided here", studies.counted(undecided, CLAIM_ORDER))),
        tuple(_claim_cautions(study, given)), sections)


def _claim_cautions(study: Study, claims: Sequence[Case]) -> Iterator[str]:
    yield ("The documents measured other models on other machines; a verdict here says what holds on this machine under the "
           "conditions named beside it, not what held there.")
    undecided = [claim["id"] for claim in claims if claim["verdict"] == "inconclusive"]
    if undecided:
        yield f"Inconclusive: {_some(undecided)}: the interval is too wide for a verdict."
    if study.get("noise_floor") is None and any(claim.get("measured") for claim in claims):
        yield "No arm was measured against itself, so the noise of this machine is not known."
    experiments = study["findings"].get("experiments") or {}
    reasoned = [claim["id"] for claim in claims if claim.get("measured")
                and (experiments.get(claim["experiment"]) or {}).get("kind") == "reasoned"]
    if reasoned:
        yield f"Decided by arithmetic on the documents' own figures, without a run: {_some(reasoned)}."


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _claim_figures(claims: Sequence[Case]) -> Iterator[Block]:
    """Yield one chart for each unit, of all claims with a measured value."""
    measured = [claim for claim in claims if claim.get("measured")]
    if not measured:
        yield Missing("claimed against measured", "No claim of this study has a measured value.")
        return
    for number, unit in enumerate(dict.fromkeys(claim["unit"] for claim in measured)):
        yield _claim_chart([claim for claim in measured if claim["unit"] == unit], unit, number)
    if without := len(claims) - len(measured):
        yield Text(f"Without a measured value (not applicable here, not reached, or decided without a number): "
                   f"{several(without, 'claim')}, in the tables below with the reason.")


def _claim_chart(claims: Sequence[Case], unit: str, number: int) -> Figure | Missing:
    edges = [value for claim in claims for value in (*(claim.get("range") or ()), *claim["measured"].values())
             if value is not None]
    log = all(value > 0 for value in edges)
    top, bottom = max(edges), min(edges)
    rows = []
    for claim in claims:
        segments: tuple[Segment, ...] = ()
        if claim.get("range") is not None:
            low, high = claim["range"]
            low = low if low is not None else bottom / BEYOND if log else bottom
            high = high if high is not None else top * BEYOND if log else top
            segments = (Segment(max(low, bottom / BEYOND) if log else low, high, "blue", "claimed", thin=True),)
        rows.append(studies.verdict_row(f"{claim['id']} {claim['what']}", claim["measured"], claim["verdict"], segments))
    held = sum(claim["verdict"] in SUPPORTED for claim in claims)
    title = f"{unit[:1].upper()}{unit[1:]}: {held} of {len(claims)} measured claims hold here"
    return studies.chart("claims of a ratio" if unit.startswith("times") and log else "claims", title, rows,
                         studies.table("claims", claims, unit=unit), key=f"claims-{number}",
                         axis=unit + ", logarithmic" * log, log=log)
