"""The rows that commands print: of a data check, of a diagnosis, and of studies (`ablate`, `tune` and `bench`).

The values of a diagnosis are plain (records.to_plain), so a diagnosis and its JSON print the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.records.evidence import Study
from powertrain.records.findings import SEVERITIES, ExampleCheck, Piece
from powertrain.report.words import count, duration, interval, labelled, memory, pins_in_words, said

Row = tuple[str, ...]
NAMED_ROWS = 5                               # of each kind of problem
BAR_CHARS = 40
CURED = 1.02                                 # times as fast: a smaller gain is not reported

# kind of problem -> what is wrong with these rows
FINDINGS = {
    "bad": "bad rows, left out", "tie": "pairs whose two answers are equal, left out",
    "untrained": "rows without a trained token, left out", "dropped": "rows too long, left out",
    "cut": "rows too long, cut", "rewritten": "conversations with turns that are not trained",
    "boundary": "prompts whose tokens change when their answer follows", "duplicate": "rows that repeat an earlier one",
    "shared": "prompts that are in training and in validation"}


# ------------------------------------------------------------------------------------------------ data


def check_rows(check: ExampleCheck) -> list[tuple[str, str]]:
    """Return label and text of each line; only the first line of a group has the label."""
    return [*labelled("Data", check.said), *labelled("Rows", _row_lines(check)), *labelled("Lengths", _length_lines(check)),
            *labelled("Padding", [f"{share:6.1%}  {name}, {check.train_batch_size} examples a batch" if "padded" in name else
                                   f"{share:6.1%}  {name}" for name, share in check.padding_shares.items()]),
            *labelled("Epoch", [
                f"{count(check.training_examples)} examples, {count(check.epoch_tokens)} tokens, of which "
                f"{count(check.epoch_trained_tokens)} ({check.trained_share:.1%}) are trained; "
                f"{count(check.validation_examples)} examples held out"])]


def totals(check: ExampleCheck) -> dict[str, int]:
    """Return the number of rows with each kind of problem."""
    found = {**check.counts, "duplicate": check.duplicates, "shared": check.shared_prompts}
    return {kind: found[kind] for kind in FINDINGS if found.get(kind)}


def marked(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Return each reader (encoder or decoder) with its text; trained tokens stand in [[...]]."""
    readers = dict.fromkeys(piece.reader for piece in pieces)
    return [(reader, "".join(f"[[{piece.text}]]" if piece.trained else piece.text for piece in pieces
                             if piece.reader == reader)) for reader in readers]


def _row_lines(check: ExampleCheck) -> list[str]:
    lines = [f"{check.counts['rows']:,} rows give {check.counts['examples']:,} examples"]
    for kind, total in totals(check).items():
        lost = f" ({check.counts['tokens_lost']:,} tokens lost)" if kind in ("cut", "dropped") else ""
        lines.append(f"{total:,} {FINDINGS[kind]}{lost}")
        named = [problem for problem in check.problems if problem.kind == kind][:NAMED_ROWS]
        lines += [f"    {problem.origin}: {problem.reason}" for problem in named]
        if total > len(named):
            lines.append(f"    and {total - len(named):,} more")
    if check.counts.get("untrained_end"):
        lines.append(f"{check.counts['untrained_end']:,} tokens after the last trained token are left out: they train nothing")
    return lines


def _length_lines(check: ExampleCheck) -> list[str]:
    most = max(bar.examples for bar in check.histogram)
    width = len(f"{check.histogram[-1].last:,}")
    figures = len(f"{most:,}")
    bars = [f"{bar.first:>{width},} to {bar.last:>{width},}  {bar.examples:>{figures},}  "
            f"{'#' * -(-bar.examples * BAR_CHARS // most)}".rstrip() for bar in check.histogram]
    quantiles = ", ".join(f"{name} {tokens:,}" for name, tokens in check.length_quantiles.items())
    return [f"tokens per example: {quantiles}; at most {check.max_length:,} (data.max_length)", *bars]


# ------------------------------------------------------------------------------------------------ a diagnosis


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
        f"without this cause alone it would be {first['bound']:.2f} times; the change helps elsewhere too"
    rows.append(("Gain", f"{first['predicted']:.2f} times as fast is predicted ({first['basis']}); {most}") if curable else
                ("Gain", "no known change makes this run faster; without this cause the run would be at most "
                         f"{first['bound']:.2f} times as fast"))
    return rows + labelled("Also", map(_cause, causes[1:]))


def share_of(cause: Mapping[str, Any]) -> str:
    return f"{cause['share']:.0%} of its time"


def _cause(cause: Mapping[str, Any]) -> str:
    words = " ".join(cause["cure"]["words"])
    text = f"{cause['name']}: {share_of(cause)}, at most {cause['bound']:.2f} times as fast without it; " + "; ".join(
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


# ------------------------------------------------------------------------------------------------ studies


def technique_rows(study: Study) -> Iterator[Row]:
    """Yield what an ablation found of each technique."""
    yield "technique", "bound", "speed with it", "memory", "same losses", "verdict", "why"
    for found in study.findings["techniques"]:
        change, parity = found["memory_bytes"], found["parity"]
        yield (found["name"], "none" if found["bound"] is None else f"x {found['bound']:.2f}",
               "not timed" if found["speed"] is None else _speed(found["speed"]),
               "unknown" if change is None else f"{'+' if change > 0 else '-'}{memory(abs(change))}" if change else "the same",
               "not compared" if parity is None else f"{'yes' if parity['holds'] else 'NO'} ({parity['demanded'].lower()})",
               found["verdict"], found["why"])


def candidate_rows(candidates: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield what a tuning found of each plan that it tried."""
    yield "plan", "speed over the untuned one, by rounds", "kept", "why"
    for found in candidates:
        yield (found["name"], "; ".join(map(_speed, found["rounds"])) or "not tried", "yes" if found["kept"] else "no",
               found["why"])


def tuned_rows(pins: Mapping[str, Any], because: str, least_steps: Mapping[str, int], cached: str) -> list[Row]:
    """Return what a tuning chose, and what later runs do with it."""
    return [("Tuned", pins_in_words(pins) or "nothing"), ("Because", because),
            *[("Length", f"{name} is used for runs of {steps:,} steps or more; shorter runs do not earn back its start-up")
              for name, steps in least_steps.items()],
            ("Kept", cached)]


def total_rows(study: Study, folder: Path) -> list[Row]:
    total, floor = study.findings.get("total"), study.noise_floor
    rows = [("Noise", f"equal plans differ by up to {floor:.1%} here")] if floor is not None else []
    if total is not None and study.kind == "ablation":
        rows.append(("Total", f"the full plan against no technique: {study.comparisons[total].because}"))
    return [*rows, ("Took", duration(study.seconds)), ("Study", f"{folder}/")]


def bench_tables(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[list[Row]]:
    """Yield the rows of each table that has any."""
    for name, table in tables.items():
        if table["rows"]:
            rows = [tuple("" if cell is None else said(cell) if isinstance(cell, float) else str(cell) for cell in row)
                    for row in table["rows"]]
            yield [(name, *table["columns"]), *(("", *row) for row in rows)]


def bench_rows(study: Study, folder: Path) -> list[Row]:
    """Return the remarks on a bench: notes, noise, and what was not reached."""
    floor = "not measured: speeds are held against a margin of 2 %" if study.noise_floor is None else \
        f"equal arms differ by up to {study.noise_floor:.1%} here"
    left = study.findings["not_reached"]
    return [*(("Note", note) for note in study.findings["notes"]), ("Noise", floor),
            *([("Left", f"not reached within the budget: {'; '.join(left)}; use a larger --budget")] if left else []),
            ("Study", f"{folder}/")]


def _speed(found: Mapping[str, float]) -> str:
    return f"x {found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
