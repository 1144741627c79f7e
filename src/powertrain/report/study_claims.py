"""The page of claims: what documents claim, beside what was measured here, each with its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from powertrain.report import study as studies
from powertrain.report.chart import Segment
from powertrain.report.page import Block, Figure, Missing, Number, Section, Text, several
from powertrain.report.study import Findings, Study

ORDER = ("confirmed", "better", "smaller than claimed", "no effect", "harmful", "inconclusive", "not applicable here")
SUPPORTED, CONTRADICTED, UNDECIDED = ORDER[:2], ORDER[2:5], ORDER[5:]
BEYOND = 2.0                 # times the rest of its chart: how far an open end of a range is drawn

Claim = Mapping[str, Any]


def read(study: Study) -> Findings:
    claims: Sequence[Claim] = study["findings"]["claims"]
    found = studies.compared(study)
    timed = [one for one in found if one.comparison["b"] != f"{one.comparison['a']} again"]
    by_document = {claim["document"]: [one for one in claims if one["document"] == claim["document"]] for claim in claims}
    sections = (
        Section("Claimed against measured", tuple(_figures(claims))),
        *(Section(f"Document {document}", (studies.table("claims of a document", some, several(len(some), "claim")),))
          for document, some in by_document.items()),
        Section("The comparisons behind it", (
            studies.intervals(study, timed, f"Speed of the {len(timed)} pairs of arms, as it was measured"),
            studies.paired_windows(study, found), studies.loss_difference(timed))))
    verdicts = [claim["verdict"] for claim in claims]
    supported, contradicted, undecided = ([verdict for verdict in verdicts if verdict in some]
                                          for some in (SUPPORTED, CONTRADICTED, UNDECIDED))
    decided = len(supported) + len(contradicted)
    return Findings(
        f"Of {len(claims)} claims {studies.counted(verdicts, ORDER)}.", "open",
        (Number(f"{len(supported)} of {decided}", "decided claims hold here", "confirmed or better"),
         Number(str(len(contradicted)), "claims do not hold here", studies.counted(contradicted, ORDER)),
         Number(str(len(claims) - decided), "not decided here", studies.counted(undecided, ORDER))),
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
    """Yield one chart for each unit, of all claims with a measured value."""
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
