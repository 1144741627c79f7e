"""The sentences of findings stand in checks.toml and symptoms.toml; a check or a symptom gives the figures for them.

An entry `[rule.case]` holds title, why, a `because` that other sentences quote, evidence (`seen`), cure with its recipe `words`
and `keys`, expected effect with its `basis`, the risks of the cure, and the severity if that is always the same. What all
cases of a rule share stands in `[rule]`. Beside Python's own formats a figure may be written as `:seconds`, `:MiB`, `:GiB`, or
`:count step` ("1 step", "2 steps").
"""

import math
import string
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from powertrain.records import several
from powertrain.records.findings import UNMEASURED, Cure, Expected, Finding, Risk, Severity, finding

TABLES = ("checks.toml", "symptoms.toml", "bounds.toml")
RISKS = ("breaking", "accuracy", "difficulty")


def told(case: str, *seen: str, severity: Severity | None = None, cure: Cure | None = None, expected: Expected | None = None,
         speed: tuple[float, float] | None = None, **figures: Any) -> Finding:
    """Return the finding of entry `case` ("rule.case") with these figures in its sentences; its rule will sign it.

    `seen` is evidence besides the entry's; `severity`, `cure` and `expected` take the place of the entry's own. The figures
    that are numbers become the finding's `numbers`.
    """
    rule, _, name = case.partition(".")
    entry = {**sentences()[rule], **sentences()[rule][name]}
    if "because" in entry:
        figures["because"] = filled(entry["because"], figures)
    row = {key: filled(text, figures) for key, text in entry.items() if not isinstance(text, dict)}
    if expected is None:
        expected = Expected(row["expected"], row.get("basis", "none"), speed) if "expected" in row else UNMEASURED
    return finding(
        severity or row["severity"], row["title"], row["why"], *row.get("seen", ()), *seen, expected=expected,
        cure=cure or row.get("cure", "nothing to do"), words=row.get("words", ()),
        risk=Risk(**{risk: row[risk] for risk in RISKS if risk in row}), keys=row.get("keys", ()),
        numbers={key: figure for key, figure in figures.items() if isinstance(figure, (int, float)) and math.isfinite(figure)})


@cache
def sentences() -> Mapping[str, Mapping[str, Any]]:
    """Return rule -> its sentences, and under the name of each case those of the case alone."""
    folder = Path(__file__).parent
    return {rule: cases for name in TABLES
            for rule, cases in tomllib.loads((folder / name).read_text(encoding="utf-8")).items()}


def filled(text: str | list[str], figures: Mapping[str, Any]) -> Any:
    """Return a sentence, or several, with the figures in it."""
    return _Figures().vformat(text, (), figures) if isinstance(text, str) else tuple(filled(one, figures) for one in text)


class _Figures(string.Formatter):
    """Python's format strings, and units."""

    def format_field(self, value: Any, spec: str) -> str:
        if spec == "seconds":
            return seconds(value)
        if spec in ("MiB", "GiB"):
            return f"{value / 2**20:,.0f} MiB" if spec == "MiB" else f"{value / 2**30:.2f} GiB"
        if spec.startswith("count "):
            return several(value, spec.removeprefix("count "))
        return format(value, spec)


def seconds(value: float) -> str:
    """Return seconds with their unit, milliseconds below one second."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
