"""README and docs/techniques.md: what each technique does, from the newest ablation of each recipe on each machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powertrain.report.words import memory
from tables.stored import Study, folder_of, machine, markdown_table, studies_of, times

NONE = "No ablation is stored in `studies/` yet: `powertrain ablate RECIPE` makes one.\n"
SHORT = ("technique", "recipe", "speed with it (95 %)", "peak memory", "same training", "verdict", "study")
FULL = ("technique", "exactness", "at most (Amdahl)", "speed with it (95 %)", "peak memory", "same training", "verdict", "why")

Found = Mapping[str, Any]                    # one technique's findings


def newest(studies: Path) -> list[Study]:
    """The newest ablation of each recipe on each machine, by recipe."""
    found = {(recipe(study), machine(study)): study for study in studies_of("ablation", studies)}
    return [found[key] for key in sorted(found)]


def short(studies: Path) -> str:
    rows = [(f"`{found['name']}`", f"`{recipe(study)}`", times(found["speed"]) or "not timed", memory_change(found),
             parity(found), found["verdict"], folder_of(study))
            for study in newest(studies) for found in study["findings"]["techniques"]]
    return markdown_table(SHORT, rows) if rows else NONE


def in_full(studies: Path) -> str:
    sections = [_section(study) for study in newest(studies)]
    return "\n".join(sections) if sections else NONE


def _section(study: Study) -> str:
    findings = study["findings"]
    rows = [(f"`{found['name']}`{_settings(found)}", found["exactness"].lower(),
             "" if found["bound"] is None else f"{found['bound']:.2f}", times(found["speed"]) or "not timed",
             memory_change(found), parity(found), found["verdict"], found["why"]) for found in findings["techniques"]]
    floor = "" if study["noise_floor"] is None else f"; equal arms differ here by up to {study['noise_floor']:.1%}"
    whole = _whole_plan(study)
    return (f"### `{recipe(study)}` on {machine(study)}\n\n{folder_of(study)}, {study['date']}, torch "
            f"{study['versions'].get('torch', 'unknown')}{floor}.{whole}\n\n{markdown_table(FULL, rows)}")


def _whole_plan(study: Study) -> str:
    index = study["findings"].get("total")
    if index is None or (speed := study["comparisons"][index]["speed"]) is None:
        return ""
    return f" The whole plan is {times(speed)} times as fast as no technique."


def recipe(study: Study) -> str:
    return shlex.join(study["findings"]["recipe"]) or "default"


def memory_change(found: Found) -> str:
    change = found["memory_bytes"]
    if change is None:
        return "not measured"
    return "the same" if change == 0 else f"{'+' if change > 0 else '-'}{memory(abs(change))}"


def parity(found: Found) -> str:
    """Whether the arms learn the same, and how far their losses are apart."""
    held = found["parity"]
    if held is None:
        return "not checked"
    apart = "same losses" if held["loss_difference"] == 0 else f"losses {held['loss_difference']:.1e} apart"
    return f"yes: {apart}" if held["holds"] else f"NO: {apart}"


def _settings(found: Found) -> str:
    shown = ", ".join(f"{name}={json.dumps(value)}" for name, value in (found["settings"] or {}).items())
    return f" ({shown})" if shown else ""
