"""Draw the README's picture, docs/run.svg, from a run: `make picture RUN=runs/NAME`.

The picture is the report's loss curve over trained tokens. One file serves light and dark pages.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from powertrain.records import timeline
from powertrain.records.event_log import read_events
from powertrain.report import run_figures
from powertrain.report.chart import Plot
from powertrain.report.formats import svg_file
from powertrain.report.page import Missing

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "run.svg"


def drawing(run: Path) -> str:
    """Return the run's loss curve as an SVG file that needs nothing else."""
    figure = run_figures.loss(timeline.read(read_events(run / "events.jsonl")))
    if isinstance(figure, Missing) or not isinstance(figure.drawings[0], Plot):
        raise ValueError(f"{run} has no loss curve")
    plot = replace(figure.drawings[0], title=figure.title)
    return svg_file(plot, title=figure.title, description=figure.description)


if __name__ == "__main__":
    PICTURE.write_text(drawing(Path(sys.argv[1])), encoding="utf-8")
