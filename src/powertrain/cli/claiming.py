"""`powertrain claims`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powertrain.cli import output
from powertrain.cli.grouping import group
from powertrain.cli.options import Budget, Json, StudyName, budget_s, cache_folder, say, tell
from powertrain.cli.training import train_missing_base
from powertrain.records import Hardware, Software, WrongUse
from powertrain.records.evidence import NOT_HERE

if TYPE_CHECKING:
    from powertrain.claims.claim import Catalogue, Claim, Experiment
    from powertrain.claims.session import ClaimSession


def show_list(as_json: Json = False) -> None:
    """List the claims, and whether this machine can decide them."""
    from powertrain.claims.claim import catalogue, why_not

    known, (hardware, software) = catalogue(), _machine()
    reasons = {claim.id: why_not(claim.needs, hardware, software) for claim in known.claims}
    if as_json:
        output.print_json(*({"event": "claim", **_plain(known, claim), "decidable": reasons[claim.id] is None,
                             "because": reasons[claim.id]} for claim in known.claims))
        return
    for document, setting in known.documents.items():
        output.print_rows([(document, "", setting), *(_list_row(known, claim, reasons[claim.id]) for claim in known.claims
                                                      if claim.document == document)])
    here = sum(reason is None for reason in reasons.values())
    output.print_rows([("Claims", f"{len(reasons)}, of which {here} can be decided here: powertrain claims run")])


def _list_row(known: Catalogue, claim: Claim, reason: str | None) -> tuple[str, str, str]:
    """Return id, how the claim can be decided here, and what would confirm it or why it cannot be decided."""
    from powertrain.claims.verdicts import claimed_range

    kind = known.experiment_of(claim).kind
    here = "not here" if reason is not None else "without measuring" if kind == "reasoned" else "measurable"
    wanted = f"Confirmed by {claimed_range(claim)} {claim.unit if claim.range else f'({claim.unit})'}"
    conditions = known.conditions_of(claim) if reason is None else reason
    return (claim.id, here, f"{claim.what}. Claimed: {claim.claimed}. {wanted}{f'; {conditions}' if conditions else ''}")


def _plain(known: Catalogue, claim: Claim) -> dict[str, Any]:
    return {**claim.to_json(), "needs": claim.needs, "kind": known.experiment_of(claim).kind,
            "conditions": known.conditions_of(claim)}


def _machine(*, measure: bool = False) -> tuple[Hardware, Software]:
    from powertrain.facts.hardware import read_hardware
    from powertrain.facts.software import read_software

    return read_hardware(cache_folder(), measure=measure), read_software()


def run(ids: Annotated[list[str] | None, typer.Argument(metavar="[ID ...]", help="Claims to measure (default: all "
                                                        "that this machine can decide).", show_default=False)] = None,
        budget: Budget = "1h", study: StudyName = None, as_json: Json = False) -> None:
    """Measure claims on this machine, each with its own experiment."""
    from powertrain.claims import claim as claims
    from powertrain.claims import probes
    from powertrain.claims import session as sessions
    from powertrain.evidence import studies
    from powertrain.evidence.clock import Arena

    deadline = time.monotonic() + budget_s(budget)
    known, (hardware, software) = claims.catalogue(), _machine(measure=True)
    before = sessions.known_verdicts(studies.STUDIES, hardware.fingerprint)
    chosen = _chosen(known, ids or [], before)
    folder = studies.new_folder("claims", study)
    _train_bases(known, [claim for claim in chosen if claims.why_not(claim.needs, hardware, software) is None])
    began, circumstances = time.monotonic(), studies.circumstances(hardware, software)

    def keep(session: sessions.ClaimSession) -> None:
        found = session.study(folder.name, circumstances, time.monotonic() - began)
        studies.save(folder, found, {"hardware": hardware, "software": software}, over=True)

    with tempfile.TemporaryDirectory(prefix="powertrain-claims-") as scratch, Arena(cache_folder()) as arena:
        session = sessions.ClaimSession(known, probes.Context(cache_folder(), deadline, arena, Path(scratch)), say, keep)
        try:
            session.decide(chosen, hardware, software)
        except KeyboardInterrupt:
            say(f"stopped; what was found is in {folder}/. Continue with: powertrain claims run")
            raise
    _print_session(session, folder, as_json=as_json)


def _chosen(known: Catalogue, ids: Sequence[str], before: Mapping[str, Mapping[str, Any]]) -> tuple[Claim, ...]:
    """Return the requested claims; else the claims without a verdict on this machine, or all if every claim has a verdict."""
    from powertrain.claims.session import in_turn

    if not ids:
        by_id = {claim.id: claim for claim in known.claims}
        return tuple(by_id[name] for name in in_turn(list(by_id), before))
    try:
        return known.find(ids)
    except KeyError as error:
        raise WrongUse(f"there is no claim {error.args[0]!r}; `powertrain claims list` shows them all") from None


def _train_bases(known: Catalogue, claims: Sequence[Claim]) -> None:
    """Train the base models that the experiments start from and that nobody has trained."""
    from powertrain.recipe import resolve_words

    for experiment in {claim.experiment: known.experiment_of(claim) for claim in claims}.values():
        for words in _recipes(experiment):
            train_missing_base(resolve_words(words).recipe, tell)


def _recipes(experiment: Experiment) -> list[list[str]]:
    if experiment.kind == "arms":
        return [[*experiment.words, *experiment.a], [*experiment.words, *experiment.b]]
    words = experiment.settings.get("words")
    return [words] if isinstance(words, list) else []


def _print_session(session: ClaimSession, folder: Path, *, as_json: bool) -> None:
    rows = session.rows_as_json()
    if as_json:
        output.print_json(*({"event": "finding", **row} for row in rows))
        output.print_json({"event": "study", "folder": str(folder), "noise_floor": session.noise_floor, "left": session.left})
        return
    output.print_rows([_shown({**row, "study": None}) for row in rows])
    if session.noise_floor is not None:
        output.print_rows([("Noise", f"equal arms differ by up to {session.noise_floor:.1%} here")])
    if session.left:
        output.print_rows([("Left", f"no time for {len(session.left)} experiments ({', '.join(session.left)}); continue with: "
                                    "powertrain claims run")])
    output.print_rows([("Study", f"{folder}/")])


def report(as_json: Json = False) -> None:
    """Show each claim with its measurement and verdict."""
    from powertrain.claims.claim import VERDICTS, catalogue
    from powertrain.claims.session import known_verdicts
    from powertrain.evidence.studies import STUDIES

    known, (hardware, software) = catalogue(), _machine()
    found = known_verdicts(STUDIES, hardware.fingerprint)
    rows = [_report_row(known, claim, found.get(claim.id), hardware, software) for claim in known.claims]
    if as_json:
        output.print_json(*({"event": "claim", **row} for row in rows))
        return
    for document, setting in known.documents.items():
        output.print_rows([(document, "", setting), *(_shown(row) for row in rows if row["document"] == document)])
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (*VERDICTS, None)}
    output.print_rows([(verdict or "not measured yet", str(count)) for verdict, count in counts.items() if count])


def _shown(row: Mapping[str, Any]) -> tuple[str, str, str]:
    where = f" ({row['study']})" if row["study"] else ""
    said = f"{row['what']}. Claimed: {row['claimed']}. "
    if row["verdict"] is None:
        return row["id"], "-", said + row["because"]
    found = f"Measured: {row['because']}" if row["measured"] else row["because"]
    return row["id"], row["verdict"], f"{said}{found}{where}"


def _report_row(known: Catalogue, claim: Claim, last: Mapping[str, Any] | None, hardware: Hardware,
                software: Software) -> dict[str, Any]:
    """Return a claim with its newest verdict here, or with the reason why this machine cannot decide the claim."""
    from powertrain.claims.claim import why_not

    row = {**_plain(known, claim), "measured": None, "verdict": None, "parity": None, "study": None,
           "because": f"not measured yet: powertrain claims run {claim.id}"}
    if last is not None:
        return row | {name: last[name] for name in ("measured", "verdict", "because", "parity", "conditions", "study")}
    reason = why_not(claim.needs, hardware, software)
    return row if reason is None else row | {"verdict": NOT_HERE, "because": reason}


commands = group("List and measure the speed claims of five training systems.", {
    "list": show_list, "run": run, "report": report})
