"""The text of `powertrain data check` and `powertrain data show`."""

from __future__ import annotations

from collections.abc import Sequence

from powertrain.records.examples import ExampleCheck, Piece, Problem
from powertrain.report.figures import count

NAMED_ROWS = 5                               # of each kind of problem
BAR_CHARS = 40

# kind of problem -> what is wrong with these rows
FINDINGS = {
    "bad": "bad rows, left out", "untrained": "rows without a trained token, left out", "dropped": "rows too long, left out",
    "cut": "rows too long, cut", "only_last": "conversations in which only the last turn is trained",
    "boundary": "prompts whose tokens change when their answer follows", "duplicate": "rows that repeat an earlier one",
    "shared": "prompts that are in training and in validation"}


def check_rows(check: ExampleCheck) -> list[tuple[str, str]]:
    """Label and text of each line; a label stands before the first of its lines."""
    return [*_labelled("Data", check.said), *_labelled("Rows", _row_lines(check)), *_labelled("Lengths", _length_lines(check)),
            *_labelled("Padding", [f"{share:6.1%}  {name}, {check.train_batch_size} examples a batch" if "padded" in name else
                                   f"{share:6.1%}  {name}" for name, share in check.padding_shares.items()]),
            *_labelled("Epoch", [
                f"{count(check.training_examples)} examples, {count(check.epoch_tokens)} tokens, of which "
                f"{count(check.epoch_trained_tokens)} ({check.trained_share:.1%}) are trained; "
                f"{count(check.validation_examples)} examples held out"])]


def totals(check: ExampleCheck) -> dict[str, int]:
    """Kind of problem -> how many rows have it."""
    found = {**check.counts, "duplicate": check.duplicates, "shared": check.shared_prompts}
    return {kind: found[kind] for kind in FINDINGS if found.get(kind)}


def marked(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Who reads a text, and the text with what is trained in [[...]]."""
    readers = dict.fromkeys(piece.reader for piece in pieces)
    return [(reader, "".join(f"[[{piece.text}]]" if piece.trained else piece.text for piece in pieces
                             if piece.reader == reader)) for reader in readers]


def _row_lines(check: ExampleCheck) -> list[str]:
    lines = [f"{check.counts['rows']:,} rows give {check.counts['examples']:,} examples"]
    for kind, total in totals(check).items():
        lost = f" ({check.counts['tokens_lost']:,} tokens lost)" if kind in ("cut", "dropped") else ""
        lines.append(f"{total:,} {FINDINGS[kind]}{lost}")
        named = [problem for problem in check.problems if problem.kind == kind][:NAMED_ROWS]
        lines += [f"    {_named(problem)}" for problem in named]
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


def _named(problem: Problem) -> str:
    return f"{problem.origin}: {problem.reason}"


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [(label if number == 0 else "", line) for number, line in enumerate(lines)]
