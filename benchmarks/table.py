"""The README's table of measured figures, made from studies/: `python benchmarks/table.py` writes it into the README."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"<!-- studies -->\n(.*?)<!-- /studies -->", re.DOTALL)
NAMES = {"large": "6 layers x 384, block 256, batch 64", "small": "4 layers x 128, block 64, batch 12"}


def rows() -> str:
    """The table as Markdown, one row per study that compares with nanoGPT."""
    lines = ["| model | machine | nanoGPT as shipped | powertrain | times as fast (95 %) | loss apart | study |",
             "|---|---|---|---|---|---|---|"]
    for path in sorted((ROOT / "studies").glob("*_nanogpt-*/evidence.json")):
        found = json.loads(path.read_text())
        step_s, speed, loss = found["step_s"], found["speedup"], found["loss_difference"]
        machine = f"{found['machine']['name']}, {found['machine']['cores']} cores"
        lines.append(
            f"| {NAMES[found['model']]}, dropout {found['dropout']:g} | {machine} "
            f"| {step_s['nanogpt']['median'] * 1e3:,.0f} ms | {step_s['powertrain']['median'] * 1e3:,.0f} ms "
            f"| {speed['ratio']:.2f} ({speed['low']:.2f} to {speed['high']:.2f}) "
            f"| {loss['mean']:+.3f} | `studies/{path.parent.name}` |")
    return "\n".join(lines) + "\n"


def in_text(text: str) -> str:
    """The table that stands between the marks in `text`."""
    found = MARKED.search(text)
    assert found, "the marks <!-- studies --> and <!-- /studies --> are missing"
    return found.group(1)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(MARKED.sub(lambda _: f"<!-- studies -->\n{rows()}<!-- /studies -->", readme.read_text()))
