"""`powertrain audit`: findings, reports and patches; with --convert or --verify the equivalent recipe."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli import output as screen
from powertrain.cli.options import Json, Machine, budget_s, cache_folder, say
from powertrain.records import REACHED, WrongUse, to_plain
from powertrain.records.findings import Audit
from powertrain.records.redaction import redacted
from powertrain.report.words import memory, pins_in_words

if TYPE_CHECKING:
    from powertrain.audit.conversion import Conversion
    from powertrain.audit.edits import Patch
    from powertrain.audit.subject import Circumstances, Subject
    from powertrain.audit.verify import Verified

    Where = Callable[[Subject], Circumstances]

MOST_NAMED = 12                              # files left out that are named
STDOUT = Path("-")
REPORTS = (b'{\n "$schema": "https://json.schemastore.org/sarif', b"# Training audit of ")       # how they begin
PUBLISHED = f"published figures, not measured (guess: {REACHED}). The machine's software and cores are not known"
NOT_HERE = ("assumed elsewhere: torch sees no NVIDIA GPU here, and {place} asks for one ({asked}). Rules on hardware and "
            "software are left out; --machine h100, or that machine's facts.json, applies them. "
            "--machine cpu applies them for the CPU of this machine")
TASTE = "the fix changes what is learned, and the finding is small: decide yourself"


def audit(path: Annotated[Path, typer.Argument(help="A training script or config of any trainer, or a folder of such files.",
                                               show_default=False)],
          as_json: Json = False,
          sarif: Annotated[Path | None, typer.Option(help="Also write SARIF 2.1.0 to this file (- for stdout).")] = None,
          markdown: Annotated[Path | None, typer.Option(help="Also write Markdown to this file (- for stdout).")] = None,
          apply: Annotated[bool, typer.Option("--apply", help="Write a patched copy: NAME.patched.py, or --output.")] = False,
          to_recipe: Annotated[bool, typer.Option("--convert", help="Write only the equivalent recipe, to stdout or "
                                                                    "to --output.")] = False,
          verify: Annotated[bool, typer.Option("--verify", help="Run the equivalent recipe and the original's settings, "
                                                                "and print the difference.")] = False,
          output: Annotated[Path | None, typer.Option(help="File for --apply or --convert.")] = None,
          budget: Annotated[str, typer.Option(help="Time for --verify, such as 90s or 2m.")] = "2m",
          elsewhere: Annotated[bool, typer.Option("--elsewhere", help="The training runs on another machine: leave out "
                                                                      "the checks of this machine.")] = False,
          machine: Machine = None,
          verbose: Annotated[bool, typer.Option("--verbose", help="List each setting whose value is known only when the "
                                                                  "script runs.")] = False) -> int:
    """Report what to change in any trainer's script or config.

    A script is read with the modules that it imports from its own project. The files are read, not run.

    Exit code: 0 no finding worse than low, 4 moderate findings, 5 critical findings. With --convert: 0, or 4 where the recipe
    leaves out what the file trains.
    """
    given = {"--convert": to_recipe, "--verify": verify, "--apply": apply, "--sarif": sarif is not None,
             "--markdown": markdown is not None}
    names = [name for name, here in given.items() if here]
    if (to_recipe or verify) and len(names) > 1:
        raise WrongUse(f"{' and '.join(names)} cannot be combined; use one at a time")
    if verify and output is not None:
        raise WrongUse("--verify writes no file; use --output with --convert or --apply")
    if machine is not None and (verify or to_recipe or elsewhere):
        why = "--verify measures on this machine" if verify else "--convert and --elsewhere look at no machine"
        raise WrongUse(f"{why}; leave --machine {machine[:100]} out{', or run the command on that machine' * verify}")
    if verify:
        _verify(path, budget=budget, as_json=as_json)
        return 0
    if to_recipe:
        return _convert(path, output, as_json=as_json)
    return audit_files(path, as_json=as_json, sarif=sarif, markdown=markdown, apply=apply, destination=output,
                       elsewhere=elsewhere, machine=machine, verbose=verbose)


def audit_files(path: Path, *, as_json: bool = False, sarif: Path | None = None, markdown: Path | None = None, apply: bool,
                destination: Path | None, elsewhere: bool, machine: str | None = None, verbose: bool = False) -> int:
    """Audit a file, or each script and config in a folder; return the exit code, by severity."""
    from powertrain.audit.edits import read
    from powertrain.records.version import VERSION
    from powertrain.report import audit as report

    if destination is not None and not apply:
        raise WrongUse("--output names the file of --apply or --convert; add one of these options")
    if [as_json, sarif == STDOUT, markdown == STDOUT].count(True) > 1:
        raise WrongUse("only one of --json, --sarif - and --markdown - can write to stdout; give the others a file")
    audits, skipped = _audits(path, _circumstances(elsewhere, machine))
    edited = {edit.file for found in audits for finding in found.findings for edit in finding.cure.edits}
    texts = {file: read(Path(file)) for file in sorted(edited)}
    for file in (sarif, markdown):
        if file is not None and file.exists() and file.resolve() in {Path(found.subject).resolve() for found in audits}:
            raise WrongUse(f"{file} is the audited file; give the report another name")
        if file is not None and file.is_file() and file.stat().st_size and not _is_report(file):
            raise WrongUse(f"{file} is there already and no report of an audit; give the report another name")
    aside = STDOUT in (sarif, markdown)      # stdout holds another report
    _show(audits, skipped, as_json=as_json, aside=aside, verbose=verbose)
    if markdown is not None:
        _write(markdown, "\n".join(report.markdown(found, texts) for found in audits))
    if sarif is not None:
        log = report.sarif(audits, VERSION, texts, Path.cwd())
        _write(sarif, json.dumps(log, indent=1, ensure_ascii=False) + "\n")
    if apply:
        _apply(audits, destination, as_json=as_json, aside=as_json or aside)
    return screen.BY_SEVERITY[screen.worst(finding for found in audits for finding in found.findings)]


def _audits(path: Path, where: Where) -> tuple[list[Audit], list[Path]]:
    """Return an audit of the file, or of each training script and config of a folder, and the other files of the folder."""
    from powertrain.audit.audit import audit_subject, files_in, read_subject

    if not path.is_dir():
        subject = read_subject(path)
        found = audit_subject(subject, where(subject))
        if not found.findings and not _trains(subject):
            raise WrongUse(f"{path} trains nothing: it makes no Trainer or TrainingArguments, no loop calls backward(), and it "
                           "sets no key of a known trainer")
        return [found], []
    audits, skipped, parts = [], [], set[Path]()
    for file in files_in(path):
        try:
            subject = read_subject(file, path)
        except WrongUse:
            skipped.append(file)                         # a JSON of data, a YAML of something else
            continue
        if _trains(subject):
            parts |= {module.file for module in subject.script.modules} if subject.script is not None else set()
            audits.append(audit_subject(subject, where(subject)))
        else:
            skipped.append(file)
    # a module of a training is judged with the script that imports it
    audits = [found for found in audits if Path(found.subject).resolve() not in parts]
    if not audits:
        raise WrongUse(f"there is no training script or config in {path}/; name one file to see why it was not read")
    return audits, skipped


def _trains(subject: Subject) -> bool:
    script = subject.script
    return bool(subject.settings or subject.unknown) or (script is not None and script.trains)


def _circumstances(elsewhere: bool, machine: str | None) -> Where:
    """Return a function that gives what a subject is judged by: this machine, another one or none; its data and model."""
    from powertrain.audit.subject import Circumstances

    if elsewhere:
        return lambda subject: Circumstances()
    from powertrain.audit.device import asks_for_cuda
    from powertrain.audit.verify import facts_beside
    from powertrain.facts.clusters import machine_and_software
    from powertrain.facts.hardware import read_hardware
    from powertrain.facts.software import read_software

    hardware, installed = machine_and_software(machine, cache_folder()) if machine else (
        read_hardware(cache_folder(), measure=False), read_software())
    published = hardware.basis != "measured"
    measured_there = machine is not None and machine.endswith(".json")
    source = PUBLISHED if published else f"measured there ({machine})" if measured_there else ""
    known = Circumstances(hardware, None if published else installed, other=source)

    def where(subject: Subject) -> Circumstances:
        asked = None if machine or hardware.device == "cuda" else asks_for_cuda(subject, hardware.device)
        given = known if asked is None else Circumstances(other=NOT_HERE.format(asked=asked.what, place=asked.place))
        found = facts_beside(subject, cache_folder(), say, hardware if machine or asked else None)
        return replace(given, not_looked_at=found) if isinstance(found, str) else \
            replace(given, hardware=given.hardware and found.hardware, facts=found)

    return where


def _show(audits: Sequence[Audit], skipped: Sequence[Path], *, as_json: bool, aside: bool, verbose: bool) -> None:
    from powertrain.report import audit as report

    if as_json:
        for found in audits:
            severity = screen.worst(found.findings)
            screen.print_json({"event": "audit", **report.plain(found), "severity": severity,
                               "exit_code": screen.BY_SEVERITY[severity]})
    elif not aside:
        for number, found in enumerate(audits):
            rows = list(report.terminal_rows(found, verbose=verbose))
            screen.print_rows([("", ""), *rows] if number else rows)
        if len(audits) > 1:
            everything = tuple(finding for found in audits for finding in found.findings)
            screen.print_rows([("", ""), ("Together", f"{report.counted(everything)} in {len(audits)} files")])
    if skipped:
        more = len(skipped) - MOST_NAMED
        names = ", ".join(map(str, skipped[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
        screen.print_rows([("Left out", f"{names}: neither a training script nor a known config")], stderr=True)


def _is_report(path: Path) -> bool:
    """Return whether a file is a report that an audit has written, and may write again."""
    with open(path, "rb") as file:
        return file.read(len(max(REPORTS, key=len))).startswith(REPORTS)


def _write(path: Path, text: str) -> None:
    if path == STDOUT:
        print(redacted(text), end="", flush=True)
    else:
        path.write_text(redacted(text), encoding="utf-8")


def _apply(audits: Sequence[Audit], destination: Path | None, *, as_json: bool, aside: bool) -> None:
    """Write the patched copies, and say what was and was not changed. `aside`: on stderr, as stdout holds another report."""
    from powertrain.audit import edits as patches

    several = len(audits) > 1
    for found in audits:
        # the fix of a small finding is left to the user where it changes the result of the training
        yours = [finding for finding in found.findings
                 if finding.cure.edits and finding.severity == "low" and finding.risk.accuracy != "none"]
        patch = patches.make_patch(finding for finding in found.findings if finding not in yours)
        patch = replace(patch, left_out=(*patch.left_out, *((finding, TASTE) for finding in yours)))
        if not patch.applied:
            nothing = f"nothing: no finding of {found.subject} has a fix that can be written"
            screen.print_rows([("Patched", nothing)], stderr=True)
            continue
        for file in [file for file, text in patch.after.items() if text != patch.before[file]]:
            target = destination / Path(file).name if several and destination is not None else destination
            only = replace(patch, before={file: patch.before[file]}, after={file: patch.after[file]})
            written = patches.write_copy(file, patch.after[file], target or patches.copy_beside(Path(file)))
            if as_json:
                screen.print_json({"event": "patched", "file": file, "written": [str(written)],
                                   "applied": [finding.rule for finding in patch.applied], "diff": str(only),
                                   "left_out": {finding.rule: reason for finding, reason in patch.left_out}})
                continue
            _say_patched(found, only, written, aside=aside)


def _say_patched(found: Audit, patch: Patch, written: Path, *, aside: bool) -> None:
    dealt_with = {finding.rule for finding in (*patch.applied, *(finding for finding, _ in patch.left_out))}
    by_hand = [finding.rule for finding in found.findings if finding.severity != "good" and finding.rule not in dealt_with]
    rows = [("", ""), ("Patched", f"{written}: {', '.join(finding.rule for finding in patch.applied)}"),
            *(("Left out", f"{finding.rule}: {reason}") for finding, reason in patch.left_out)]
    screen.print_rows([*rows, *([("By hand", ", ".join(by_hand))] if by_hand else [])], stderr=aside)
    if not aside:
        print(redacted(f"\n{patch}"), end="", flush=True)


# ------------------------------------------------------------------------------------------------ as a recipe


def _convert(path: Path, out: Path | None, *, as_json: bool) -> int:
    """Write the equivalent recipe to stdout or to `out`, with the account of every key; return the exit code."""
    from powertrain.audit.configs import SUFFIXES, why_recognised
    from powertrain.audit.conversion import account_json, recipe_yaml

    conversion = _converted(path)
    read = conversion.subject.path                       # of a shell script: what it starts
    kind = why_recognised(read) if read.suffix in SUFFIXES else "a training script"
    text = redacted(recipe_yaml(conversion, kind))
    if out is not None:
        if out.exists():
            raise WrongUse(f"{out} already exists; name another file, or delete it")
        out.write_text(text, encoding="utf-8")
    if as_json:
        screen.print_json({"event": "conversion", "path": str(path), "framework": conversion.subject.framework,
                           "recipe": conversion.values, "missing": list(conversion.missing), "keys": account_json(conversion),
                           "written": None if out is None else str(out)})
    elif out is None:
        print(text, end="", flush=True)
    else:
        screen.print_rows(_summary(conversion, out))
    refused = [account.key for account in conversion.accounts if account.fate == "not supported"]
    if refused and not as_json:
        says = f"{', '.join(refused)}: the recipe trains something else than the file here"
        screen.print_rows([("Refused", says)], stderr=True)
    return screen.BY_SEVERITY["moderate"] if refused else 0


def _converted(path: Path) -> Conversion:
    """Return the equivalent recipe. Raises WrongUse for a script that trains nothing."""
    from powertrain.audit.audit import read_subject
    from powertrain.audit.convert import convert
    from powertrain.audit.project import parse

    subject = read_subject(path)
    started = (other for other in subject.others if other.script is not None and other.script.shell and other.script.command)
    subject = next(started, subject)                     # a shell script gives the options too
    if subject.script is not None and not subject.script.trains:
        raise WrongUse(f"{path} trains nothing: it makes no Trainer and calls no backward(); convert the script that trains")
    if subject.script is not None:
        parse(subject.path, subject.script.own_text)     # all of it
    if subject.script is not None and subject.script.unparsed:
        line = subject.script.unparsed.splitlines()[0].strip()
        raise WrongUse(f"a module that {path} imports has a line that Python cannot parse (`{line}`); correct the syntax first")
    return convert(subject)


def _verify(path: Path, *, budget: str, as_json: bool) -> None:
    """Measure the recipe with its plan against the original's settings."""
    from powertrain.audit.verify import verify

    conversion = _converted(path)
    with tempfile.TemporaryDirectory(prefix="powertrain-") as folder:
        found = verify(conversion, Path(folder), cache_folder(), budget_s(budget), say)
    screen.tell({"event": "verification", "path": str(path), "says": found.sentence(), "apart": list(found.apart),
                 "original": dict(found.rendering.pins), "comparison": to_plain(found.comparison),
                 "parity": to_plain(found.parity), "plan": [step.technique.name for step in found.plan.steps]},
                verified_rows(found), as_json=as_json)


def verified_rows(found: Verified) -> list[tuple[str, str]]:
    """Return (title, text) rows: both arms, their measurements, and how the plain arm differs from the original."""
    comparison, parity = found.comparison, found.parity
    rows: list[tuple[str, str]] = [("Original", pins_in_words(found.rendering.pins) or "no technique"),
                                   ("Plan", ", ".join(step.technique.name for step in found.plan.steps) or "no technique")]
    if comparison is not None:
        slow, fast = comparison.tokens_per_s
        original, ours = (memory(peak) for peak in comparison.peak_memory_bytes)
        rows += [("Speed", f"{found.sentence()}, over {comparison.pairs} pairs of windows"),
                 ("Tokens/s", f"{fast:,.0f} against {slow:,.0f}"), ("Memory", f"{ours} against {original} at the peak"),
                 ("Same losses", f"not compared: {found.why_no_parity}" if parity is None else
                  f"{'yes' if parity.holds else 'NO'}: {parity.because}")]
    else:
        rows.append(("Speed", found.sentence()))
    return [*rows, *(("Differs", one) for one in found.apart)]


def _summary(conversion: Conversion, out: Path) -> list[tuple[str, str]]:
    from powertrain.audit.conversion import TITLES, account_rows

    counts = {fate: sum(row[0] == fate for row in account_rows(conversion)) for fate in ("translated", "default", *TITLES)}
    rows = [("Recipe", f"{out}: train it with `powertrain train {out}`"),
            ("Keys", ", ".join(f"{count} {fate}" for fate, count in counts.items() if count))]
    rows += [("Missing", one) for one in conversion.missing]
    for fate, key, said, became in account_rows(conversion):
        if fate in ("not supported", "unknown", "unread"):
            rows.append((fate.capitalize(), f"{said or key}: {became}"))
    return rows
