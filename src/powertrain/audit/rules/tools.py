"""Rules on the configs of Axolotl, LLaMA-Factory and torchtune, and on the layers that their adapters are for."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from powertrain.audit.commands import text_of
from powertrain.audit.configs import Marked, read_marked, shown
from powertrain.audit.project import root_of, walked
from powertrain.audit.rules.base import Findings, found, known, rule
from powertrain.audit.rules.elsewhere import asked_of, gone
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records import WrongUse
from powertrain.records.findings import Evidence, Place

TEMPLATE = "tokenizer.chat_template"
TEMPLATES, FAMILIES = known("templates"), known("families")
KNOWN_TEMPLATES, SHIPPED_DATA = frozenset(known("known_templates").split()), frozenset(known("shipped_data").split())
MOVED = known("moved_components")
EVALUATING = ("training.eval_steps", "training.evals_per_epoch")
KINDS, REFUSED, PROMPTS, LAYERS = map(known, ("value_kinds", "refused", "prompt_types", "lora_families"))
IGNORED = known("not_in_force")
TERM = re.compile(r"(!?)([\w.|]+?)(!=|=|~|$)(.*)")
# and the config that it is given
RECIPE = re.compile(r"tune run\b.*?([\w./-]+(?:\.py\b|(?=\s+--config)))\b.*--config[ =]\S*?([\w.-]+)(?:\s|$)")
OF_TORCHTUNE = re.compile(r"(full|lora|qat|ppo|grpo|dev|knowledge_distillation|eleuther|generate|quantize)([_/]|$)")   # recipes
HEADS = {"lm_head", "score", "classifier"}
FUSED = "fused"        # no key: whether the model's attention has other layers than q_proj and o_proj
FITS: Mapping[str, type | str] = {           # what pydantic takes: values of a type, or spelled so
    "a text": str, "a list": list, "a table": dict, "a whole number": r"[-+]?[\d_]+(\.0*)?|true|false",
    "a number": r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?|true|false|nan|[-+]?inf",
    "true or false": r"true|false|yes|no|on|off|[tfyn01]|[01]\.0"}


@rule
def template_of_other_model(subject: Subject, where: Circumstances) -> Findings:
    """The chat template is that of another family of models."""
    template, path = str(subject.value(TEMPLATE)), str(subject.value("model.path") or "").lower()
    own = TEMPLATES.get(template)
    others = [name for name in FAMILIES if name in path]
    if subject.framework == "llama-factory" and own and others and not any(name in path for name in own):
        yield found("critical", TEMPLATE, "model.path", template=template)


@rule
def template_unknown(subject: Subject, where: Circumstances) -> Findings:
    """LLaMA-Factory has no template of this name."""
    template, has_own = subject.value(TEMPLATE), _is_older(subject)
    named = template if isinstance(template, str) and re.fullmatch(r"[\w.-]+", template) else None
    if subject.framework == "llama-factory" and named and not has_own and named not in KNOWN_TEMPLATES:
        yield found("critical", TEMPLATE, template=template)


def _is_older(subject: Subject) -> bool:
    """Return whether the project has a LLaMA-Factory of its own, or asks for one that is older than 0.9.5."""
    root = root_of(subject.path)
    pinned = [*asked_of(root, "llama_factory"), *asked_of(root, "llamafactory")]
    return any((root / folder / name).is_dir() for folder in ("src", "LLaMA-Factory/src") for name in (
        "llamafactory", "llmtuner")) or any(each < (0, 9, 5) for each in pinned)


@rule
def data_given_twice(subject: Subject, where: Circumstances) -> Findings:
    """The same data is listed twice."""
    listed = subject.value("data.source")
    again = [name for name, times in Counter(map(str, listed)).items() if times > 1] if isinstance(listed, list) else []
    if subject.framework == "llama-factory" and again:
        yield found("moderate", "data.source", names=", ".join(again))


@rule
def placeholder_left(subject: Subject, where: Circumstances) -> Findings:
    """A path is still the placeholder of the example that the config was made from."""
    left = [setting for setting in subject.settings.values() if isinstance(setting.value, str) and "path/to/" in setting.value]
    if left and subject.script is None:
        yield found("critical", *left, path=left[0].value)


@rule
def components_moved(subject: Subject, where: Circumstances) -> Findings:
    """Components are named where torchtune no longer has them."""
    if subject.framework != "torchtune":
        return
    lines = subject.path.read_text(encoding="utf-8", errors="replace").splitlines()
    lost: dict[str, list[Evidence]] = {}
    for number, line in enumerate(lines, 1):
        named = re.search(r"_component_:\s*[\"']?([\w.]+)", line)
        name = named[1] if named else ""
        old = next((each for each in MOVED if name.startswith(each)), "")
        lacks = gone(*name.rpartition(".")[::2])
        says = f"{old.rstrip('.')}... (now {MOVED[old].rstrip('.')}...)" if old else f"{lacks} (gone)" if lacks else ""
        if says:
            lost.setdefault(says, []).append(Evidence(line.strip(), Place(str(subject.path), number)))
    for file in _own_code(subject, "\n".join(lines)):
        for says, seen in _imported_in_vain(file):
            lost.setdefault(says, []).append(seen)
    if lost:
        yield found("critical", *dict.fromkeys(each for seen in lost.values() for each in seen), names=", ".join(lost))


def _own_code(subject: Subject, text: str) -> list[Path]:
    """Return the project's files that a config of torchtune runs: those of its components, and the recipe that is given it."""
    root = root_of(subject.path)
    files = [file for folder in islice(walked(root), 200) for file in folder]
    modules = {name.rpartition(".")[0].replace(".", "/") for name in re.findall(r"_component_:\s*[\"']?([\w.]+)", text)}
    own = [file for file in files if file.suffix == ".py" and any(
        module and file.with_suffix("") in (root / module, subject.path.parent / module) for module in modules)]
    for file in files:
        if file.suffix in (".sh", ".md") or file.name == "Makefile":
            for line in text_of(file).replace("\\\n", " ").splitlines():
                recipe = RECIPE.search(line)
                if recipe and recipe[2] == subject.path.name:
                    name = recipe[1].lstrip("./")
                    name = name if name.endswith(".py") or OF_TORCHTUNE.match(name) else f"{name}.py"
                    own += [each for each in files if each.as_posix().endswith(f"/{name}")]
    return list(dict.fromkeys(own))


def _imported_in_vain(file: Path) -> Iterator[tuple[str, Evidence]]:
    """Yield what a file imports of libraries that no longer have it, outside of a try."""
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.parse(text_of(file)).body:
            module = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else ""
            names = node.names if module or isinstance(node, ast.Import) else []         # type: ignore[attr-defined]
            taken = [(module, item.name) if module else (item.name, "") for item in names]
            for name in filter(None, (gone(*each) for each in taken)):
                yield f"{name} (gone)", Evidence(ast.unparse(node)[:60], Place(str(file), node.lineno))


@rule
def checkpoints_into_source(subject: Subject, where: Circumstances) -> Findings:
    """The recipe is to write its checkpoints where it reads the model."""
    keys = _keys(subject, "torchtune")
    texts = {name: str(item.value) for name, item in keys.items() if item.value is not None}
    told = {name: re.sub(r"\$\{([\w.]+)\}", lambda one: texts.get(one[1], one[0]), texts.get(f"checkpointer.{name}", ""))
            for name in ("checkpoint_dir", "output_dir")}
    source, target = (PurePosixPath(told[name]) for name in ("checkpoint_dir", "output_dir"))
    if all(told.values()) and "${" not in "".join(told.values()) and (source == target or source in target.parents):
        yield found("critical", *_seen(subject, keys, "checkpointer.checkpoint_dir", "checkpointer.output_dir"))


@rule
def evaluation_never(subject: Subject, where: Circumstances) -> Findings:
    """Evaluations are asked for, and no data is held out for them."""
    asked = next((key for key in EVALUATING if subject.value(key)), None)
    raises = asked == EVALUATING[0] and subject.value("data.validation_share") == 0
    others = any("test_datasets" in key for key in (*subject.settings, *subject.unknown, *subject.unread))
    held_out = subject.value("data.validation_share") or subject.is_unread("data.validation_share") or others
    if subject.framework == "axolotl" and asked is not None and not held_out:
        yield found("critical" if raises else "moderate", asked, subject.settings.get("data.validation_share"),
                    case="raises" if raises else "")


@rule
def format_gone(subject: Subject, where: Circumstances) -> Findings:
    """The data has a type that Axolotl no longer knows."""
    if subject.framework == "axolotl" and str(subject.value("data.format")).startswith("sharegpt"):
        yield found("critical", "data.format")


def _keys(subject: Subject, *tools: str) -> Mapping[str, Marked]:
    """Return the keys of a tool's file as it spells them, those of its tables as `table.key` too."""
    is_theirs = subject.framework in tools and subject.script is None and subject.path.suffix != ".py"
    outer = subject.keys if is_theirs else {}
    return {**outer, **{f"{key}.{name}": item for key, table in outer.items() for name, item in table.inner.items()}}


def _seen(subject: Subject, keys: Mapping[str, Marked], *names: str) -> list[Evidence]:
    """Return how the file sets these keys."""
    return [Evidence(f"{name}: {shown(keys[name].value)}", Place(str(subject.path), keys[name].line))
            for name in dict.fromkeys(names) if name in keys]


@rule
def settings_refused(subject: Subject, where: Circumstances) -> Findings:
    """The tool does not take these settings."""
    keys, own = _keys(subject, *REFUSED), _layers(subject)
    for kind, names in KINDS.items() if subject.framework == "axolotl" else ():
        wrong = [name for name in names.split() if name in keys and not _fits(FITS[kind], keys[name].value)]
        if wrong:
            yield found("critical", *_seen(subject, keys, *wrong), says=f"{', '.join(wrong)} must be {kind}, or left out")
    read = {**keys, FUSED: Marked(bool(own) and not {"q_proj", "o_proj"} <= own, 1)}
    for ends, table in ((True, REFUSED), (False, IGNORED)) if keys else ():
        for conditions, says in table.get(subject.framework, {}).items():
            older = "parser" in says and _is_older(subject)
            if not older and all(_holds(term, read) for term in conditions.split()):
                seen = _seen(subject, keys, *re.findall(r"[\w.]+", re.sub(r"!\S+", "", conditions)))
                yield found("critical" if ends else "moderate", *seen, says=says, case="" if ends else "ignored")


def _fits(form: type | str, value: Any) -> bool:
    """Return whether a value is of a kind; none is of any, and what a script fills in may be."""
    if value is None or (isinstance(value, str) and re.match(r"\$|\{|<", value)):
        return True
    return isinstance(value, form) if isinstance(form, type) else re.fullmatch(form, str(value).lower()) is not None


def _holds(term: str, keys: Mapping[str, Marked]) -> bool:
    """Return whether a condition of `refused` holds; a key that is not set has the value ""."""
    parts: tuple[str, str, str, str] = TERM.findall(term)[0]
    negated, names, sign, wanted = parts
    values = [keys[name].value if name in keys else "" for name in names.split("|")]
    if not sign:
        return any(map(bool, values)) != bool(negated)
    if sign == "~":
        return any(re.search(wanted, str(value).lower()) for value in values)
    return all(str(value).lower() in wanted.split("|") for value in values) == (sign == "=")


@rule
def data_refused(subject: Subject, where: Circumstances) -> Findings:
    """Axolotl cannot make examples of a data set."""
    keys = _keys(subject, "axolotl")
    learned, listed = (keys[name].value if name in keys else None for name in ("rl", "datasets"))
    forms = PROMPTS.get("dpo" if learned in ("dpo", "ipo", "simpo") else str(learned or "sft"), "").replace(" ", "")
    for table in filter(lambda each: isinstance(each, dict), listed if isinstance(listed, list) else ()):
        kind = table.get("type")
        wrong = [("path", "data_files", "")] if table.get("data_files") and table.get("path") is None else []
        if isinstance(kind, str) and forms and not re.fullmatch(f"{forms}|sharegpt.*", kind) and (
                "." not in kind or re.fullmatch(forms, kind.partition(".")[0])):         # another's module may bring its own
            wrong.append(("kind", "type", kind))
        for case, name, value in (*wrong, *(_unformatted(kind) if isinstance(kind, dict) and not learned else ())):
            yield found("critical", _line(subject, name, value), case=case, name=name, kind=kind)


def _unformatted(said: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what is wrong with the formats that the config writes itself: the case, the key and "" for any value."""
    filled = {"format": {"instruction", "input"}, "no_input_format": {"instruction"}}
    written = {name: set(re.findall(r"(?<!\{)\{(\w+)", str(said.get(name) or ""))) for name in filled}
    if wrong := next((name for name in filled if written[name] - filled[name]), ""):
        yield "field", wrong, ""
    if said.get("format") and not said.get("no_input_format") and "input" not in written["format"]:
        yield "unused", "format", ""


def _line(subject: Subject, key: str, value: str) -> Evidence | None:
    """Return the first line that sets a key to a text that begins so."""
    lines = subject.path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((Evidence(line.strip(), Place(str(subject.path), number)) for number, line in enumerate(lines, 1)
                 if re.match(rf"[-\s]*{key}\s*:\s*[\"']?{re.escape(value)}", line)), None)


@rule
def data_not_defined(subject: Subject, where: Circumstances) -> Findings:
    """A data set is not in the project's dataset_info.json."""
    folder, listed = subject.value("data.dataset_dir"), subject.value("data.source")
    file = root_of(subject.path) / str(folder or "data") / "dataset_info.json"
    with suppress(OSError, RecursionError, WrongUse):
        if subject.framework == "llama-factory":
            defined, names = read_marked(file).inner, listed if isinstance(listed, list) else [listed]
            known_too = frozenset() if folder else SHIPPED_DATA          # the file may be there to be copied
            if lost := [str(name) for name in names if name and str(name) not in {*defined, *known_too}]:
                yield found("critical", "data.source", "data.dataset_dir", names=", ".join(lost))


def _layers(subject: Subject) -> set[str]:
    """Return the names of the model's layers, if it is one of a family that is known for certain."""
    path = str(subject.value("model.path") or "").lower()
    path = path if "/" in path else f"openai-community/{path}"         # as the hub leads on names without an owner
    return next((set(names.split()) for form, names in LAYERS.items() if re.fullmatch(form, path)), set())


@rule
def targets_missing(subject: Subject, where: Circumstances) -> Findings:
    """Adapters are asked for on layers that the model does not have."""
    asked, own = subject.value("lora.target_modules"), _layers(subject)
    names = {str(name).rpartition(".")[2] for name in asked} if isinstance(asked, list | tuple | set) else set()
    lost = sorted(names - own - HEADS)
    remote = subject.value("model.trust_remote_code") is True            # whose code may have other names
    if own and not remote and len(lost) * 2 > len(names) and all(map(str.isidentifier, names)):
        case = "all" if len(lost) == len(names) else ""
        yield found("critical" if case else "moderate", "lora.target_modules", "model.path", case=case, lost=", ".join(lost),
                    others=", ".join(sorted(own - names)))
