"""What became of a subject's keys in a recipe: as typed values, and as the recipe's YAML with a comment for every key.

Data are local files relative to the config, datasets of the hub, and LLaMA-Factory's names for both.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from powertrain.audit.configs import printable
from powertrain.audit.subject import Setting, Subject
from powertrain.data.rows.formats import ALSO_CALLED, BY_NAME
from powertrain.data.rows.reading import is_hub_id
from powertrain.recipe.resolve import quoted, yaml_lines

Fate = Literal["translated", "planned", "no effect", "not supported", "unknown", "unread", "default"]
FATES: tuple[Fate, ...] = ("translated", "default", "planned", "no effect", "not supported", "unknown", "unread")
NO_MODEL, NO_DATA = "NAME-THE-MODEL", "NAME-THE-DATA"       # neither exists, so a run says so before it does anything
BUILDERS = ("json", "csv", "parquet", "text", "arrow")           # load_dataset's, of files that data_files names
NAMES_FILE = "dataset_info.json"
# LLaMA-Factory's names for the columns of its alpaca format -> a recipe's
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "messages": "conversations"}
# and of its pairs and rated answers
COMPARED = {"prompt": "prompt", "messages": "prompt", "response": "completion", "system": "system", "chosen": "chosen",
            "rejected": "rejected", "kto_tag": "label"}
FORMATS = {"chat_template": "messages", "chat_template.default": "messages", "pretrain": "text"}         # Axolotl's names
# how Axolotl names the fields of a conversation
OF_MESSAGES = ("data.field_messages", "data.message_field_role", "data.message_field_content", "data.message_property_mappings")
TITLES = {
    "planned": "left to the planner, which chooses for this machine (the key in brackets would keep the file's value)",
    "no effect": "no effect here", "not supported": "NOT SUPPORTED: the recipe trains something else than the file here",
    "unknown": "keys that this trainer does not have", "unread": "not read: only running the file would tell",
}
ORDER = ("name", "description", "method", "model", "lora", "quantisation", "data")


@dataclass(frozen=True)
class Accounted:
    """What became of one key."""

    key: str                                 # in the audit's names; of `unknown` keys the file's own
    setting: Setting | None                  # None: a default of the trainer, which the file does not say
    fate: Fate
    why: str = ""
    ours: Mapping[str, Any] = field(default_factory=dict)        # dotted keys of the recipe
    pins: Mapping[str, Any] = field(default_factory=dict)        # that would keep it, of what is left to the plan


@dataclass(frozen=True)
class Conversion:
    subject: Subject
    accounts: tuple[Accounted, ...]
    missing: tuple[str, ...]                 # what a run needs and the file does not say or is not here, each with its cure

    @property
    def values(self) -> dict[str, Any]:
        """Return the recipe: dotted key -> value."""
        return {key: value for account in self.accounts for key, value in account.ours.items()}


def data_of(subject: Subject) -> tuple[list[Accounted], list[str]]:
    """Return what becomes of the keys that name data, and what of the data is missing."""
    files, source = subject.settings.get("data.data_files"), subject.settings.get("data.source")
    if files is not None and isinstance(files.value, (str, list)) and (source is None or source.value in BUILDERS):
        said = {key: one for key, one in subject.settings.items() if key != "data.data_files"}
        said["data.source"] = replace(source or files, value=files.value)
        accounts, missing = data_of(replace(subject, settings=said))
        return [*accounts, Accounted("data.data_files", files, "translated", "these files are the source",
                                     next(one.ours for one in accounts if one.key == "data.source"))], missing
    accounts, missing = [], []
    for key in ("data.source", "data.validation_source", "data.format", "data.config", "data.split"):
        setting = subject.settings.get(key)
        if setting is None or setting.value is None:
            continue
        if key in ("data.source", "data.validation_source"):
            account, absent = _sources(subject, key, setting)
            missing += absent
        else:
            account = _part(subject, key, setting)
        accounts.append(account)
    accounts += [Accounted(key, subject.settings[key], "translated", "it is part of data.format and data.columns")
                 for key in OF_MESSAGES if key in subject.settings and any("data.format" in each.ours for each in accounts)]
    return accounts, missing


def _part(subject: Subject, key: str, setting: Setting) -> Accounted:
    """Return what becomes of the format, the configuration or the split of the source."""
    value, source = setting.value, subject.value("data.source")
    if key == "data.config" and isinstance(source, str) and not is_hub_id(source):
        return Accounted(key, setting, "not supported", f"a dataset of the hub is named with its owner: write data.source="
                         f"OWNER/{source}:{value}")
    if key == "data.config":
        return Accounted(key, setting, "translated", "it is part of the source's name")
    if key == "data.split" and isinstance(value, str):
        return Accounted(key, setting, "translated", "", {"data.split": value})
    if key == "data.split":
        return Accounted(key, setting, "not supported", "one data.split serves all sources; name the files of each split")
    if isinstance(value, dict):
        return Accounted(key, setting, "not supported", "a prompt of its own is a data.chat_template or rows written anew")
    name = FORMATS.get(str(value), ALSO_CALLED.get(str(value), str(value)))
    ours: dict[str, Any] = {"data.format": name} if isinstance(value, str) and name in BY_NAME else {}
    if name == "messages" and any(subject.value(one) is not None for one in OF_MESSAGES):
        ours = _of_messages(subject)
    if not ours:
        return Accounted(key, setting, "no effect", "the format is found by looking at the rows; name it with data.format")
    words = "of the rows; the words around them are the tokenizer's chat template's, and Axolotl has words of its own" \
        if subject.framework == "axolotl" and name == "alpaca" else ""
    return Accounted(key, setting, "translated", words, ours)


def _of_messages(subject: Subject) -> dict[str, Any]:
    """Return the recipe's format and columns of conversations whose fields Axolotl's config names; empty if none has them."""
    field, said = subject.value("data.field_messages"), subject.value("data.message_property_mappings")
    mappings = said if isinstance(said, dict) else {}
    names = tuple(subject.value(f"data.message_field_{part}") or mappings.get(part, part) for part in ("role", "content"))
    known = {("role", "content"): ("messages", "messages"), ("from", "value"): ("sharegpt", "conversations")}
    if names not in known or not isinstance(field, str | None):
        return {}
    form, column = known[names]
    return {"data.format": form} | ({"data.columns": {column: field}} if field not in (None, column) else {})


def _sources(subject: Subject, key: str, setting: Setting) -> tuple[Accounted, list[str]]:
    names = [str(name) for name in (setting.value if isinstance(setting.value, list) else [setting.value]) if str(name).strip()]
    config, entries = subject.value("data.config"), _named_sets(subject)
    ours: dict[str, Any] = {}
    found, absent = [], []
    for name in names:
        entry = entries.get(name)
        source = _entry_source(subject, entry) if entry is not None else _local(subject, name)
        if entry is not None:
            ours |= _entry_format(entry)
        found.append(f"{source}:{config}" if isinstance(config, str) and is_hub_id(source) else source)
        if subject.framework == "llama-factory" and entry is None and not Path(source).exists() and not is_hub_id(source):
            absent.append(name)
    if not found or (key == "data.validation_source" and len(found) > 1):
        return Accounted(key, setting, "not supported", "held-out examples come from one source; join the files" if found else
                         "it names no data"), []
    ours[key] = found[0] if len(found) == 1 else found
    missing = [f"not here: {', '.join(absent)} are names in {NAMES_FILE}, which is not at {_names_file(subject)}; write their "
               f"files as {key}"] if absent else []
    return Accounted(key, setting, "translated", missing[0] if missing else "", ours), missing


def _local(subject: Subject, name: str) -> str:
    """Return a path as it is found from here: as it stands, or beside the config; anything else stays as it stands."""
    try:
        path, beside = Path(name).expanduser(), subject.path.parent / name
        return str(beside) if not path.is_absolute() and not path.exists() and beside.exists() else name
    except (OSError, ValueError, RuntimeError):              # too long a name, a null character, an unknown user's home
        return name


def _names_file(subject: Subject) -> Path:
    folder = Path(str(subject.value("data.dataset_dir") or "data"))
    return next((file for file in (folder / NAMES_FILE, subject.path.parent / folder / NAMES_FILE) if file.is_file()),
                folder / NAMES_FILE)


def _named_sets(subject: Subject) -> dict[str, dict[str, Any]]:
    """Return LLaMA-Factory's table of data sets by name; empty if it is not here."""
    if subject.framework != "llama-factory":
        return {}
    try:
        table = json.loads(_names_file(subject).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in table.items() if isinstance(entry, dict)} if isinstance(table, dict) else {}


def _entry_source(subject: Subject, entry: dict[str, Any]) -> str:
    hub = next((entry[key] for key in ("hf_hub_url", "ms_hub_url") if isinstance(entry.get(key), str)), None)
    if hub is not None:
        return f"{hub}:{entry['subset']}" if entry.get("subset") else hub
    return str(_names_file(subject).parent / str(entry.get("file_name", "")))


def _entry_format(entry: dict[str, Any]) -> dict[str, Any]:
    named = entry["columns"] if isinstance(entry.get("columns"), dict) else {}
    compared = "preference" if entry.get("ranking") is True else "rating" if "kto_tag" in named else ""
    ours = COMPARED if compared else COLUMNS
    columns = {ours[key]: theirs for key, theirs in named.items() if key in ours and ours[key] != theirs}
    name = compared or ("sharegpt" if entry.get("formatting", "alpaca") == "sharegpt" else "alpaca")
    return {"data.format": name} | ({"data.columns": columns} if columns else {})


def recipe_yaml(conversion: Conversion, recognised: str = "") -> str:
    """Return a recipe that resolves, with what became of every key as comments."""
    subject = conversion.subject
    lines = [f"# Powertrain's equivalent of {subject.path}" + (f" ({recognised})" if recognised else "")]
    lines += [f"# MISSING: {one}" for one in conversion.missing]
    values: dict[str, Any] = {"name": Path(subject.path).stem, **conversion.values}
    said_by: dict[str, list[Accounted]] = {}
    for account in conversion.accounts:
        for key in account.ours:
            said_by.setdefault(key, []).append(account)
    sections = [*ORDER, *dict.fromkeys(key.split(".")[0] for key in values)]
    ordered = sorted(values.items(), key=lambda item: sections.index(item[0].split(".")[0]))
    lines += yaml_lines(ordered, lambda key: _comment(said_by.get(key, [])))
    for fate, title in TITLES.items():
        found = [account for account in conversion.accounts if account.fate == fate]
        lines += ["", f"# {title}:"] if found else []
        lines += [f"#   {_said(account)}: {_became(account)}" for account in found]
    return "\n".join(lines) + "\n"


def account_rows(conversion: Conversion) -> list[tuple[str, str, str, str]]:
    """Return (fate, key, as the file has it, what became of it) of every key; those that need a look come last."""
    return [(account.fate, account.key, _said(account), _became(account))
            for fate in FATES for account in conversion.accounts if account.fate == fate]


def account_json(conversion: Conversion) -> list[dict[str, Any]]:
    return [{"key": account.key, "fate": account.fate, "value": None if account.setting is None else account.setting.value,
             "line": 0 if account.setting is None else account.setting.place.line, "ours": dict(account.ours),
             "pins": dict(account.pins), "why": account.why} for account in conversion.accounts]


def _comment(accounts: list[Accounted]) -> str:
    origins: dict[str, str] = {}             # what the file says, once -> why; two settings may stand in one call
    for account in accounts:
        said = _said(account) if account.setting is not None else account.why or "a default"
        origins[said] = origins.get(said) or (account.why if account.setting is not None else "")
    return "; ".join(f"{said} ({why})" if why else said for said, why in origins.items())


def _said(account: Accounted) -> str:
    if account.setting is None:
        return "(not in the file)"
    text = printable(" ".join(account.setting.spelled.split()))
    return f"line {account.setting.place.line}: {text if len(text) <= 70 else f'{text[:67]}...'}"


def _became(account: Accounted) -> str:
    written = ", ".join(f"{key}: {quoted(value)}" for key, value in (account.ours or account.pins).items())
    if account.ours:
        return f"{written}; {account.why}" if account.why else written
    return f"{account.why} [{written}]" if written else account.why
