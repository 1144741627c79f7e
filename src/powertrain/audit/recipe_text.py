"""A conversion as a recipe's YAML: each value with the line that it comes from, and below the recipe every other key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from powertrain.audit.conversion import FATES, Accounted, Conversion
from powertrain.audit.literal_files import printable
from powertrain.recipe import quoted

TITLES = {
    "planned": "left to the plan, which knows this machine (the pin in brackets would keep the file's value)",
    "no effect": "no effect here", "not supported": "NOT SUPPORTED: the recipe trains something else than the file here",
    "unknown": "keys that this trainer does not have", "unread": "not read: only running the file would tell",
}
ORDER = ("name", "description", "method", "model", "lora", "quantisation", "data")
COMMENTS_FROM = 44


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
    opened = ""
    for key in sorted(values, key=lambda key: sections.index(key.split(".")[0])):        # each section in one piece
        section, _, leaf = key.partition(".")
        if leaf and section != opened:
            lines.append(f"{section}:")
        opened = section if leaf else ""
        text = f"{'  ' if leaf else ''}{leaf or key}: {quoted(values[key])}"
        lines.append(_commented(text, said_by.get(key, [])))
    return "\n".join([*lines, *_account_lines(conversion)]) + "\n"


def account_rows(conversion: Conversion) -> list[tuple[str, str, str, str]]:
    """Return (fate, key, as the file has it, what became of it) of every key; those that need a look come last."""
    return [(account.fate, account.key, _said(account), _became(account))
            for fate in FATES for account in conversion.accounts if account.fate == fate]


def account_json(conversion: Conversion) -> list[dict[str, Any]]:
    return [{"key": account.key, "fate": account.fate, "value": None if account.setting is None else account.setting.value,
             "line": 0 if account.setting is None else account.setting.place.line, "ours": dict(account.ours),
             "pins": dict(account.pins), "why": account.why} for account in conversion.accounts]


def _commented(text: str, accounts: list[Accounted]) -> str:
    if not accounts:
        return text
    origins: dict[str, str] = {}             # what the file says, once -> why; two settings may stand in one call
    for account in accounts:
        said, why = _origin(account)
        origins[said] = origins.get(said) or why
    return f"{text:<{COMMENTS_FROM}}  # " + "; ".join(f"{said} ({why})" if why else said for said, why in origins.items())


def _origin(account: Accounted) -> tuple[str, str]:
    if account.setting is None:
        return account.why or "a default", ""
    return f"line {account.setting.place.line}: {_short(account.setting.spelled)}", account.why


def _account_lines(conversion: Conversion) -> list[str]:
    lines: list[str] = []
    for fate, title in TITLES.items():
        found = [account for account in conversion.accounts if account.fate == fate]
        lines += ["", f"# {title}:"] if found else []
        lines += [f"#   {_said(account)}: {_became(account)}" for account in found]
    return lines


def _said(account: Accounted) -> str:
    if account.setting is None:
        return "(not in the file)"
    return f"line {account.setting.place.line}: {_short(account.setting.spelled)}"


def _became(account: Accounted) -> str:
    if account.ours:
        written = ", ".join(f"{key}: {quoted(value)}" for key, value in account.ours.items())
        return f"{written}; {account.why}" if account.why else written
    pins = f" [{', '.join(f'{key}: {quoted(value)}' for key, value in account.pins.items())}]" if account.pins else ""
    return f"{account.why}{pins}"


def _short(text: str) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= 70 else f"{text[:67]}..."
