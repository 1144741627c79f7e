"""README: one optimizer step against nanoGPT as shipped."""

from __future__ import annotations

import json
from pathlib import Path

from tables.stored import markdown_table

NAMES = {"large": "6 layers x 384, block 256, batch 64", "small": "4 layers x 128, block 64, batch 12"}
COLUMNS = ("model", "machine", "nanoGPT as shipped", "powertrain", "times as fast (95 %)", "loss apart", "study")


def rows(studies: Path) -> str:
    """One row per study that compares with nanoGPT."""
    found = []
    for path in sorted(studies.glob("*_nanogpt-*/evidence.json")):
        study = json.loads(path.read_text(encoding="utf-8"))
        step_s, speed, loss = study["step_s"], study["speedup"], study["loss_difference"]
        found.append((f"{NAMES[study['model']]}, dropout {study['dropout']:g}",
                      f"{study['machine']['name']}, {study['machine']['cores']} cores",
                      f"{step_s['nanogpt']['median'] * 1e3:,.0f} ms", f"{step_s['powertrain']['median'] * 1e3:,.0f} ms",
                      f"{speed['ratio']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})", f"{loss['mean']:+.3f}",
                      f"`studies/{path.parent.name}`"))
    return markdown_table(COLUMNS, found)
