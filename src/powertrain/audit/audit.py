"""One file -> its subject -> its audit: every rule asked, causes that another finding explains dropped, the worst first."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from powertrain.audit.command_lines import settings_of
from powertrain.audit.commands import options_told, started_by, text_of
from powertrain.audit.configs import SUFFIXES, Marked, read_config, recognise
from powertrain.audit.edits import make_patch
from powertrain.audit.launches import NOTEBOOK, user_of
from powertrain.audit.parsing import notebook_code
from powertrain.audit.project import root_of, walked
from powertrain.audit.reading_script import read_script
from powertrain.audit.rules import RULES
from powertrain.audit.rules.base import known
from powertrain.audit.script import Command
from powertrain.audit.subject import Circumstances, Setting, Subject
from powertrain.audit.values import FILLED_IN
from powertrain.records import WrongUse
from powertrain.records.findings import SEVERITIES, Audit, Finding, worst_first

MOST_FILES = 500                             # of a folder: more is no project of one training
WITH_OTHER_OPTIONS = "started with other options than the project gives it"
SHELL = ".sh"
OLD_STARTER = "train_bash"                   # of LLaMA-Factory
SHOWN_VERSIONS = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "flash-attn", "deepspeed")


def read_subject(path: Path, root: Path | None = None) -> Subject:
    """Return the settings of one file, and of the project below `root`. Raises WrongUse if the file cannot be read."""
    if path.is_dir():
        raise WrongUse(f"{path} is a folder; name one of its files, or audit the folder to have each read by itself")
    if not path.exists():
        raise WrongUse(f"{path} does not exist; give the path of a training script (.py, .ipynb, .sh) or config (.yaml, .json)")
    if not path.is_file():
        raise WrongUse(f"{path} is no regular file, and is not opened; give the path of a script or config")
    try:
        return _read(path, root)
    except RecursionError:
        raise WrongUse(f"{path} nests brackets or operators too deep to be followed; is it a program's output?") from None


def _read(path: Path, root: Path | None) -> Subject:
    if path.suffix == ".py":
        subject = read_script(path, root=root)
        if subject.framework == "unknown":
            with suppress(WrongUse):
                return read_config(path)     # a file that only sets values
            return subject
        user = user_of(subject.script) if subject.script is not None else None
        with suppress(WrongUse):
            text = notebook_code(user) if user is not None and user.suffix == NOTEBOOK else None
            used = read_script(user, text, root) if user is not None else subject
            if used.script is not None and path.resolve() in {module.file for module in used.script.modules}:
                used = replace(used, launch=f"used by {used.path.name}")
                return replace(subject, others=(*subject.others, used, *used.others))
        return subject
    if path.suffix == NOTEBOOK:
        return read_script(path, notebook_code(path), root)
    if path.suffix == SHELL:
        return _read_started(path, root)
    if path.suffix not in SUFFIXES:
        raise WrongUse(f"{path} is neither a script (.py), a notebook ({NOTEBOOK}), a shell script ({SHELL}) that starts one, "
                       f"nor a config ({', '.join(SUFFIXES)})")
    return read_config(path)


def _read_started(shell: Path, root: Path | None) -> Subject:
    """Return the subject of the first script or config that trains, of those that a shell script starts."""
    files = [*started_by(shell)]
    by_options = [subject for command in options_told(shell) for subject in _of_options(command)]
    for file in files if not by_options else ():
        with suppress(WrongUse):
            subject = read_script(file, root=root, shell=shell) if file.suffix == ".py" else read_config(file)
            if subject.framework != "unknown":
                return subject
    if by_options:
        return replace(by_options[0], others=tuple(by_options[1:]))
    told = f"{shell} starts {', '.join(dict.fromkeys(map(str, files)))}, which trains nothing" if files else (
        f"{shell} starts no script or config that is there")
    raise WrongUse(f"{told}; name the file that trains")


def _of_options(command: Command) -> Iterator[Subject]:
    """Yield the subject of a command's options, if they are those of a trainer that takes a config too."""
    shell, first = Path(command.place.file), command.place.line
    lines = text_of(shell).splitlines()
    given = {name: Marked(each.value, next((at for at, line in enumerate(lines[first - 1:], first) if re.search(
        rf"--{name}\b", line.replace("-", "_").replace("__", "--"))), first))
        for name, each in settings_of(command).items()}
    with suppress(WrongUse):
        found = Marked({name: each.value for name, each in given.items()}, first, given)
        subject = recognise(found, shell)[0].subject(shell, found)
        gone = Path(command.called).stem == OLD_STARTER and not any(root_of(shell).rglob(f"{OLD_STARTER}.py"))
        open_ones = {key for key, each in subject.settings.items() if FILLED_IN.search(str(each.value))}
        yield replace(subject, launch=f"by the command in line {first}",
                      keys={**subject.keys, **({OLD_STARTER: Marked(command.called, first)} if gone else {})},
                      settings={key: each for key, each in subject.settings.items() if key not in open_ones},
                      unread={key: replace(subject.settings[key], value=None) for key in open_ones})


def files_in(path: Path) -> list[Path]:
    """Return the file itself, or the scripts and configs of a folder and the folders in it. Raises WrongUse for too many."""
    if not path.is_dir():
        return [path]
    found: list[Path] = []
    for files in walked(path):
        found += (file for file in files if file.suffix in (".py", NOTEBOOK, *SUFFIXES))
        if len(found) > MOST_FILES:
            raise WrongUse(f"{path} has more than {MOST_FILES} scripts and configs; audit one of its folders or files")
    return found


class _Asked(dict[str, Setting]):
    """Settings that remember which of them were asked for, so that an audit can say what an unread one leaves open."""

    def __init__(self, settings: Mapping[str, Setting], asked: set[str]) -> None:
        super().__init__(settings)
        self.asked = asked

    def get(self, key: str, default: Setting | None = None) -> Setting | None:     # type: ignore[override]
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def audit(path: Path, where: Circumstances | None = None) -> Audit:
    """Audit one script or config. Raises WrongUse if the file cannot be read."""
    return audit_subject(read_subject(path), where or Circumstances())


def audit_subject(subject: Subject, where: Circumstances) -> Audit:
    """Return the audit of what was read. Raises WrongUse where a script nests too deep to be followed."""
    try:
        found, depends = _ask_each(subject, where)
        if subject.path.suffix in (NOTEBOOK, SHELL):         # lines of JSON, and options of a command: no patch fits
            found = [replace(one, cure=replace(one.cure, edits=())) for one in found]
        kept = with_good_patches(subject, where, worst_first(found, RULES))
        kind = f"{'config' if subject.script is None else 'script'}: {subject.framework}"
        return Audit(str(subject.path), kind, environment(subject, where), kept, tuple(undetermined(subject, depends)),
                     {"rules": len(RULES), "settings": len(subject.settings),
                      "dropped": [one.rule for one in found if one.rule not in {other.rule for other in kept}]})
    except RecursionError:
        raise WrongUse(f"{subject.path} nests brackets or operators too deep to follow; is it a program's output?") from None


def _ask_each(subject: Subject, where: Circumstances) -> tuple[list[Finding], dict[str, list[str]]]:
    """Return the findings of each way to start the subject; what holds in one of them only says so."""
    found, depends = _ask(subject, where)
    told = [one.rule for one in found]
    for other in subject.others:
        theirs = [one for one in _ask(other, where)[0] if one.severity != "good"]
        rules = {one.rule for one in theirs}             # the same cause, perhaps seen at other lines
        commanded = other.script is not None and other.script.command is not None
        rules |= {*told} if other.path != subject.path else set()        # by the script that uses it
        rules |= {*known("rules_on_what_lacks").split()} if commanded else set()         # which are not asked of a command
        found = [one if one.rule in rules or one.when or one.severity == "good" or one.rule not in told
                 else replace(one, when=WITH_OTHER_OPTIONS if commanded else subject.launch) for one in found]
        seen = {one.rule for one in found}
        found += [replace(one, when=one.when or other.launch) for one in theirs if one.rule not in seen]
    return found, depends


def _ask(subject: Subject, where: Circumstances) -> tuple[list[Finding], dict[str, list[str]]]:
    """Return the findings, and for each unread setting the rules that asked for it and found nothing."""
    found: list[Finding] = []
    depends: dict[str, list[str]] = {}
    for rule in RULES:
        asked: set[str] = set()
        watched = replace(subject, settings=_Asked(subject.settings, asked), unread=_Asked(subject.unread, asked))
        findings = list(rule.find(watched, where))
        found += findings
        for key in sorted(asked & set(subject.unread)) if not findings else ():
            depends.setdefault(key, []).append(rule.name)
    return found, depends


def with_good_patches(subject: Subject, where: Circumstances, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return the findings without the patches after which the script would be no better: the patched text is audited again."""
    fixes = [finding for finding in findings if finding.cure.edits]
    if subject.script is None or not fixes or _is_better(subject, where, findings, fixes):
        return findings
    bad = [finding for finding in fixes if not _is_better(subject, where, findings, [finding])]
    return tuple(replace(finding, cure=replace(finding.cure, edits=())) if finding in bad else finding for finding in findings)


def _is_better(subject: Subject, where: Circumstances, before: Sequence[Finding], fixes: Sequence[Finding]) -> bool:
    """Return whether these fixes fit together and leave fewer or less severe findings."""
    patch = make_patch(fixes)
    try:
        after = read_script(subject.path, patch.after[str(subject.path)])
    except (WrongUse, SyntaxError, KeyError):
        return False
    left = worst_first(_ask(after, where)[0], RULES)
    severe = [[*(sum(finding.severity == severity for finding in findings) for severity in SEVERITIES[:-1]),
               sum(len(finding.evidence) for finding in findings if finding.severity != "good")] for findings in (before, left)]
    return bool(patch.applied) and severe[1] < severe[0]


def environment(subject: Subject, where: Circumstances) -> dict[str, str]:
    """Return the model that the file trains and the machine it would run on, as far as each is known."""
    said: dict[str, str] = {}
    script = subject.script
    if script is not None and script.modules:
        names = [module.path.name for module in script.modules]
        read = "1 module of it is read" if len(names) == 1 else f"{len(names)} modules of it are read"
        said["project"] = f"{read}: {', '.join(names[:6])}{', ...' * (len(names) > 6)}"
    if script is not None and script.notes:
        said["imports"] = "; ".join(script.notes)
    if subject.value("model.path") is not None:
        said["model"] = str(subject.value("model.path"))
    hardware, software = where.hardware, where.software
    name = ""
    if hardware is not None:
        memory = hardware.memory_bytes / 2**30
        name = f"{where.devices} x {hardware.name}, {memory:.0f} GiB" if hardware.device != "cpu" else (
            f"{hardware.name}, {hardware.cores} cores, {memory:.0f} GiB, no GPU")
    said["machine"] = "; ".join(filter(None, (name, where.other))) or "not checked"
    versions = software.versions if software is not None else {}
    if where.facts is not None:
        data, model = where.facts.data, where.facts.model
        said["its data"] = f"{data.examples:,} examples of {data.block} tokens on average, {model.parameters:,} parameters"
    elif where.not_looked_at:
        said["its data"] = f"not checked: {where.not_looked_at}"
    installed = [f"{part} {versions[part]}" for part in SHOWN_VERSIONS if part in versions]
    return said | ({f"installed {'there' if where.other else 'here'}": ", ".join(installed)} if installed else {})


def undetermined(subject: Subject, depends: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield what is known only when the file runs, with the rules that could not be decided for it."""
    script = subject.script
    if script is not None:
        yield from (f"{script.place(call)}: {script.words(call)} may change any value that is set before it"
                    for call in script.calls("exec"))
    for key, setting in subject.unread.items():
        if key in depends:
            yield f"{setting.place}: {setting.spelled}; not decided for it: {', '.join(depends[key])}"
    if rest := [key for key in subject.unread if key not in depends]:
        yield f"{', '.join(rest)}: only running it would tell, and no rule asks for {'it' if len(rest) == 1 else 'them'}"
