"""Lines of events.jsonl of version 1, which told warnings and failures as sentences only, as today's fields.

This is the one place that reads such sentences. A sentence that is not known here stays a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

WARNINGS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("out_of_memory", re.compile(
        r"step (?P<next_step>[\d,]+) ran out of memory \((?P<said>.*)\): it is taken again in passes of at most "
        r"(?P<after_tokens>[\d,]+) tokens instead of (?P<before_tokens>[\d,]+), at the same batch of "
        r"(?P<train_batch_size>[\d,]+)", re.DOTALL)),
    ("checkpoint_failed", re.compile(
        r"step (?P<step>\d+) could not be saved: (?P<why>.*?); (?P<last>the final model)?", re.DOTALL)),
    ("checkpoint_rejected", re.compile(r"passed over checkpoint (?P<name>[^:]+): (?P<why>.*)", re.DOTALL)))
FAILURES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("loss_not_finite", re.compile(r"the loss of step (?P<step>\d+) is not finite \((?P<loss>\S+)\)")),
    ("weights_not_finite", re.compile(r"after step (?P<step>\d+) (?P<weights>\d+) weights are not finite, (?P<first>\S+) the")),
    ("does_not_fit", re.compile(r"does not fit the memory|ran out of memory")))
STOPPED = re.compile(r"stopped \((?P<signal>\w+)\)")
COUNTS = {"next_step", "step", "after_tokens", "before_tokens", "train_batch_size", "weights"}


def upgraded(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the line with today's fields; a line of this version is returned as it is."""
    message = str(line.get("message") or "")
    if line["event"] == "warning" and "about" not in line and (found := _first(WARNINGS, message)):
        about, fields = found
        step = fields.pop("next_step", None)
        return {"event": "warning", "about": about, "time": line.get("time", 0.0), **fields,
                **({} if step is None else {"step": step - 1}),
                **({"last": fields.get("last") is not None} if about == "checkpoint_failed" else {})}
    if line["event"] == "end":
        stopped = STOPPED.fullmatch(str(line.get("reason")))
        failure = _first(FAILURES, message) if line.get("reason") == "failed" and "error" not in line else None
        return {**line, **({"reason": "stopped", "signal": stopped["signal"]} if stopped else {}),
                **({"error": {"kind": failure[0], **failure[1]}} if failure else {})}
    return line


def _first(patterns: tuple[tuple[str, re.Pattern[str]], ...], message: str) -> tuple[str, dict[str, Any]] | None:
    for kind, pattern in patterns:
        if found := pattern.search(message):
            fields = {name: int(value.replace(",", "")) if name in COUNTS and value else value
                      for name, value in found.groupdict().items()}
            return kind, fields
    return None
