"""The losses of a run's checkpoints as a picture."""

from collections.abc import Sequence

from powertrain.report.chart import Axis, Plot, Series
from powertrain.report.formats import svg_file


def losses_svg(run: str, rows: Sequence[tuple[int, float | None, float | None]]) -> str:
    """Return an SVG file of (step, training loss, held-out loss) of the checkpoints."""
    told = [Series(name, tuple((step, value) for step, value in points if value is not None), colour, "circle")
            for name, colour, points in (("training loss at the save", "blue", [(step, loss) for step, loss, _ in rows]),
                                         ("held-out loss", "red", [(step, loss) for step, _, loss in rows]))]
    title = f"Losses of {len(rows)} checkpoints of {run}"
    return svg_file(Plot(Axis("step"), Axis("loss, nats a token"), tuple(series for series in told if series.points), title),
                    title=title, description=f"{title}, in nats per trained token.")
