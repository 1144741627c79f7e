"""Where a subject's data lie: local files relative to its config, datasets of the hub, and LLaMA-Factory's names for both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.audit.subject import Setting, Subject
from powertrain.data.rows.formats import ALSO_CALLED, BY_NAME
from powertrain.data.rows.hub import is_hub_id

if TYPE_CHECKING:
    from powertrain.audit.convert import Accounted

NO_DATA = "NAME-THE-DATA"                    # a path that there is not: the run says so before it does anything
BUILDERS = ("json", "csv", "parquet", "text", "arrow")           # load_dataset's, of files that data_files names
NAMES_FILE = "dataset_info.json"
# LLaMA-Factory's names for the columns of its alpaca format -> a recipe's
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "messages": "conversations"}
FORMATS = {"chat_template": "messages", "chat_template.default": "messages", "sharegpt": "sharegpt", "completion": "text",
           "pretrain": "text", "alpaca": "alpaca"}


def data_of(subject: Subject) -> tuple[list[Accounted], tuple[str, ...]]:
    """(what becomes of the keys that name data, what of them is missing here)."""
    from powertrain.audit.convert import Accounted

    files, source = subject.settings.get("data.data_files"), subject.settings.get("data.source")
    if files is not None and isinstance(files.value, (str, list)) and (source is None or source.value in BUILDERS):
        said = {key: one for key, one in subject.settings.items() if key != "data.data_files"}
        said["data.source"] = replace(source or files, value=files.value)
        accounts, missing = data_of(replace(subject, settings=said))
        return [*accounts, Accounted("data.data_files", files, "translated", "they are the source",
                                     next(one.ours for one in accounts if one.key == "data.source"))], missing
    accounts = [account for key in ("data.source", "data.validation_source", "data.format", "data.config", "data.split")
                if (setting := subject.settings.get(key)) is not None and setting.value is not None
                for account in [_one(subject, key, setting)]]
    named = any(account.key == "data.source" for account in accounts)
    missing = tuple(account.why for account in accounts if account.fate == "translated" and account.why.startswith("not here"))
    if named:
        return accounts, missing
    absent = Accounted("data.source", None, "default", "the file does not say; name it", {"data.source": NO_DATA})
    return [*accounts, absent], ("the file names no data: write data.source, a file, a folder or a hub id",)


def _one(subject: Subject, key: str, setting: Setting) -> Accounted:
    from powertrain.audit.convert import Accounted

    value = setting.value
    if key in ("data.source", "data.validation_source"):
        return _sources(subject, key, setting)
    source = subject.value("data.source")
    if key == "data.config" and isinstance(source, str) and not is_hub_id(source):
        return Accounted(key, setting, "not supported", f"a dataset of the hub is named with its owner: write data.source="
                         f"OWNER/{source}:{value}")
    if key == "data.config":
        return Accounted(key, setting, "translated", "it is part of the source's name", {})
    if key == "data.split":
        if isinstance(value, str):
            return Accounted(key, setting, "translated", "", {"data.split": value})
        return Accounted(key, setting, "not supported", "one data.split serves all sources; name each one's files")
    name = FORMATS.get(str(value), ALSO_CALLED.get(str(value), str(value)))
    if isinstance(value, str) and name in BY_NAME:
        words = "of the rows; the words around them are the tokenizer's chat template's, where Axolotl has its own" \
            if subject.framework == "axolotl" and name == "alpaca" else ""
        return Accounted(key, setting, "translated", words, {"data.format": name})
    return Accounted(key, setting, "no effect", "how the rows are read is found by looking at them; name it with data.format")


def _sources(subject: Subject, key: str, setting: Setting) -> Accounted:
    from powertrain.audit.convert import Accounted

    names = [str(name) for name in (setting.value if isinstance(setting.value, list) else [setting.value])]
    config = subject.value("data.config")
    entries = _named_sets(subject)
    ours: dict[str, Any] = {}
    found, absent = [], []
    for name in names:
        entry = entries.get(name)
        source = _entry_source(subject, entry) if entry is not None else _local(subject, name)
        if entry is not None:
            ours |= _entry_format(entry)
        if isinstance(config, str) and is_hub_id(source):
            source = f"{source}:{config}"
        found.append(source)
        if subject.framework == "llama-factory" and entry is None and not Path(source).exists() and not is_hub_id(source):
            absent.append(name)
    ours[key] = found[0] if len(found) == 1 else found
    if key == "data.validation_source" and len(found) > 1:
        return Accounted(key, setting, "not supported", "held-out examples come from one source; join the files")
    why = f"not here: {', '.join(absent)} are names in {NAMES_FILE}, which is not at {_names_file(subject)}; write their " \
          f"files as {key}" if absent else ""
    return Accounted(key, setting, "translated", why, ours)


def _local(subject: Subject, name: str) -> str:
    """A path as it is found from here: as it stands, or beside the config; anything else stays as it stands."""
    path = Path(name).expanduser()
    beside = subject.path.parent / name
    return str(beside) if not path.is_absolute() and not path.exists() and beside.exists() else name


def _names_file(subject: Subject) -> Path:
    folder = Path(str(subject.value("data.dataset_dir") or "data"))
    return next((file for file in (folder / NAMES_FILE, subject.path.parent / folder / NAMES_FILE) if file.is_file()),
                folder / NAMES_FILE)


def _named_sets(subject: Subject) -> dict[str, dict[str, Any]]:
    """LLaMA-Factory's table of data sets by name; empty where it is not here."""
    if subject.framework != "llama-factory":
        return {}
    try:
        table = json.loads(_names_file(subject).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in table.items() if isinstance(entry, dict)} if isinstance(table, dict) else {}


def _entry_source(subject: Subject, entry: dict[str, Any]) -> str:
    for key in ("hf_hub_url", "ms_hub_url"):
        if isinstance(entry.get(key), str):
            return f"{entry[key]}:{entry['subset']}" if entry.get("subset") else str(entry[key])
    return str(_names_file(subject).parent / str(entry.get("file_name", "")))


def _entry_format(entry: dict[str, Any]) -> dict[str, Any]:
    style = entry.get("formatting", "alpaca")
    columns = {COLUMNS[key]: theirs for key, theirs in (entry.get("columns") or {}).items()
               if key in COLUMNS and COLUMNS[key] != theirs}
    name = "sharegpt" if style == "sharegpt" else "alpaca"
    return {"data.format": name} | ({"data.columns": columns} if columns else {})
