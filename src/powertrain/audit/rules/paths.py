"""Rules on the files that a run reads and writes: whether they, and the folders that they lie in, are where the code looks."""

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from typing import Any

from powertrain.audit.commands import files_of, project_files, started_lines, text_of
from powertrain.audit.configs import SUFFIXES, read_marked
from powertrain.audit.following import follow
from powertrain.audit.project import load, root_of
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, known, rule
from powertrain.audit.scopes import is_tried, run_nodes
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Shown, Subject
from powertrain.audit.syntax import last_name
from powertrain.audit.values import Made, Table, Unread, beginning, is_known
from powertrain.records import WrongUse
from powertrain.records.findings import Evidence, Place

READING, WRITING, MAKING = known("reading"), known("writing"), known("making_folders")
ASKING = ("exists", "isfile", "isdir", "is_file", "is_dir", "lexists", "glob", "listdir")
SAYING = (*ASKING, "add_argument", "field", "Field", "print", "info", "debug", "warning", "Option")      # of a folder, no more
MODES = ("open", "jsonlines.open", "codecs.open", "numpy.memmap", ".open")           # whose mode says which of the two they do
OPEN = re.compile(r"[~$*?{}<>|%]|://|^/|^[A-Za-z]:|^\s*$")            # in a path that is not, or not only, one below a folder
OF_A_PERSON = re.compile(r"/(?:home|Users)/(?!(?:user|username|ubuntu|jovyan|ec2-user|sagemaker-user|runner|appuser)/)"
                         r"[\w.-]+/.|[A-Za-z]:[\\/]+Users[\\/]")
BRINGING = re.compile(r"mkdir|makedirs|\bcp\b|\bmv\b|\bln\b|\btee\b|wget|curl|unzip|tar |gdown|download|git clone| > |\bput |"
                      r"\bplace|copy|rsync", re.IGNORECASE)
DATA_IN_CONFIG = re.compile(r"[-\s]*([\w.]+)\s*:\s*[\"']?((?:\./)?[\w./-]+\.(?:jsonl?|csv|tsv|parquet|txt|arrow|ya?ml))"
                            r"[\"']?\s*(?:#.*)?")
OF_ADAPTERS = ("peft.PeftModel.from_pretrained", "peft.AutoPeftModelForCausalLM.from_pretrained")
WRITTEN_TO = ("out", "save", "log", "dest", "result")    # in the key of a path that a config has written
MOST_WRITERS = 5
OF_MODELS = ("config.json", "generation_config.json", "tokenizer.json", "vocab.json", "vocab.txt", "merges.txt",
             "adapter_config.json", "tokenizer_config.json", "pytorch_model.bin", "model.safetensors")
MAKES = re.compile(r"mkdir|makedirs|create_dir|mkpath|copytree|system\(|subprocess")      # in code that may make a folder
KEEPS = re.compile(r"save_|output_dir|snapshot_download|Writer|log_?dir|logging_dir")      # and the one that it is given
FIRST_ONE = re.compile(r"rank|process|master", re.IGNORECASE)         # in conditions that hold on one process
PLACE_HELD = re.compile(r"your|my[-_]|[<{$ ]|xxx|example|entity|team|user", re.IGNORECASE)
OF_SHELLS = ("Makefile", "Dockerfile", "README")
FILE_NAMED = re.compile(r"[\w-]\.(py|ya?ml|jsonl?|csv|tsv|parquet|txt)$")


@dataclass(frozen=True)
class Use:
    """A path that a call of the run reads, or writes."""

    path: str
    seen: Shown
    made: Made | None = None


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a value: of a list, of a dictionary of lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (text for item in value for text in _texts(item))
    elif isinstance(value, Table):
        yield from (text for entry in value.entries.values() for text in _texts(entry.value))


def _argument(made: Made, table: dict[str, str]) -> Any:
    """Return the path that a call is given, where it is one of a table; None for another call."""
    name = f".{made.last}" if f".{made.last}" in table and made.name not in table else made.name
    if name not in table:
        return None
    place, _, argument = table[name].partition(" ")
    of_owner = made.owner if place == "self" else None
    return of_owner if place == "self" else made.argument(int(place) if place.isdigit() else 99, argument)


def _writes(made: Made) -> bool | None:
    """Return whether a call that can do both writes; None for one that does one thing only, or of which it is not known."""
    mode = made.argument(0 if made.name not in MODES[:-1] else 2 if "memmap" in made.name else 1, "mode") or "r"
    return any(sign in mode for sign in "wax+") if isinstance(mode, str) else None


def uses(calls: tuple[Made, ...], *, written: bool) -> Iterator[tuple[Made, Any]]:
    """Yield (call, path) of what a script reads, or writes; the path may not be known."""
    for made in calls:
        value = _argument(made, WRITING if written else READING)
        if value is not None and (not (made.name in MODES or f".{made.last}" in MODES) or _writes(made) is written):
            yield made, value


def starts(path: Path, script: Script | None = None) -> list[Path]:
    """Return the folders from which a file of a project may be started: its own, those above it, those that commands name."""
    own = path.resolve()
    root = (script.root if script is not None and script.root else root_of(path)).resolve()
    top = next((each for each in list(own.parents)[:6] if (each / ".git").exists()), root)
    found = {each: None for each in own.parents if each.is_relative_to(top)}
    for line in started_lines(script) if script is not None else ():
        found[line.file.parent] = None
        for text in re.findall(r"\bcd +([\w./-]+)", text_of(line.file)):
            found |= {base / text: None for base in (root, line.file.parent) if (base / text).is_dir()}
    return [each.resolve() for each in found]


def _read(script: Script, subject: Subject) -> Iterator[Use]:
    """Yield the relative paths that a run surely reads, and does not ask for before."""
    reached, asked = set(run_nodes(script)), set[str]()
    for made in subject.calls:
        if made.last in ASKING:
            asked |= {str(item) for item in (made.owner, *made.positional) if isinstance(item, str)}
    for made, value in uses(subject.calls, written=False):
        sure = made.node in reached and not made.doubts and not is_tried(script, made.node)
        yield from (Use(text, made.node, made) for text in _texts(value) if sure and not any(
            text == each or text.startswith(each.rstrip("/") + "/") for each in asked))


def _of_config(subject: Subject) -> Iterator[Use]:
    """Yield the relative paths of data and further configs that a config of a trainer names."""
    lines = subject.path.read_text(encoding="utf-8", errors="replace").splitlines() if subject.framework != "unknown" else []
    for number, line in enumerate(lines, 1):
        matched = DATA_IN_CONFIG.fullmatch(line)
        if matched and not any(word in matched[1].lower() for word in WRITTEN_TO):
            yield Use(matched[2], Evidence(line.strip(), Place(str(subject.path), number)))
    if subject.framework == "llama-factory" and isinstance(folder := subject.value("data.dataset_dir"), str):
        yield Use(f"{folder}/dataset_info.json", "data.dataset_dir")
        listed = subject.value("data.source")
        for file in [root_of(subject.path) / folder / "dataset_info.json"]:
            with suppress(WrongUse, OSError, RecursionError):
                for name, said in read_marked(file).inner.items() if file.is_file() else ():
                    named = said.inner.get("file_name") if name in (listed if isinstance(listed, list) else [listed]) else None
                    if named is not None:
                        place = Place(str(file), named.line)
                        yield Use(f"{folder}/{named.value}", Evidence(f"file_name: {named.value}", place))


@rule
def file_elsewhere(subject: Subject, where: Circumstances) -> Findings:
    """A file is read where the project does not have it, and it lies or is written somewhere else."""
    script, path = subject.script, subject.path
    read = list(_read(script, subject)) if script is not None and path.suffix == ".py" else [
        *_of_config(subject)] if script is None and path.suffix != ".py" else []
    folders, root = starts(path, script), root_of(path)
    files = project_files(script) if script is not None else files_of(root) if read else ()
    for use in read:
        name = Path(use.path).name
        if OPEN.search(use.path) or any((folder / use.path).exists() for folder in folders) or _is_brought(files, name):
            continue
        same = [file for file in files if file.name == name]
        others = list(_written_as(root, files, use.path)) if not same else []
        if (folder := Path(use.path).parent.name).strip(".") and _is_brought(files, f"{folder}/"):
            continue
        if len(same) == 1 and not _is_ignored(root, use.path):
            yield found("critical", use.seen, path=use.path, other=_below(root, same[0]), case="there")
            return
        if others and not any(normpath(one / use.path) == normpath(other) for one in folders for other in others):
            yield found("critical", use.seen, path=use.path, other=_below(root, others[0]), case="written")
            return


def _below(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name


def _is_brought(files: tuple[Path, ...], name: str) -> bool:
    """Return whether a shell command or a document of the project may bring a file of this name, or put one into a folder."""
    told = [file for file in files if file.suffix in (".sh", ".bat", ".md", ".ipynb") or file.name in OF_SHELLS]
    lines = [line for file in told for line in text_of(file).splitlines()]
    return any(name in line and BRINGING.search(line) for line in lines)


def _is_ignored(root: Path, path: str) -> bool:
    """Return whether .gitignore names a file or a folder that it lies in, so that it is made by hand."""
    words = {word.strip("/*") for word in text_of(root / ".gitignore").split()} - {""}
    return not words.isdisjoint({*Path(path).parts, Path(path).as_posix(), f".{path.rpartition('.')[2]}"})


def _written_as(root: Path, files: tuple[Path, ...], path: str) -> tuple[Path, ...]:
    """Return where the project's scripts write a file of this name; none where one may do so elsewhere, or knows its folder."""
    name, folder = Path(path).name, Path(path).parent.as_posix()
    found: list[Path] = []
    writers = [file for file in files if file.suffix == ".py" and name in text_of(file)] if name not in OF_MODELS else []
    if folder != "." and any(re.search(rf"['\"/]{re.escape(folder)}/?['\"]", text_of(file)) for file in writers):
        return ()
    for file in writers[:MOST_WRITERS]:
        with suppress(WrongUse, RecursionError):
            for _, value in uses(tuple(follow(load(file, root=root)).calls), written=True):
                if isinstance(value, Unread) and name in value.because:
                    return ()
                found += [folder / text for text in _texts(value) if Path(text).name == name and not OPEN.search(text)
                          for folder in starts(file)]
    return tuple(found)


@code_rule
def default_config_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The config that an option has by default is not there, and others are."""
    files, root = project_files(script), root_of(script.path)
    for made in subject.calls if script.path.suffix == ".py" else ():
        value = made.get("default") if made.last == "add_argument" else None
        flags = [flag for flag in made.positional if isinstance(flag, str)]
        given = any(flag in line.words for line in started_lines(script) for flag in flags)
        if given or not isinstance(value, str) or not value.endswith(SUFFIXES) or OPEN.search(value) or not any(
                "conf" in flag for flag in flags):
            continue
        others = [file for file in files if file.suffix == Path(value).suffix and "conf" in _below(root, file)]
        there = any((folder / value).exists() for folder in starts(script.path, script)) or any(
            file.name == Path(value).name for file in others)
        if others and not there and not _is_ignored(root, value) and not _is_brought(files, Path(value).name):
            yield found("critical", made.node, path=value, other=_below(root, others[0]))
            return


@code_rule
def folder_never_made(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A file is written into a folder that the project does not have, and that nothing makes."""
    reached, folders = set(run_nodes(script)), starts(script.path, script)
    if script.path.suffix != ".py":
        return
    given = [text for made in subject.calls if _argument(made, WRITING) is None and made.last not in SAYING
             for value in (made.owner, *made.positional, *(each.value for each in made.named.values()))
             for text in _texts(value if not isinstance(value, (Made, Table)) else None) if text]
    makers = [made for made in subject.calls if made.last in MAKING]
    begun = [(made, beginning(value)) for made in makers for value in (made.owner, *made.positional, *(
        each.value for each in made.named.values())) if not is_known(value) or isinstance(value, str)]
    if any(not each for made in makers for each in [next(filter(None, map(beginning, (made.owner, *made.positional))), "")]):
        return                                           # what it makes is not known
    for made, value in uses(subject.calls, written=True):
        folder = beginning(value).rpartition("/")[0]
        if OPEN.search(folder) or not folder.strip("./") or made.node not in reached or is_tried(script, made.node):
            continue
        own = Path(folder).as_posix()
        if own == "outputs" and script.has_call("hydra.main"):       # which makes it
            continue
        near = [each for each in (*given, *(each for maker, each in begun if maker is not made))
                if Path(each).as_posix().startswith(own)]
        if near or any((each / folder).exists() for each in folders) or _is_made_elsewhere(script, own):
            continue
        yield found("critical", made.node, folder=own)
        return


def _is_made_elsewhere(script: Script, folder: str) -> bool:
    """Return whether another file of the project makes a folder, or may have it for its own output."""
    own = {script.path.resolve(), *(module.file for module in script.modules)}
    for file in project_files(script):
        text = text_of(file) if file not in own else ""
        if folder not in text:
            continue
        whole = file.suffix in (".yaml", ".yml", ".json", ".toml") and re.search(rf"{re.escape(folder)}/?['\"\s]", text)
        told = (file.suffix in (".sh", ".bat", ".md") or file.name in OF_SHELLS) and any(
            folder in line and BRINGING.search(line) for line in text.splitlines())
        alone = re.search(rf"['\"](\./)?{re.escape(folder)}/?['\"]", text) or MAKES.search(text)
        if whole or told or (file.suffix in (".py", ".ipynb") and (alone or any(
                KEEPS.search(line) for line in text.splitlines() if folder in line))):
            return True
    return False


@code_rule_once
def no_folder_fits(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """What the run needs is found from different working folders, and from none of them all of it."""
    folders = {*starts(script.path, script), *(file.parent for file in project_files(script))}
    needed: list[tuple[str, Shown]] = []
    if (command := script.command) is not None and not re.search(r"\bcd\b", text_of(Path(command.place.file))):
        needed = [(word.partition("=")[2] or word, Evidence(word, command.place)) for word in (
            *command.starter, command.called, *command.words) if FILE_NAMED.search(word)]
    if script.path.suffix == ".py":
        needed += [(use.path, use.seen) for use in _read(script, subject)]
    fitting = [(path, seen, {folder for folder in folders if (folder / path).is_file()})
               for path, seen in needed if not OPEN.search(path)]
    fitting = [each for each in fitting if each[2]]
    for path, seen, mine in fitting:
        for other, theirs_seen, theirs in fitting:
            if not mine & theirs:
                yield found("critical", seen, theirs_seen, path=path, other=other)
                return


@code_rule_once
def path_of_author(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The run reads a path of its author's own machine, and no option changes it."""
    optional = "\n".join(script.words(call) for call in script.calls(
        ".add_argument", "dataclasses.field", "typer.Option", "click.option", "os.environ.get", "os.getenv"))
    named = [(made, value) for made in subject.calls if made.last in ("from_pretrained", "load_dataset") and not made.doubts
             and isinstance(value := next(iter(made.positional), None), str)]
    loads = [Use(value, made.node) for made, value in named if not is_tried(script, made.node)]
    for use in (*_read(script, subject), *loads) if script.path.suffix == ".py" else ():
        begins = OF_A_PERSON.match(use.path)
        if begins and not Path(use.path).exists() and begins[0] not in optional and script.command is None:
            yield found("critical", use.seen, path=use.path)


@code_rule_once
def team_of_author(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The run logs to a team of Weights & Biases, of which only its author is a member."""
    if re.search(r"offline|disabled|anonymous|dryrun", script.text) or script.path.suffix != ".py":
        return
    for made in subject.calls:
        given = made.get("init_kwargs") if made.last == "init_trackers" else None
        of_wandb = given.entries.get("wandb") if isinstance(given, Table) else None
        given = of_wandb.value if of_wandb is not None else None
        of_team = given.entries.get("entity") if isinstance(given, Table) else None
        team = made.get("entity") if made.name == "wandb.init" else of_team.value if of_team is not None else None
        sure = made.node in run_nodes(script) and not is_tried(script, made.node) and all(map(FIRST_ONE.search, made.doubts))
        if sure and isinstance(team, str) and team and not PLACE_HELD.search(team):
            yield found("critical", made.node, name=team)


@code_rule_once
def adapter_not_there(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Adapters are loaded from a folder that nothing has saved."""
    loads = [made for made in subject.calls if made.name in OF_ADAPTERS]
    for made in loads:
        name = made.argument(0 if "Auto" in made.name else 1, "model_id")
        folder = Path(str(name)).as_posix()
        sure = made.node in run_nodes(script) and not made.doubts and not is_tried(script, made.node)
        if not sure or not isinstance(name, str) or not re.fullmatch(r"(\./)?[\w.-]+/?", name):
            continue
        given = {Path(each).as_posix() for other in subject.calls if other.last not in ("from_pretrained", "push_to_hub")
                 for value in (*other.positional, *(item.value for item in other.named.values()))
                 for each in [beginning(value)] if each}
        saved = any(each == folder or each.startswith(folder + "/") for each in given) or any(
            word in last_name(call.func) for call in script.every(ast.Call) for word in ("copy", "move", "download"))
        spoken = any(folder in text_of(file) for file in project_files(script) if file != script.path.resolve())
        if not saved and not spoken and not any((each / folder).exists() for each in script.path.resolve().parents):
            yield found("critical", made.node, name=name)
