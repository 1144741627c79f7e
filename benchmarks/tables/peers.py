"""README and docs/results.md: Powertrain against its peers, from the studies that `make bench` has stored.

A ratio is shown only where the machine was idle; otherwise its place says why not. Where the peer was slower beside us
than alone (benchmarks/conditions.py), we are compared with the peer alone, and the place says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from conditions import MOST_OTHERS, MOST_SLOWER

from tables.stored import Study, folder_of, machine, markdown_table, studies_of, times

RATIO = "speed of Powertrain over the peer's (95 % interval)"
WHOLE = ("what", "peer", "its", "ours", RATIO, "study")         # of the cases that take no steps by turns
FASTEST = ("what is trained", "fastest setting of the peer", "its tokens/s alone", RATIO)
NOT_ALONE = "the peer was not measured alone"
NOT_WATCHED = "the load of the machine was not recorded"
PARTS = ("products", "attention", "elementwise", "loss", "optimizer")         # of a step's time
COLUMNS = ("what", "peer", "its tokens/s alone", "beside ours", "ours", RATIO,
           "losses apart", "of the GEMM limit", "study")


def rows(studies: Path) -> str:
    """The newest study of each case, a row for each of its peers; under them where they were measured."""
    newest = {study["findings"]["case"]: study for study in studies_of("peers", studies)}
    found = [row for study in newest.values() for row in _rows_of(study)]
    whole = [study for kind in TOLD for study in studies_of(kind, studies)[-1:]]
    others = [row for study in whole for row in TOLD[study["kind"]](study)]
    machines = sorted({machine(study) for study in (*newest.values(), *whole)})
    tables = [markdown_table(COLUMNS, found), *([markdown_table(WHOLE, others)] if others else [])]
    return "\n".join([*tables, f"On: {'; '.join(machines)}.\n"])


def fastest(studies: Path) -> str:
    """Return the README's table: the newest study of each case, against the fastest setting of its peer."""
    newest = {study["findings"]["case"]: study for study in studies_of("peers", studies)}
    found = [min(zip(study["comparisons"][1:], study["runs"][::2], strict=True), key=lambda one: one[0]["speed"]["median"])
             for study in newest.values()]
    rows = [(study["what"], theirs["arm"], _alone(under := _conditions(study).get(theirs["arm"])),
             _against_peer(under, comparison))
            for study, (comparison, theirs) in zip(newest.values(), found, strict=True)]
    return markdown_table(FASTEST, rows) if rows else "No study is stored in `studies/` yet: `make bench` makes them.\n"


def spent(studies: Path) -> str:
    """Where a step's time goes in the newest study of each case: its share of the products' limit, and shares of its time."""
    newest = {study["findings"]["case"]: study for study in studies_of("peers", studies)}
    rows = [(study["what"], f"{found['products_share']:.0%}", *_parts(found["profile"]), folder_of(study))
            for study in newest.values() for found in [study["findings"]] if "profile" in found]
    return markdown_table(("what", "of the GEMM limit", *PARTS, "the rest", "study"), rows)


def _parts(profile: Mapping[str, float]) -> list[str]:
    shares = [profile.get(name, 0.0) / sum(profile.values()) for name in PARTS]
    return [f"{share:.0%}" for share in (*shares, 1 - sum(shares))]


def _rows_of(study: Study) -> list[tuple[str, ...]]:
    findings, pairs = study["findings"], list(zip(study["runs"][::2], study["runs"][1::2], strict=True))
    under = _conditions(study)
    return [(study["what"], theirs["arm"], _alone(under.get(theirs["arm"])), _speed(theirs), _speed(ours),
             _against_peer(under.get(theirs["arm"]), comparison),
             f"{losses['mean_absolute']:.2g} over {losses['steps']} steps", f"{findings['products_share']:.0%}",
             folder_of(study))
            for (theirs, ours), comparison, losses in zip(pairs, study["comparisons"][1:], findings["losses"], strict=True)]


def _prepared(study: Study) -> list[tuple[str, ...]]:
    return [(f"data preparation, rows of {kind}, to the same trained tokens",
             f"datasets.map in batches, the faster of 1 and 2 processes ({one['peer_processes']})",
             f"{one['peer_rows_per_s']:,.0f} rows/s", f"{one['rows_per_s']:,.0f} rows/s",
             _ratio(_watched(study), times(one["ratio"]), NOT_WATCHED), folder_of(study))
            for kind, one in study["findings"].items()] + [
            (f"data preparation, rows of {kind}", "the library `tokenizers` alone, on every text",
             f"{one['rows_per_s'] / one['tokenizer_share']['median']:,.0f} rows/s", f"{one['rows_per_s']:,.0f} rows/s",
             _ratio(_watched(study), times(one["tokenizer_share"]), NOT_WATCHED), folder_of(study))
            for kind, one in study["findings"].items() if "tokenizer_share" in one]


def _started(study: Study) -> list[tuple[str, ...]]:
    found = study["findings"]["to_first_step"]
    theirs = found["peer"]["median"]
    of_recipes = [(f"from the command to the first step of the recipe `{kind}`, warm caches", "", "",
                   f"{times(found[kind], '.1f')} s", "", folder_of(study))
                  for kind in found if kind not in ("warm", "cold", "peer")]
    return [*((f"from the command to the first step of LoRA, {kind} caches", "TRL", f"{theirs:.1f} s",
               f"{times(found[kind], '.1f')} s",
               _ratio(_watched(study), f"{theirs / found[kind]['median']:.2f}", NOT_WATCHED), folder_of(study))
              for kind in ("warm", "cold")), *of_recipes]


def _written(study: Study) -> list[tuple[str, ...]]:
    writers, answers = study["findings"]["writers"], study["findings"]["answers"]
    ours, watched = writers["ours"]["tokens_per_s"]["median"], _watched(study)
    rows = [("text written by `generate`, Llama of 115.6 M parameters in bf16", name,
             f"{one['tokens_per_s']['median']:,.0f} tokens/s", f"{ours:,.0f} tokens/s",
             _ratio(watched, times(one["ratio"]), NOT_WATCHED), folder_of(study))
            for name, one in writers.items() if name not in ("ours", "before")]
    ratio, speed = answers["ratio"], answers["answers_per_s"]
    return [*rows, ("questions answered by `evaluate --metric`", "one at a time by torch's operators, in fp32",
                    f"{speed / ratio['median']:.2f} a second", f"{speed:.2f} a second",
                    _ratio(watched, times(ratio), NOT_WATCHED), folder_of(study))]


TOLD = {"prepare": _prepared, "start": _started, "writing": _written}


def _conditions(study: Study) -> Mapping[str, Study]:
    """Return peer -> the conditions that it was measured under; nothing for a study from before they were recorded."""
    return {one["peer"]: one for one in study["findings"].get("conditions", ())}


def _watched(study: Study) -> Study | None:
    """Return what the study says of the machine while it measured; None for a study from before that was recorded."""
    found: Study = study["machine"]
    return found if "unclean" in found else None


def _against_peer(under: Study | None, comparison: Study) -> str:
    """Return how many times as fast as the peer we are: than beside us, or than alone where being beside us slowed it."""
    if under is not None and under.get("slower", 0.0) > MOST_SLOWER and max(under["others_share"],
                                                                           under["stolen_share"]) <= MOST_OTHERS:
        over_alone = comparison["tokens_per_s"][1] / under["alone_tokens_per_s"]
        return f"{over_alone:.2f} (the peer alone; beside ours it was {under['slower']:.0%} slower)"
    return _ratio(under, times(comparison["speed"]), NOT_ALONE)


def _ratio(under: Study | None, ratio: str, unknown: str) -> str:
    """Return the ratio of a clean comparison, or why there is none."""
    unclean = [unknown] if under is None else under["unclean"]
    return f"not clean: {'; '.join(unclean)}" if unclean else ratio


def _alone(under: Study | None) -> str:
    return "" if under is None else f"{under['alone_tokens_per_s']:,.0f}"


def _speed(run: Study) -> str:
    seconds = sum(window["seconds"] for window in run["windows"])
    tokens = sum(window["real_tokens"] for window in run["windows"])
    return f"{tokens / seconds:,.0f}" if seconds else ""
