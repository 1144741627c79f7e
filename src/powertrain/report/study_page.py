"""The page of a study: what was measured, what it says, and how it was measured.

Studies from before studies had kinds hold step times, a ratio and losses of two or more arms; `older` reads them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from powertrain.records import WrongUse
from powertrain.report import study_ablation, study_audit, study_commands, study_kinds
from powertrain.report.chart import COLOURS, Axis, Plot, Series
from powertrain.report.page import Block, Code, Figure, Findings, Missing, Number, Page, Section, Table, facts
from powertrain.report.study import Study, compared, relative
from powertrain.report.words import duration, memory

KINDS: Mapping[str, Callable[[Study], Findings]] = {
    "ablation": study_ablation.read, "claims": study_kinds.claims, "tuning": study_kinds.tuning,
    "comparison": study_kinds.comparison, "peers": study_kinds.peers, "bench": study_kinds.bench, "speed": study_kinds.speed,
    "memory": study_kinds.memory_predictions, "diagnosis": study_kinds.diagnosis,
    "prepare": study_commands.prepare, "start": study_commands.start, "saving": study_commands.saving,
    "writing": study_commands.writing, "growth": study_commands.growth,
    "page": study_commands.page, "audit": study_audit.audit}
BUSY = 0.5                   # load of the machine above which a measurement is suspect
MOST_CAUTIONS = 6


def page(study: Study, folder: str, made: str) -> Page:
    """Return the page. Raises WrongUse for a file that is no study, or for an unknown kind of study."""
    kind = study.get("kind")
    if kind is not None and kind not in KINDS:
        raise WrongUse(f"{folder} is a study of the kind {kind!r}, which this version does not know (known: "
                       f"{', '.join(KINDS)}); the version that wrote it has a report for it")
    if kind is None and (not isinstance(study.get("arms"), Mapping) or "what" not in study):
        raise WrongUse(f"{folder}/evidence.json has neither a kind nor arms, so it is no study of powertrain")
    try:
        return _older(study, folder, made) if kind is None else _page(study, kind, folder, made)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        versions = "any version" if kind is None else "the kind that it names"
        raise WrongUse(f"{folder}/evidence.json is no study of {versions} ({type(error).__name__}: {error})") from None


def _page(study: Study, kind: str, folder: str, made: str) -> Page:
    found = KINDS[kind](study)
    cautions = (*found.cautions, *_circumstances(study))[:MOST_CAUTIONS]
    sections = (*found.sections, Section("How it was measured, and how to repeat it", tuple(_method(study))))
    return Page(found.verdict, found.tone, found.numbers, cautions, sections, what=kind, title=study.get("name") or folder,
                about=study["what"], made=made)


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
    if arms := study.get("arms"):
        yield Code("\n".join(f"{arm['name']}: powertrain train {' '.join(arm['words'])}".rstrip() for arm in arms),
                   "The arms; their plans are in plans.json")

# ------------------------------------------------------------------------------------------------ studies without a kind


def _older(study: Study, folder: str, made: str) -> Page:
    ratio, times = study.get("step_time_b_over_a") or study.get("speedup"), study.get("step_s") or {}
    largest, verdict, numbers = study.get("largest_difference"), f"{study['what']}.", []
    if ratio is not None:
        middle, span = f"{ratio['ratio']:.3g}", f"{ratio['low']:.3g} to {ratio['high']:.3g}"
        is_speed = "speedup" in study
        verdict = f"{middle} times as fast ({span}): {study['what']}." if is_speed else \
            (f"A step of B takes {middle} times as long as one of A ({span}): B is {' '.join(study['b'])}, A is "
             f"{' '.join(study['a'])}.")
        numbers = [Number(f"x {middle}", "times as fast" if is_speed else "step time of B over A", f"interval {span}")]
    elif study.get("differences"):
        verdict = f"At most {largest:.2g} apart, where {study['allowed']:g} is allowed: {study['what']}."
    elif isinstance(largest, Mapping):
        verdict = "Largest difference of a loss: " + ", ".join(f"{name} {value:.3g}" for name, value in largest.items()) + "."
    numbers += [Number(duration(found["median"]), f"median step of {name}", f"{found['steps']} steps")
                for name, found in times.items()]
    steps: Block = Table(("arm", "median (s)", "lowest (s)", "highest (s)", "steps"), tuple(
        (name, found["median"], found["lowest"], found["highest"], found["steps"]) for name, found in times.items()),
        "Seconds of a step, of all runs of the arm after warm-up") if times else \
        Missing("step times", "The study timed nothing; it compares losses.")
    apart = study.get("differences")
    sections = (Section("Differences", (_differences(apart),)),) if apart else (
        Section("Step times", (steps,)), Section("Losses", tuple(_older_losses(study))))
    return Page(verdict, "open", tuple(numbers), () if apart else (
        "The study has an older form: single steps instead of paired windows, and no A/A control, so the noise of the "
        "machine is not known.",), (*sections, Section("How it was measured", tuple(_older_method(study)))),
        what="study", title=study.get("study") or folder, about=study["what"], made=made)


def _differences(apart: Mapping[str, Mapping[str, float]]) -> Block:
    parts = list(dict.fromkeys(part for found in apart.values() for part in found))
    marks = tuple(Series(part, tuple((float(number), found.get(part)) for number, found in enumerate(apart.values(), 1)),
                         COLOURS[place], "circle") for place, part in enumerate(parts))
    return Figure("differences", f"The largest differences of {len(apart)} cases", (
        Plot(Axis("case"), Axis("largest difference", log=True), marks),), "", (
        Table(("case", *parts), tuple((name, *(found.get(part) for part in parts)) for name, found in apart.items())),))


def _older_losses(study: Mapping[str, Any]) -> Iterator[Block]:
    curves = {name: (runs[0]["losses"], runs[0].get("curves_every_steps") or 1) for name, runs in study["arms"].items()
              if runs and runs[0].get("losses")}
    if not curves:
        yield Missing("losses", "The study holds none.")
        return
    marks = tuple(Series(name, tuple((1.0 + i * every, loss) for i, loss in enumerate(losses)), COLOURS[number % len(COLOURS)])
                  for number, (name, (losses, every)) in enumerate(list(curves.items())[:len(COLOURS)]))
    title = "Loss of the same steps: " + ", ".join(f"{name} ends at {losses[-1]:.4g}" for name, (losses, _) in curves.items())
    yield Figure("losses", title, (Plot(Axis("step"), Axis("loss, nats a token"), marks),),
                 "The first run of each arm, on the same examples.",
                 (Table(("arm", "step", "loss"), tuple((name, 1 + i * every, loss) for name, (losses, every) in curves.items()
                                                       for i, loss in enumerate(losses))),))
    (first, (base, base_every)), *others = curves.items()
    apart = [(name, max((far for a, b in zip(base, losses, strict=False) if (far := relative(a, b)) is not None), default=None))
             for name, (losses, every) in others if every == base_every]
    if apart:
        yield Table(("arm", "largest relative difference"), tuple(apart), f"Losses against those of {first}")


def _older_method(study: Mapping[str, Any]) -> Iterator[Block]:
    yield facts("Method", (("what", study["what"]), ("date", study.get("date")), ("recipe", study.get("recipe")),
                           ("warm-up steps left out", study.get("warm_up_steps")),
                           *((f"machine: {key}", value) for key, value in (study.get("machine") or {}).items())))
    lines = [f"{name}: {' '.join(runs[0]['words'])}" for name, runs in study["arms"].items() if runs and runs[0].get("words")]
    if lines:
        yield Code("\n".join(lines), "What each arm was started with")
