"""README: Powertrain against its peers, from the studies that `make bench` has stored."""

from __future__ import annotations

from pathlib import Path

from tables.stored import Study, folder_of, machine, markdown_table, studies_of, times

COLUMNS = ("what", "peer", "its tokens/s", "ours", "times as fast (95 %)", "losses apart", "of the GEMM limit", "study")


def rows(studies: Path) -> str:
    """The newest study of each case, a row for each of its peers; under them where they were measured."""
    newest = {study["findings"]["case"]: study for study in studies_of("peers", studies)}
    found = [row for study in newest.values() for row in _rows_of(study)]
    machines = sorted({machine(study) for study in newest.values()})
    return markdown_table(COLUMNS, found) + f"\nOn: {'; '.join(machines)}.\n"


def _rows_of(study: Study) -> list[tuple[str, ...]]:
    findings, pairs = study["findings"], list(zip(study["runs"][::2], study["runs"][1::2], strict=True))
    return [(study["what"], theirs["arm"], _speed(theirs), _speed(ours), times(comparison["speed"]),
             f"{losses['mean_absolute']:.2g} over {losses['steps']} steps", f"{findings['products_share']:.0%}",
             folder_of(study))
            for (theirs, ours), comparison, losses in zip(pairs, study["comparisons"][1:], findings["losses"], strict=True)]


def _speed(run: Study) -> str:
    seconds = sum(window["seconds"] for window in run["windows"])
    tokens = sum(window["real_tokens"] for window in run["windows"])
    return f"{tokens / seconds:,.0f}" if seconds else ""
