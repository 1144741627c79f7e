"""The page of claims: what documents claim, beside what was measured here, each with its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from powertrain.report.chart import Axis, Level, Point, Row, Rows, Segment
from powertrain.report.comparisons import (
    Findings,
    Study,
    colour_of,
    compared,
    counted,
    intervals,
    loss_difference,
    paired_windows,
    tone_of,
)
from powertrain.report.page import Block, Cell, Figure, Missing, Number, Section, Table, Text, several

ORDER = ("confirmed", "better", "smaller than claimed", "no effect", "harmful", "inconclusive", "not applicable here")
CONTRADICTED = ("smaller than claimed", "no effect", "harmful")
BEYOND = 2.0                 # times the rest of its chart: how far an open end of a range is drawn

Claim = Mapping[str, Any]


def read(study: Study) -> Findings:
    claims: Sequence[Claim] = study["findings"]["claims"]
    verdicts = [claim["verdict"] for claim in claims]
    found = compared(study)
    timed = [one for one in found if one.comparison["b"] != f"{one.comparison['a']} again"]
    documents = list(dict.fromkeys(claim["document"] for claim in claims))
    sections = (
        Section("Claimed against measured", tuple(_figures(claims))),
        *(Section(f"Document {document}", (_table([claim for claim in claims if claim["document"] == document]),))
          for document in documents),
        Section("The comparisons behind it", (
            intervals(study, timed, "comparisons", f"Speed of the {len(timed)} pairs of arms, as it was measured"),
            paired_windows(study, found), loss_difference(timed))))
    supported = sum(verdict in ("confirmed", "better") for verdict in verdicts)
    decided = sum(verdict in (*CONTRADICTED, "confirmed", "better") for verdict in verdicts)
    return Findings(
        f"Of {len(claims)} claims {counted(verdicts, ORDER)}.", "open",
        (Number(f"{supported} of {decided}", "decided claims hold here", "confirmed or better"),
         Number(str(sum(verdict in CONTRADICTED for verdict in verdicts)), "claims do not hold here",
                counted([verdict for verdict in verdicts if verdict in CONTRADICTED], ORDER)),
         Number(str(len(claims) - decided), "not decided here",
                counted([verdict for verdict in verdicts if verdict in ORDER[5:]], ORDER))),
        tuple(_cautions(study, claims)), sections)


def _cautions(study: Study, claims: Sequence[Claim]) -> Iterator[str]:
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


def _figures(claims: Sequence[Claim]) -> Iterator[Block]:
    """One chart for each unit, of all claims that have a claimed range or a measured value."""
    measured = [claim for claim in claims if claim.get("measured")]
    if not measured:
        yield Missing("claimed against measured", "No claim of this study has a measured value.")
        return
    for number, unit in enumerate(dict.fromkeys(claim["unit"] for claim in measured)):
        yield _chart([claim for claim in measured if claim["unit"] == unit], unit, number)
    without = len(claims) - len(measured)
    if without:
        yield Text(f"Without a measured value (not applicable here, not reached, or decided without a number): "
                   f"{several(without, 'claim')}, in the tables below with the reason.")


def _chart(claims: Sequence[Claim], unit: str, number: int) -> Figure:
    edges = [value for claim in claims for value in _edges(claim)]
    log = all(value > 0 for value in edges)
    top, bottom = max(edges), min(edges)
    rows = []
    for claim in claims:
        span = claim.get("range")
        segments: tuple[Segment, ...] = ()
        if span is not None:
            low = span[0] if span[0] is not None else (bottom / BEYOND if log else bottom)
            high = span[1] if span[1] is not None else (top * BEYOND if log else top)
            segments = (Segment(max(low, bottom / BEYOND) if log else low, high, "blue", "claimed", thin=True),)
        found = claim["measured"]
        rows.append(Row(f"{claim['id']} {claim['what']}", segments,
                        (Point(found["median"], colour_of(claim["verdict"]), found["low"], found["high"]),),
                        claim["verdict"], tone_of(claim["verdict"])))
    held = sum(claim["verdict"] in ("confirmed", "better") for claim in claims)
    title = f"{unit[:1].upper()}{unit[1:]}: {held} of {len(claims)} measured claims hold here"
    ratio = unit.startswith("times")
    return Figure(
        f"claims-{number}", title,
        (Rows(Axis(unit + (", logarithmic" if log else ""), log=log), tuple(rows),
              (Level("no effect", 1.0),) if ratio and log else (),
              legend=(("measured: holds", "green"), ("smaller or inconclusive", "orange"), ("no effect", "grey"),
                      ("harmful", "red"))),),
        "Pale bar: what the document claims (an open end is drawn to the edge). Point: the measured median with its 95% "
        "interval, in the colour of the verdict, which stands beside it in words. Claims that failed are here like the others.",
        title, (Table(("claim", "what", "claimed from", "to", f"measured ({unit})", "low", "high", "verdict"),
                      tuple((claim["id"], claim["what"], *(claim.get("range") or (None, None)), claim["measured"]["median"],
                             claim["measured"]["low"], claim["measured"]["high"], claim["verdict"]) for claim in claims)),))


def _edges(claim: Claim) -> list[float]:
    found = claim["measured"]
    return [value for value in (*(claim.get("range") or ()), found["low"], found["median"], found["high"]) if value is not None]


def _table(claims: Sequence[Claim]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for claim in claims:
        found = claim.get("measured")
        said = f"{found['median']:.4g} ({found['low']:.4g} to {found['high']:.4g}) {claim['unit']}" if found else ""
        rows.append((claim["id"], claim["what"], claim["claimed"], said, claim["verdict"], claim["because"],
                     claim.get("conditions") or "", claim.get("prior") or ""))
    return Table(("id", "what", "claimed", "measured here", "verdict", "because", "conditions here", "expected beforehand"),
                 tuple(rows), several(len(claims), "claim"))
