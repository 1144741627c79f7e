"""What calls of the libraries that configure scripts give: argparse, dataclasses, HfArgumentParser, typer, click, files.

Only defaults are known of what comes from a command line; that is what the script does when it is started as it is.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from powertrain.audit import command_lines
from powertrain.audit.script import Command, Script, Setting
from powertrain.audit.values import LAUNCHED, ClassValue, FunctionValue, Made, Reference, Table, TextNumber, Unread, attribute
from powertrain.records.findings import Place

CASTS = {"int": int, "float": float, "str": str}
LAUNCHERS = {"accelerate.notebook_launcher": 0, "accelerate.launchers.notebook_launcher": 0, "fire.Fire": 0, "tyro.cli": 0,
             "torch.multiprocessing.spawn": 1, "typer.run": 0}       # name -> arguments that the launcher itself puts first
READERS = ("yaml.safe_load", "yaml.load", "yaml.full_load", "json.load", "json.loads", "omegaconf.OmegaConf.load")
WRAPPED = ("compile", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "get_peft_model",
           "prepare_model_for_kbit_training", "prepare_model_for_int8_training")     # calls that give back their model
SAME_OBJECT = ("to", "cuda", "cpu", "train", "eval", "half", "bfloat16", "requires_grad_")   # methods that give their object
OF_THE_MACHINE = ("os.environ", "os.getenv", "input", "torch.cuda.", "torch.backends", "sys.")      # what only a run tells
WITH_ATTRIBUTES = ("SimpleNamespace", "Namespace", "EasyDict", "AttrDict", "DotDict", "Munch", "Box", "ConfigDict",
                   "OmegaConf.create")       # calls that give a table whose entries are attributes
UNSET = Unread("a variable that only a launcher sets")
INTO_DATACLASSES = ("parse_args_into_dataclasses", "parse_args_and_config")          # of HfArgumentParser, of TrlParser
FROM_A_FILE = ("parse_yaml_file", "parse_json_file")     # of HfArgumentParser
MAIN_METHODS = ("parse_args", "parse_known_args", *INTO_DATACLASSES, *FROM_A_FILE)


def result(made: Made, script: Script) -> Any:
    """Return the value of a call of foreign code: the settings that it hands out, else the call itself."""
    method, owner = made.last, made.owner
    first = made.positional[0] if made.positional else None
    unread = Unread(script.words(made.node))
    if isinstance(owner, Made) and owner.name.endswith(("ArgumentParser", "TrlParser")):
        if method in ("add_argument_group", "add_mutually_exclusive_group"):
            return owner
        if method == "add_argument":
            add_argument(owner, made)
        elif method == "set_defaults":
            owner.attributes.setdefault("arguments", {}).update(made.named)
        elif method in MAIN_METHODS:
            return parsed(owner, made, script)
    if method == "prepare" and isinstance(owner, Made) and owner.name.endswith("Accelerator"):
        return made.positional[0] if len(made.positional) == 1 else tuple(made.positional)
    if method in SAME_OBJECT and isinstance(owner, Made):
        return owner
    if method == "copy" and isinstance(owner, Table):
        return replace(owner, entries=dict(owner.entries), perhaps=set(owner.perhaps))
    if method in ("to_container", "to_object", "deepcopy") and isinstance(first, Table):
        return replace(first, entries=dict(first.entries), perhaps=set(first.perhaps))
    if made.name.endswith("OmegaConf.merge") and isinstance(first, Table):       # with a command line that adds nothing
        return _merged([each for each in made.positional if isinstance(each, Table)])
    if method in ("model_dump", "dict", "_asdict") and isinstance(owner, Made) and owner.local is not None:
        return Table(owner.named | {name: each for name, each in owner.attributes.items() if isinstance(each, Setting)})
    if made.name == "isinstance" and made.positional[1:] == [Reference("dict")] and not isinstance(
            first, (Unread, Made, Reference)):
        return isinstance(first, Table)
    if method in ("update", "get", "pop") and isinstance(owner, Table):
        return table_method(owner, method, made)
    if method == "get" and len(made.positional) == 2 and isinstance(owner, (Unread, Made)) and isinstance(first, str):
        default = made.positional[1]                     # `config.get("epochs", 1)` of a config that is not here: the default
        return Table(dict(default.entries), script.words(made.node)) if isinstance(default, Table) else default
    if made.name == "dict":
        if isinstance(first, Table):
            return Table({**first.entries, **made.named}, made.open or first.open, doubts=len(made.doubts),
                         perhaps={*made.perhaps, *first.perhaps})
        return Table(dict(made.named), made.open, doubts=len(made.doubts),
                     perhaps={*made.perhaps}) if first is None else unread
    if made.name in ("vars", "dataclasses.asdict") and made.positional:
        if isinstance(first, Made):                      # with what was set later
            later = {name: item for name, item in first.attributes.items() if isinstance(item, Setting)}
            return Table(first.named | later, first.open)
        return first if isinstance(first, Table) else unread
    if made.name.endswith(WITH_ATTRIBUTES) and (isinstance(first, Table) or not made.positional):
        entries = {**(first.entries if isinstance(first, Table) else {}), **made.named}
        return Table(entries, made.open or (first.open if isinstance(first, Table) else ""), perhaps={*made.perhaps})
    if made.name == "getattr":
        return get_attribute(made, script)
    if made.name == "setattr" and len(made.positional) == 3:
        set_attribute(made, script)
    if script.launch is not None and (answer := of_launch(made, script.launch)) is not None:
        return answer
    if made.name in READERS and made.positional:
        return read_file(first, script) or unread
    return unread if made.name.startswith(OF_THE_MACHINE) else made


def _merged(tables: list[Table]) -> Table:
    """Return the entries of tables, of which the later ones hold, those of tables in them too."""
    made = Table(open=next((each.open for each in tables if each.open), ""))
    for table in tables:
        for name, each in table.entries.items():
            before = made.entries[name].value if name in made.entries else None
            if isinstance(before, Table) and isinstance(each.value, Table):
                each = replace(each, value=_merged([before, each.value]))
            made.entries[name] = each
    return made


def of_launch(made: Made, launch: Mapping[str, str]) -> Any:
    """Return what a call says of the launcher: of its variables, or of the process group; None for another call."""
    first = made.positional[0] if made.positional else None
    if made.name in ("os.environ.get", "os.getenv") and first in LAUNCHED:
        return launch.get(str(first), made.argument(1, "default") if len(made.positional) > 1 or made.named else UNSET)
    return {"is_initialized": bool(launch), "get_world_size": int(launch.get("WORLD_SIZE", 1)), "get_rank": 0}.get(
        made.last) if made.name.startswith(("torch.distributed.", "dist.")) else None


def unwrapped(made: Any) -> Iterator[Made]:
    """Yield what a call made and, of calls that give back their model such as torch.compile, what it was made of."""
    while isinstance(made, Made):
        yield made
        made = made.positional[0] if made.positional and made.last in WRAPPED else None


def add_argument(parser: Made, made: Made) -> None:
    """Keep an argument's default, as `type` converts it, under the name that argparse gives it."""
    flags = [item for item in made.positional if isinstance(item, str)]
    long = [flag for flag in flags if flag.startswith("--")] or flags
    if not long:
        return
    name = command_lines.dest_of(made)
    parser.attributes.setdefault("added", []).append(made)
    value = default_of(made) if flags[0].startswith("-") else Unread(f"argument {flags[0]}")
    place = made.named["default"].place if "default" in made.named else Place("", getattr(made.node, "lineno", 0))
    parser.attributes.setdefault("arguments", {})[name] = Setting(value, place, f"{long[0]} (default {value!r})")


def default_of(made: Made) -> Any:
    if "default" not in made.named:
        if made.get("action") in ("store_true", "store_false"):
            return made.get("action") == "store_false"
        return Unread(f"{made.positional[0]}, which has to be given") if made.get("required", False) else None
    value, cast = made.get("default"), made.get("type")
    if isinstance(cast, Reference) and isinstance(value, str) and cast.name in CASTS:
        return CASTS[cast.name](value)
    return value


def parsed(parser: Made, made: Made, script: Script) -> Any:
    """Return argparse's namespace of defaults, or HfArgumentParser's instances."""
    if made.last in INTO_DATACLASSES + FROM_A_FILE:
        given = parser.argument(0, "dataclass_types")
        kinds = given if isinstance(given, (list, tuple)) else [given]
        table = _read_by(made, script)
        by_words = made.last in INTO_DATACLASSES and not made.positional
        own = {name for kind in kinds if isinstance(kind, ClassValue) for name, _ in command_lines.annotations(kind)}
        rest = [Unread("the rest of the command line")] if made.get("return_remaining_strings", False) is True else []
        return (*(_instance_of(kind, parser, script.command if by_words else None, table, own) for kind in kinds), *rest)
    arguments = dict(parser.attributes.get("arguments", {}))
    if script.command is not None and not made.positional:
        arguments |= command_lines.of_argparse(script.command, parser.attributes.get("added", []))
    namespace = Made("argparse.Namespace", made.node, attributes=arguments)
    return (namespace, []) if made.last == "parse_known_args" else namespace


def _read_by(made: Made, script: Script) -> Table | None:
    """Return the file that HfArgumentParser or TrlParser reads, where it is known; None without one."""
    if made.last in FROM_A_FILE:
        return read_file(made.argument(0, made.last.removeprefix("parse_")), script)
    said = command_lines.settings_of(script.command).get("config") if script.command is not None else None
    table = read_file(said.value, script) if said is not None and made.last == "parse_args_and_config" else None
    if table is not None:                                # argparse makes numbers of the texts that PyYAML gives
        table.entries = {name: replace(each, value=float(each.value) if isinstance(each.value, TextNumber) else each.value)
                         for name, each in table.entries.items()}
    return table


def _instance_of(kind: Any, parser: Made, command: Command | None, table: Table | None, own: Collection[str]) -> Any:
    """Return what a parser makes of a class: its defaults, what a file and a command say. `own`: fields of the project's."""
    said = dict(table.entries) if table is not None else {}
    opened = "" if command is not None or table is not None else "the command line"
    rest = {name: each for name, each in command_lines.settings_of(command).items() if name != "config"} if command else {}
    theirs = {name: each for name, each in {**said, **rest}.items() if name not in own}
    if isinstance(kind, ClassValue):
        foreign, fields = foreign_base(kind), all_fields(kind)
        mine = {name for name, _ in command_lines.annotations(kind)}
        fields |= {name: each for name, each in said.items() if name in mine}
        fields |= command_lines.of_fields(command, kind) if command is not None else {}
        fields |= theirs if foreign else {}
        return Made(foreign or kind.node.name, parser.node, [], fields, dict(fields), local=kind,
                    open=opened if foreign else "")
    if isinstance(kind, Reference):
        return Made(kind.name, parser.node, named=theirs, open=opened)
    return Unread("a class that is not known")


def field_default(value: Any) -> Any:
    """Return a field's default: 4 for `field(default=4)`, an empty list for `field(default_factory=list)`."""
    if not isinstance(value, Made) or value.last not in ("field", "Field"):
        return value
    if "default" in value.named or (value.last == "Field" and value.positional):
        return value.argument(0, "default")
    factory = value.get("default_factory")
    if isinstance(factory, Reference) and factory.name in ("list", "dict"):
        return [] if factory.name == "list" else Table()
    if isinstance(factory, FunctionValue) and isinstance(factory.node, ast.Lambda) and isinstance(factory.node.body, ast.List):
        items = [item.value if isinstance(item, ast.Constant) else None for item in factory.node.body.elts]
        return items if None not in items else Unread("a default_factory")
    return Unread("a field without a default")


def option_default(value: Any) -> Any:
    """Return the default of a parameter that typer fills: 4 for `typer.Option(4)`."""
    if isinstance(value, Made) and value.name in ("typer.Option", "typer.Argument"):
        found = value.argument(0, "default")
        return Unread("an option that has to be given") if found is None or found is Ellipsis else found
    return value


def all_fields(kind: ClassValue) -> dict[str, Setting]:
    """Return the fields of a class and of the script's classes it derives from, in the order of a dataclass."""
    return {name: field for each in reversed(kind.lineage) for name, field in each.fields.items()}


def foreign_base(kind: ClassValue) -> str:
    """Return the config class of another package that a script's class derives from; "" if there is none."""
    return next((name for name in kind.foreign_bases if name.endswith(("Config", "Arguments"))), "")


def table_method(owner: Table, method: str, made: Made) -> Any:
    first = made.positional[0] if made.positional else None
    unsure = len(made.doubts) > owner.doubts
    if method == "update":
        given = {*(first.entries if isinstance(first, Table) else ()), *made.named}
        owner.perhaps |= (given - {*owner.entries} if unsure else set()) | made.perhaps | (
            first.perhaps if isinstance(first, Table) else set())
        owner.entries.update({**(first.entries if isinstance(first, Table) else {}), **made.named})
        owner.open = owner.open or ("" if first is None or isinstance(first, Table) else "update")
        return None
    if not isinstance(first, (str, int)) or (owner.open and first not in owner.entries and len(made.positional) < 2):
        return Unread("an entry of a dict")
    if method == "pop" and unsure:
        owner.perhaps.add(first)
    found = owner.entries.pop(first, None) if method == "pop" and not unsure else owner.entries.get(first)
    return found.value if found is not None else made.argument(1, "default")


def get_attribute(made: Made, script: Script) -> Any:
    owner, name, *default = (*made.positional, None, None)[:max(2, len(made.positional))]
    if isinstance(owner, Reference) and isinstance(name, str) and not default:
        return Reference(f"{owner.name}.{name}")         # getattr(torch, "float16")
    if isinstance(owner, Made) and isinstance(name, str):
        found = attribute(owner, name)
        if found is not None:
            return found.value
        if len(default) == 1 and not owner.open:
            return default[0]
    return Unread(script.words(made.node))


def set_attribute(made: Made, script: Script) -> None:
    """Keep what `setattr(args, name, value)` sets; of a name that is not known, forget what was known of the object."""
    owner, name, value = made.positional
    kept = owner.attributes if isinstance(owner, Made) else owner.entries if isinstance(owner, Table) else {}
    if not isinstance(name, str):
        kept.clear()
        if isinstance(owner, Table):
            owner.open = script.words(made.node)
    elif len(made.doubts) and name in kept:
        kept[name] = script.setting(made.node, Unread(script.words(made.node)))
    else:
        kept[name] = script.setting(made.node, value)


def read_file(source: Any, script: Script) -> Table | None:
    """Return the table of a YAML or JSON file beside the script, opened under a literal path; None if it has none."""
    source = source.owner if isinstance(source, Made) and source.last == "read" else source
    if isinstance(source, Made) and source.name == "open":
        source = source.argument(0, "file")
    if not isinstance(source, str):
        return None
    above = script.shell.resolve().parents[:3] if script.shell is not None else ()       # from which it may be started
    folders = (script.path.parent, script.root or Path(), Path(), *above)
    file = next((folder / source for folder in folders if (folder / source).is_file()), None)
    return command_lines.read_table(file) if file is not None else None


def launched(made: Made) -> tuple[FunctionValue, list[Any]] | None:
    first = made.argument(0, "fn") or made.argument(0, "function")
    if made.name not in LAUNCHERS or not isinstance(first, FunctionValue):
        return None
    given = made.argument(1, "args")
    ranks: list[Any] = [Unread("the process's rank")] * LAUNCHERS[made.name]
    return first, [*ranks, *(given if isinstance(given, (list, tuple)) else [])]

