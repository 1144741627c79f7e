"""README and docs/results.md: Powertrain against its peers, from the studies that `make bench` has stored."""

from __future__ import annotations

from pathlib import Path

from tables.stored import Study, folder_of, machine, markdown_table, studies_of, times

WHOLE = ("what", "peer", "its", "ours", "times as fast (95 %)", "study")        # of the cases that take no steps by turns
FASTEST = ("what is trained", "fastest setting of the peer", "Powertrain is times as fast (95 %)")
COLUMNS = ("what", "peer", "its tokens/s", "ours", "times as fast (95 %)", "losses apart", "of the GEMM limit", "study")


def rows(studies: Path) -> str:
    """The newest study of each case, a row for each of its peers; under them where they were measured."""
    newest = {study["findings"]["case"]: study for study in studies_of("peers", studies)}
    found = [row for study in newest.values() for row in _rows_of(study)]
    whole = [study for kind in ("prepare", "start") for study in studies_of(kind, studies)[-1:]]
    others = [row for study in whole for row in (_prepared if study["kind"] == "prepare" else _started)(study)]
    machines = sorted({machine(study) for study in (*newest.values(), *whole)})
    tables = [markdown_table(COLUMNS, found), *([markdown_table(WHOLE, others)] if others else [])]
    return "\n".join([*tables, f"On: {'; '.join(machines)}.\n"])


def fastest(studies: Path) -> str:
    """Return the README's table: the newest study of each case, against the fastest setting of its peer."""
    newest = {study["findings"]["case"]: study for study in studies_of("peers", studies)}
    found = [min(zip(study["comparisons"][1:], study["runs"][::2], strict=True), key=lambda one: one[0]["speed"]["median"])
             for study in newest.values()]
    rows = [(study["what"], theirs["arm"], times(comparison["speed"]))
            for study, (comparison, theirs) in zip(newest.values(), found, strict=True)]
    return markdown_table(FASTEST, rows) if rows else "No study is stored in `studies/` yet: `make bench` makes them.\n"


def _rows_of(study: Study) -> list[tuple[str, ...]]:
    findings, pairs = study["findings"], list(zip(study["runs"][::2], study["runs"][1::2], strict=True))
    return [(study["what"], theirs["arm"], _speed(theirs), _speed(ours), times(comparison["speed"]),
             f"{losses['mean_absolute']:.2g} over {losses['steps']} steps", f"{findings['products_share']:.0%}",
             folder_of(study))
            for (theirs, ours), comparison, losses in zip(pairs, study["comparisons"][1:], findings["losses"], strict=True)]


def _prepared(study: Study) -> list[tuple[str, ...]]:
    return [(f"data preparation, rows of {kind}, to the same trained tokens",
             f"datasets.map in batches, the faster of 1 and 2 processes ({one['peer_processes']})",
             f"{one['peer_rows_per_s']:,.0f} rows/s", f"{one['rows_per_s']:,.0f} rows/s", times(one["ratio"]), folder_of(study))
            for kind, one in study["findings"].items()]


def _started(study: Study) -> list[tuple[str, ...]]:
    found = study["findings"]["to_first_step"]
    theirs = found["peer"]["median"]
    return [(f"from the command to the first step of LoRA, {kind} caches", "TRL", f"{theirs:.1f} s",
             f"{times(found[kind], '.1f')} s", f"{theirs / found[kind]['median']:.2f}", folder_of(study))
            for kind in ("warm", "cold")]


def _speed(run: Study) -> str:
    seconds = sum(window["seconds"] for window in run["windows"])
    tokens = sum(window["real_tokens"] for window in run["windows"])
    return f"{tokens / seconds:,.0f}" if seconds else ""
