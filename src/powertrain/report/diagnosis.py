"""A diagnosis as rows: environment, verdict with its cure, forecast, and findings.

All values are plain (records.to_plain of a diagnosis), so a diagnosis and its JSON print the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.records.findings import SEVERITIES
from powertrain.report.figures import duration, interval

Row = tuple[str, ...]
CURED = 1.02                 # times as fast: a smaller gain is not reported


def diagnosis_rows(found: Mapping[str, Any]) -> list[Row]:
    """Return (title, text) rows of environment, verdict and forecast."""
    rows: list[Row] = [(name.capitalize(), text) for name, text in found["environment"].items()]
    if found["failed"]:
        rows.append(("Probe", f"the run cannot start: {found['failed']}"))
    if found["causes"]:
        rows += [("", ""), *verdict_rows(found["causes"])]
    if found["forecast"]:
        rows += [("", ""), *forecast_rows(found["forecast"])]
    return rows


def verdict_rows(causes: Sequence[Mapping[str, Any]]) -> list[Row]:
    first = causes[0]
    curable = first["predicted"] >= CURED
    rows: list[Row] = [("Verdict", f"this run is bound by {first['name']}: {share_of(first)}"),
                       *[("Seen", evidence["what"]) for evidence in first["evidence"]]]
    words = " ".join(first["cure"]["words"])
    rows.append(("Cure", f"{first['cure']['says']}{f' ({words})' if words else ''}"))
    most = f"at most {first['bound']:.2f} times if this cause took no time" if first["predicted"] <= first["bound"] else \
        f"this cause alone allows {first['bound']:.2f} times: the change helps elsewhere too"
    rows.append(("Gain", f"{first['predicted']:.2f} times as fast is predicted ({first['basis']}); {most}") if curable else
                ("Gain", "no known change makes this run faster; without this cause the run would be at most "
                         f"{first['bound']:.2f} times as fast"))
    return rows + [("Also" if number == 0 else "", _cause(cause)) for number, cause in enumerate(causes[1:])]


def share_of(cause: Mapping[str, Any]) -> str:
    return f"{cause['share']:.0%} of its time"


def _cause(cause: Mapping[str, Any]) -> str:
    words = " ".join(cause["cure"]["words"])
    text = f"{cause['name']}: {share_of(cause)}, bound {cause['bound']:.2f}; " + "; ".join(
        evidence["what"] for evidence in cause["evidence"])
    if cause["predicted"] >= CURED:
        return f"{text}; {cause['cure']['says']}{f' ({words})' if words else ''}: {cause['predicted']:.2f} times as fast"
    return f"{text}; {words} was tried and did not help" if cause["tried"] and words else text


def forecast_rows(forecast: Mapping[str, Any]) -> list[Row]:
    seconds, step_s = forecast["seconds"], forecast["step_s"]
    parts = ", ".join(f"{name} {duration(part)}" for name, part in forecast["parts"].items())
    rows: list[Row] = [
        ("Time", f"{interval(duration(seconds['low']), duration(seconds['high']))} for the whole run of {forecast['steps']:,} "
                 f"steps ({duration(step_s['median'])} each, {forecast['tokens_per_s']:,.0f} tokens/s): {parts}")]
    if forecast["cost"]:
        cost = forecast["cost"]
        rows.append(("Cost", f"{cost['low']:.3g} to {cost['high']:.3g}, at the price given for an hour"))
    if forecast["energy_kwh"] is not None:
        rows.append(("Energy", f"{forecast['energy_kwh']:.3g} kWh for the processors"))
    return rows


def finding_rows(findings: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return (severity, title, why with cure) of each finding; good ones come last, in one line each."""
    rows: list[Row] = []
    for finding in findings:
        seen = "; ".join(evidence["what"] for evidence in finding["evidence"])
        if finding["severity"] == "good":
            rows.append(("good", finding["title"], seen))
            continue
        words, speed = " ".join(finding["cure"]["words"]), finding["expected"]["speed"]
        expected = f" [{finding['expected']['says']}; {finding['expected']['basis']}]" if speed else ""
        rows.append((finding["severity"], finding["title"],
                     f"{finding['why']} ({seen}); {finding['cure']['says']}{f': {words}' if words else ''}{expected}"))
    return rows


def summary_row(findings: Sequence[Mapping[str, Any]]) -> Row:
    """Return the number of findings of each severity."""
    counts = {severity: sum(finding["severity"] == severity for finding in findings) for severity in SEVERITIES}
    return "Checks", ", ".join(f"{count} {severity}" for severity, count in counts.items())
