"""The page of a study: what was measured, what it says, and how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from powertrain.records import WrongUse
from powertrain.report import study_ablation, study_cases, study_claims, study_kinds, study_older
from powertrain.report.comparisons import Findings, Study, compared
from powertrain.report.figures import duration, memory
from powertrain.report.page import Block, Code, Page, Section, facts

KINDS: Mapping[str, Callable[[Study], Findings]] = {
    "ablation": study_ablation.read, "claims": study_claims.read, "tuning": study_kinds.tuning,
    "comparison": study_kinds.comparison, "peers": study_kinds.peers, "bench": study_kinds.bench, "speed": study_kinds.speed,
    "memory": study_kinds.memory_predictions, "diagnosis": study_cases.diagnosis,
    "prepare": study_cases.prepare, "start": study_cases.start}
BUSY = 0.5                   # load of the machine above which a measurement is suspect
MOST_CAUTIONS = 6


def page(study: Study, folder: str, made: str) -> Page:
    """Raises WrongUse for a file that is no study, or of a kind that this version does not know."""
    kind = study.get("kind")
    if kind is None:
        return study_older.page(study, folder, made)
    if kind not in KINDS:
        raise WrongUse(f"{folder} is a study of the kind {kind!r}, which this version does not know (known: "
                       f"{', '.join(KINDS)}); the version that wrote it has a report for it")
    try:
        found = KINDS[kind](study)
        cautions = (*found.cautions, *_circumstances(study))[:MOST_CAUTIONS]
        sections = (*found.sections, Section("How it was measured, and how to repeat it", tuple(_method(study))))
        name = study.get("name") or folder
        return Page(kind, name, study["what"], found.verdict, found.tone, found.numbers, cautions, sections, made)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise WrongUse(f"{folder}/evidence.json is no study as this version writes them ({type(error).__name__}: {error})"
                       ) from None


def _circumstances(study: Study) -> Iterator[str]:
    controls = [one.comparison for one in compared(study) if one.comparison["b"] == f"{one.comparison['a']} again"]
    if controls and controls[0]["verdict"] not in ("no effect", "inconclusive"):
        yield (f"The arm measured against itself came out as {controls[0]['verdict']}: something on this machine is not even "
               "between two equal runs, and no verdict here is safe.")
    load, cores = study["machine"].get("load"), study["machine"].get("cores")
    if load is not None and load > BUSY:
        yield (f"The machine was not idle: its load was {load:.2g} on {cores} cores when the study was written, the study's "
               "own processes included.")
    commit = study.get("commit")
    if commit is None:
        yield "The commit is not known, so the exact program cannot be found again."
    elif commit.endswith("+"):
        yield f"The program had changes on top of commit {commit[:-1]}, so the commit alone does not repeat the study."
    yield "It holds for this machine, these versions and this recipe; another model or length can turn a verdict round."


def _method(study: Study) -> Iterator[Block]:
    machine, found = study["machine"], compared(study)
    pairs = [one.comparison["pairs"] for one in found]
    load = machine.get("load")
    yield facts("Method", (
        ("what", study["what"]), ("date", study["date"]), ("commit of powertrain", study.get("commit") or "unknown"),
        ("machine", machine.get("name")), ("device", machine.get("device")), ("cores", machine.get("cores")),
        ("memory", memory(machine["memory_bytes"]) if machine.get("memory_bytes") else ""),
        ("load when written", None if load is None else f"{load:.2f}"),
        ("took", duration(study["seconds"]) if study.get("seconds") else ""),
        ("noise floor", f"{study['noise_floor']:.2%} (an arm against itself)" if study.get("noise_floor") is not None else
         "no control was measured"),
        ("n", f"{len(found)} comparisons of {min(pairs)} to {max(pairs)} pairs of windows" if pairs else ""),
        ("statistics", "median of the ratios of paired windows, with the interval that holds it with 95% probability by "
                       "bootstrap; each arm in a process of its own, interleaved A B B A, warm-up left out" if pairs else "")))
    yield facts("Versions", study.get("versions") or {})
    if study.get("command"):
        yield Code(study["command"], "The command that measures it again")
    arms = study.get("arms") or []
    if arms:
        yield Code("\n".join(f"{arm['name']}: powertrain train {' '.join(arm['words'])}".rstrip() for arm in arms),
                   "The arms; their plans are in plans.json")
