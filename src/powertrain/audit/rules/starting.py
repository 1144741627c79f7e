"""Rules on how the project starts the script: the commands in its shell scripts and README, and the configs they name."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice, pairwise
from pathlib import Path

from powertrain.audit.command_lines import is_option, of_hydra, read_by_argparse
from powertrain.audit.commands import commands, project_files, shown, started_lines, text_of
from powertrain.audit.configs import SUFFIXES, read_marked
from powertrain.audit.installed import LIBRARIES, in_force, parameters
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, known
from powertrain.audit.rules.calls import of_library
from powertrain.audit.rules.names import is_own
from powertrain.audit.rules.program import SEARCHED, is_installed
from powertrain.audit.scopes import is_tried, trees_of
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import every, last_name
from powertrain.records import WrongUse
from powertrain.records.findings import Evidence, Place

OF_PARSERS = frozenset({"help", "config"})   # of argparse, and of TrlParser
OF_ABSL = frozenset(known("absl_flags").split())
# a sentence that names no package to install
PROSE = re.compile(r"\W*(?:\w+\W+){9}")
LISTING = re.compile(r"install|conda|requir|depend|package|librar|need|must have|==|--", re.IGNORECASE)
NO_PROSE = re.compile(r"\w+=[\w.-]+|[\w./-]+\.\w+|\d+")     # a word of a command that is none of a sentence
STARTING = re.compile(r"((nohup|time|sudo|env|exec|\$) )*(\w+=\S* )*\S*(python[\d.]*|torchrun|accelerate launch|deepspeed)"
                      r"( -\S+( [^-\s]\S*)?)*")      # all that stands before the name of a script
NUMBERED = re.compile(r"\d+[a-z]?[_-]")      # a step of several: 01_train.py
# what may read a command line
READING = re.compile(r"argv\b|[Pp]arse|_args\b|\b(click|fire|Fire|typer|hydra|absl|docopt|getopt|tyro|draccus|chz|plac|gin|"
                     r"ml_collections|OmegaConf|cyclopts|defopt|Tap|invoke|stdin|configurator|cli|run_exp)\b|CLI\b|exec\(")
SIMILAR, ALIKE = 0.75, 0.6                   # of two names of files; and of one that takes all options of the command
OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)*=.*")
OF_HANDBOOK = "H4ArgumentParser"             # of the alignment handbook, made from HfArgumentParser
ONCE = frozenset(known("removed_arguments")) - {"tokenizer", "max_seq_length"}       # what other classes may have too
INTO_CLASSES = ("transformers.HfArgumentParser", "trl.TrlParser")
LIKELY = 4                                   # keys that a script takes for each that it does not: a config that is its own
OF_CONFIGS = ("--config", "--config_file", "--config-file", "--config_path", "--deepspeed", "--deepspeed_config", "--ds_config")
MAKING = (">", "cp ", "mv ", "ln ", "tee ", "wget", "curl", "accelerate config", "make ")      # of commands that write a file
PLACEHOLDERS = ("path", "your", "my_", "example")
SAYING = (".txt", ".in", ".md", ".rst", ".toml", ".sh", ".bat", ".yml", ".yaml", ".cfg", ".ipynb", ".lock")
OTHERS = ("setup.py", "Dockerfile", "Makefile", "Pipfile")
LEAVING = ("git clone", "cd ", "submodule")
BRINGING = ("axolotl", "llamafactory", "llama-factory", "lm_eval", "lm-eval", "torchtune", "ms-swift", "setfit", "autotrain")
LISTED, NEEDING = known("packages"), known("packages_of_settings")
OTHER_PATH = re.compile(r"^\s*PYTHONPATH=\S+ .*\bpython\S* .*$", re.MULTILINE)        # of one command alone
OF_ALL = re.compile(r"pip3? install (?=.*\b(torch|transformers)\b)(?!.*\s(-e|-r|git\+|\.))")    # of what a project needs
OF_PACKAGES = ("setup.py", "pyproject.toml")
OF_A_PACKAGE = re.compile(r"install_requires=\[|^dependencies *= *\[|^\[tool\.poetry\.dependencies]", re.MULTILINE)
ALL = 5                                      # words of a command that names more than what is hard to install
INSTALLING = ("PYTHONPATH", "pip install -e", "pip install .", "conda develop")


@code_rule
def command_refused(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The project's own command gives the script an option that it does not take."""
    taken = _taken(script, where)
    added = [made for made in subject.calls if made.last == "add_argument" and script.has_call("argparse.ArgumentParser")]
    keys = _keys_of_hydra(script) if not taken else None
    for command in commands(script):
        lost = [f"--{name}" for name in command.options if not _is_taken(name.replace("-", "_"), taken)] if taken else [
            word for word in command.words if keys and OVERRIDE.fullmatch(word) and re.split(r"[.=]", word)[0] not in keys]
        if taken and not lost and added:
            read = list(read_by_argparse(command, added))
            extra = [words[0] for made, words in read if made is None]
            lost = [word for word in extra if NO_PROSE.fullmatch(word) and not any(map(is_option, extra))]
        if lost:
            shown = f"{' '.join((*command.starter[-2:], script.path.name))} ... {' '.join(lost[:3])}"
            yield found("critical", Evidence(shown, command.place), names=", ".join(dict.fromkeys(lost)))
            return


def _keys_of_hydra(script: Script) -> frozenset[str] | None:
    """Return the keys that a command may set in the config of `@hydra.main`; None where they are not sure."""
    if "ConfigStore" in script.text:
        return None                          # by which code adds configs
    plain = replace(script, command=None)
    for function in script.functions.values():
        module = script.module(function)
        folder = (module.file if module is not None else script.path).parent
        table = of_hydra(function, plain, folder) if getattr(function, "decorator_list", []) else None
        if table is not None:
            groups = [each for each in Path(table.file).parent.iterdir() if each.is_dir()]
            left_out = table.open.partition(":")[0]      # a group whose choice is not there, as `model: ???`
            whole = not table.open or (left_out and not any("_global_" in text_of(file) for group in groups
                                                            for file in group.glob("*.yaml")))
            return frozenset({*table.entries, "hydra", *(each.name for each in groups)}) if whole else None
    return None


@code_rule
def command_line_ignored(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The parser is given an empty list in place of the command line, and the project's commands give options."""
    empty = [call for call in script.calls(".parse_args") if call.args and isinstance(call.args[0], ast.Constant | ast.List)
             and not getattr(call.args[0], "value", None) and not getattr(call.args[0], "elts", None)]
    parsing = list(script.calls(".parse_args", ".parse_known_args", ".parse_args_into_dataclasses"))
    if script.path.suffix == ".py" and script.trains and not READING.search(script.text) and not script.unparsed:
        yield from islice((found("critical", Evidence(" ".join((*command.starter[-1:], script.path.name, *command.words[:6])),
                                                      command.place), case="none") for command in commands(script)
                           if any(not name.startswith(("local", "deepspeed")) for name in command.options)), 1)
    if len(parsing) != 1 or not empty or script.path.suffix != ".py" or script.conditions(empty[0]):
        return
    given = [Evidence(" ".join(command.words[:6]), command.place) for command in commands(script) if next(command.options, "")]
    if script.module(empty[0]) is not None:              # which other scripts of the project have too
        given += [Evidence(" ".join(line.words[:6]), line.place) for line in started_lines(script)
                  if any(word.startswith("--") for word in line.words) and any(word.endswith(".py") for word in line.words)]
    yield found("critical" if given else "moderate", empty[0], *given[:1])


@code_rule
def script_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A command of the project starts a script that the project does not have, and this one has a similar name."""
    files = [file for file in project_files(script) if file.suffix == ".py"]
    names, own = sorted({file.name for file in files}), script.path.resolve()
    for line in started_lines(script):
        at, named = _script_named(script, line.words)
        before, name = line.words[:at], Path(named).name
        options = [word.partition("=")[0] for word in line.words[at:] if word.startswith("--")]
        alike = get_close_matches(name, names, len(names), ALIKE) if len(options) >= LIKELY else []
        mine = own.name in alike and [file for file in files if file.name in alike and all(
            re.search(rf"{option}\b", text_of(file)) for option in options)] == [own]           # which takes them alone
        bases = (script.root or own.parent, line.file.parent)
        beside = "/" in named and own.parent in [(base / named).resolve().parent for base in bases]     # where this script is
        if not STARTING.fullmatch(" ".join(before)) or not (mine or beside or line.file.parent in own.parents) or (
                not beside and any(word in text_of(line.file) for word in LEAVING)):
            continue
        near = sorted({file.name for file in files if file.parent == own.parent}) if beside else names
        closest = [each for each in near if NUMBERED.sub("", each) == NUMBERED.sub("", name)] or get_close_matches(
            name, near, 2, SIMILAR)
        if name not in names and (mine or closest == [own.name]):
            yield found("critical", Evidence(" ".join(line.words[:at + 1]), line.place), name=name, other=own.name)
            return


def _script_named(script: Script, words: tuple[str, ...]) -> tuple[int, str]:
    """Return where a command names the script that it starts, and the script's path, also of a module of the project."""
    for at, word in enumerate(words):
        dotted = at and words[at - 1] == "-m" and "." in word and Path(script.root or ".", word.partition(".")[0]).is_dir()
        if (dotted or word.endswith(".py")) and not set(word) & set("$<>{}*"):
            return at, word.replace(".", "/") + ".py" if dotted else word
    return 0, ""


@code_rule
def config_refused(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A config that the project starts the script with has keys that the script does not take."""
    parsers = _parsers(script) if not script.says("return_remaining_strings") else []        # which gives back the others
    taken = _of_classes(script, parsers[0], where) if len(parsers) == 1 else None
    known_ones = _of_classes(script, parsers[0], where, in_part=True) if len(parsers) == 1 and taken is None else None
    settled = taken if taken is not None else known_ones if known_ones and "output_dir" in known_ones else None
    for file, sure in configs_of(script) if settled is not None else ():
        try:
            keys = read_marked(file).inner
        except WrongUse:
            continue
        lost = {name: each for name, each in keys.items() if name != "env" and name not in (settled or ())
                and (taken is not None or name in ONCE)}
        kept = len(keys) - len(lost)
        if lost and kept and (sure or kept >= LIKELY * len(lost)):
            first = next(iter(lost.values()))
            place = Place(shown(script, file.resolve()), first.line)
            yield found("critical", Evidence(f"{next(iter(lost))}: {first.value}", place), names=", ".join(lost))
            return


def configs_of(script: Script) -> Iterator[tuple[Path, bool]]:
    """Yield the configs that the project starts the script with, and, as not sure, others where the script reads any."""
    root, own = script.root or script.path.parent, script.path.parent
    reads = list(script.calls(".parse_yaml_file", ".parse_json_file"))
    if any(item.arg == "allow_extra_keys" for call in reads for item in call.keywords):
        return
    options = {f"--{node.attr}" for call in reads for node in every(ast.Attribute, call) if node is not call.func
               and isinstance(node.value, ast.Name) and script.origin(node.value) is None}      # args.config, not os.path
    files = [(word, Path(command.place.file).parent) for command in commands(script)
             for before, word in zip(("", *command.words), command.words, strict=False)
             if word.endswith(SUFFIXES) and before in {"", "--config", *options}]
    files += [(str(item.value), own) for call in reads
              for item in (*call.args, *(each.value for each in call.keywords)) if isinstance(item, ast.Constant)]
    for word, folder in files:
        named = [file for file in project_files(script) if file.name == word]
        there = [file for file in (root / word, folder / word) if file.is_file()]
        yield from ((file, True) for file in there or named)
    if reads and not files:
        yield from ((file, False) for file in project_files(script) if file.suffix in SUFFIXES[:2])


@code_rule
def file_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The project's own command names a config that the project does not have."""
    folders = {(script.root or script.path.parent).resolve(), *(file.parent for file in project_files(script))}
    for command in commands(script):
        if re.search(r"\bcd\s+[/$~]", text_of(Path(command.place.file))):
            continue                                     # it is started somewhere else
        for word, after in pairwise((*command.starter, *command.words, "")):
            option, _, joined = word.partition("=")
            name = joined or after
            plain = name.endswith(SUFFIXES) and not name.startswith("/") and not any(
                sign in name.lower() for sign in (*"${}<>*~%:", *PLACEHOLDERS))
            if option in OF_CONFIGS and plain and not any((folder / name).is_file() for folder in folders) and not _is_made(
                    script, Path(name).name):
                yield found("critical", Evidence(f"{option} {name}", command.place), name=name)
                return


@code_rule_once
def rank_under_other_name(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The launcher gives an option that the script knows by another name."""
    flags = {call: {getattr(item, "value", "") for item in call.args} for call in script.calls(".add_argument")}
    added = [call for call, names in flags.items() if "--local_rank" in names and "--local-rank" not in names]
    for command in commands(script) if added and not script.has_call(".parse_known_args") else ():
        if "torch.distributed.launch" in command.starter and not {"--use_env", "--use-env"} & set(command.starter):
            yield found("critical", Evidence(" ".join(command.starter[-4:]), command.place), added[0])


def _is_made(script: Script, name: str) -> bool:
    """Return whether the project may write a file, or leaves it out by .gitignore."""
    root = script.root or script.path.parent
    lines = [line for file in project_files(script) if file.suffix in (".py", ".sh", ".md", ".ipynb") or file.name == "Makefile"
             for line in text_of(file).splitlines() if name in line]
    makes = any(word in line for line in lines for word in MAKING)
    return makes or name in text_of(root / ".gitignore") or any(
        name in text_of(file) for file in project_files(script) if file.suffix in (".py", ".ipynb"))


@code_rule_once
def modules_out_of_reach(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Python does not look where a module of the project is, when the script is started as the project says."""
    own = script.path.resolve()
    said = "\n".join(text_of(file) for file in project_files(script) if (file.suffix in SAYING or file.name.startswith(OTHERS))
                     and (file.suffix != ".ipynb" or own.name in text_of(file)))
    said = OTHER_PATH.sub(lambda line: line[0] if own.name in line[0] else "", said)
    if any(word in said for word in INSTALLING) or any(
            file.name in ("setup.py", "pyproject.toml", "setup.cfg") for file in project_files(script)):
        return
    started = [command for command in commands(script) if not re.search("deepspeed|zero", " ".join(command.starter))
               and command.starter[-1] != "-m"]
    dotted = next((name for name in re.findall(r"-m\s+([\w.]+)", said) if own.with_suffix("").as_posix().endswith(
        "/" + name.replace(".", "/"))), "")
    first_ones = {file.relative_to(own.parent).parts[0] for (node, _), file in script.project.items()
                  if script.module(node) is None and file.is_relative_to(own.parent)}
    packages = {name for name in first_ones if (own.parent / name).is_dir()}        # by whose names the script imports
    if (started and dotted) or not (started or dotted or packages):
        return
    base = own.parent if not dotted else own.parents[dotted.count(".")]      # DeepSpeed adds the folder that it is in
    texts = [script.own_text, *(module.text for module in script.modules if module.file.is_relative_to(base))]
    if any(word in text for word in SEARCHED for text in texts):
        return
    for node in script.nodes:
        names = [((item.name,), item.name) for item in node.names] if isinstance(node, ast.Import) else [
            (("", *(item.name for item in node.names)), node.module)] if isinstance(
                node, ast.ImportFrom) and node.module and not node.level else []
        for keys, name in names:
            first = name.partition(".")[0]
            ours = any((node, key) in script.project for key in keys)
            elsewhere = ours and not any((base / each).exists() for each in (first, f"{first}.py"))
            if elsewhere and not is_installed(first) and not is_tried(script, node) and not script.conditions(node):
                told = Evidence(" ".join(started[0].starter + (own.name,)), started[0].place) if started else None
                yield found("critical", node, *([told] if told else []), name=name, folder=shown(script, base),
                            case="" if started or dotted else "imports")


@code_rule_once
def colab_only(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A script imports google.colab, which is there in Colab alone."""
    for node in script.every(ast.ImportFrom):
        if (node.module or "").startswith("google.colab") and not is_tried(script, node) and trees_of(script) \
                and not script.conditions(node):
            yield found("moderate", node)


@code_rule
def packages_unlisted(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script imports a package that the project's list of what to install does not have."""
    near = [file for file in project_files(script) if file.parent in script.path.resolve().parents
            or file.parent.name == "requirements"]
    lists = [file for file in near if file.suffix == ".txt" and "requirements" in (file.parent.name, file.name[:12])]
    lists = lists or [file for file in near if file.name in OF_PACKAGES and OF_A_PACKAGE.search(text_of(file))]
    said = "\n".join(line.lower() for file in near if file.suffix in SAYING or file.name.startswith(OTHERS)
                     for line in text_of(file).splitlines()
                     if file.suffix != ".md" or LISTING.search(line) or not PROSE.match(line))
    said += "".join(re.findall(r"pip install[^\n]*\n[^\n]*", script.own_text.lower()))
    told = [] if lists else [Evidence(line.strip(), Place(shown(script, file), number)) for file in near
                             if file.suffix in (".md", ".sh") for number, line in enumerate(text_of(file).splitlines(), 1)
                             if OF_ALL.search(line) and len(line.split()) > ALL]
    if not (lists or told) or not any(name in said for name in ("torch", "transformers")) or any(
            name in said for name in BRINGING):
        return                               # the list is of something else, or a framework brings what it needs
    lost: dict[str, ast.AST | str] = {}
    for node in script.nodes:
        names = [item.name for item in node.names] if isinstance(node, ast.Import) else [
            node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in {each.partition(".")[0] for each in names} & set(LISTED):
            if not _is_listed(script, name, said) and not is_tried(script, node) and not script.conditions(node):
                lost.setdefault(name, node)
    for key, values in NEEDING.items():
        for value, name in values.items():
            on = subject.on(key) if value == "on" else str(subject.value(key)) == value
            if on and not _is_listed(script, name, said):
                lost.setdefault(name, key)
    if lost:
        listed_in = told[0] if told else Evidence(lists[0].name, Place(shown(script, lists[0]), 1))
        follows = bool(told) or re.search(r"pip3? install +(-r|-e|\.)|poetry install|uv sync", said) is not None
        yield found("critical" if follows else "moderate", *lost.values(), listed_in, names=", ".join(lost))


def _is_listed(script: Script, name: str, said: str) -> bool:
    return is_own(script, name) or any(each in said for each in (name, *LISTED[name]))


def _is_taken(name: str, taken: frozenset[str] | set[str]) -> bool:
    """Return whether a parser takes an option, by its name or by a beginning that only one has."""
    return name in taken or name.removeprefix("no_") in taken or sum(each.startswith(name) for each in taken) == 1


def _taken(script: Script, where: Circumstances) -> frozenset[str] | None:
    """Return the options that the script takes; None where they are not sure."""
    hf = _parsers(script)
    plain = list(script.calls("argparse.ArgumentParser"))
    if not hf and not plain and script.has_call("absl.app.run") and not script.says("config_flags", "tensorflow"):
        of_absl = [call for call in script.every(ast.Call) if script.name(call).startswith("absl.flags.DEFINE_") and call.args]
        names = {str(getattr(call.args[0], "value", "")) for call in of_absl}
        return OF_ABSL | names | {f"no{name}" for name in names} if names and "" not in names else None
    if len(hf) == 1 and not plain:
        return _of_classes(script, hf[0], where)
    if len(plain) != 1 or hf or script.has_call(".parse_known_args") or script.says(
            "add_subparsers", "add_config_arguments", "add_argparse_args", "parents", "sys.argv"):
        return None
    flags: set[str] = set()
    for call in every(ast.Call, script.tree):
        if last_name(call.func) == "add_argument":
            named = [item.value for item in call.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            if len(named) < len(call.args) or not named:
                return None
            flags |= {name.lstrip("-").replace("-", "_") for name in named}
    handed_on = any(isinstance(item, ast.Name) and "parser" in item.id and last_name(call.func) not in ("add_argument", "print")
                    and script.called(call) is None for call in every(ast.Call, script.tree) for item in call.args)
    return None if handed_on else frozenset(flags) | OF_PARSERS


def _parsers(script: Script) -> list[ast.Call]:
    """Return where HfArgumentParser, TrlParser or a class of the project above one of them is made."""
    own = tuple(name for name, kind in script.classes.items() if any(script.name(base) in INTO_CLASSES for base in kind.bases))
    return [call for call in script.every(ast.Call) if script.name(call) in INTO_CLASSES
            or last_name(call.func) in (*own, OF_HANDBOOK)]


def _of_classes(script: Script, made: ast.Call, where: Circumstances, *, in_part: bool = False) -> frozenset[str] | None:
    """Return the fields of the classes that a parser is given, the project's own and the libraries'.

    None where one of them is not known; `in_part`: where one of the project's is not.
    """
    given = made.args[0] if made.args else next((item.value for item in made.keywords if item.arg == "dataclass_types"), None)
    kinds = given.elts if isinstance(given, ast.Tuple | ast.List) else [given] if given is not None else []
    names = set(OF_PARSERS)
    for kind in kinds:
        fields = _fields(script, kind, where)
        if fields is None and not (in_part and last_name(kind) not in script.classes):
            return None
        names |= fields or set()
    return frozenset(names) if kinds and in_force("transformers", where) else None


def _fields(script: Script, kind: ast.expr, where: Circumstances, above: tuple[ast.ClassDef, ...] = ()) -> set[str] | None:
    """Return the fields of a dataclass with those that it inherits; None where one of its bases is not known."""
    own = script.classes.get(kind.id) if isinstance(kind, ast.Name) and kind.id not in script.shared_names else None
    imported = script.name(kind).partition(".")[0] in LIBRARIES          # unless the file takes the name for its own
    if own is None or own in above or (imported and script.module(own) is not script.module(kind)):
        of_theirs = parameters(of_library(script, kind, where))
        return set(of_theirs) if of_theirs is not None else None
    names = {item.target.id for item in own.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
    for base in own.bases:
        inherited = _fields(script, base, where, (*above, own))
        if inherited is None:
            return None
        names |= inherited
    return names
