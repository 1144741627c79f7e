"""SVG from numbers: elements, scales, ticks, legends. What a figure shows is in chart.py, who draws it in drawing.py.
Everything that comes from outside is escaped here."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from powertrain.records.timeline import is_finite
from powertrain.report.chart import Axis

TEXT_PX = 12.0
CHAR_PX, BOLD_PX = 7.1, 7.7   # mean width of a character at that size, in a wide font
LINE_PX = 16.0
NEARLY_LINEAR = 6.0          # from end to end of a logarithmic axis: up to there, evenly spaced values make better ticks
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

Entry = tuple[str, str, str]                 # of a legend: label, colour, shape


def element(name: str, /, *children: str, **attributes: object) -> str:
    """Return an element. `children` are markup; in an attribute's name `_` stands for `-`, and a final `_` is dropped."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(_attribute(value))}"'
                    for key, value in attributes.items() if value is not None)
    return f"<{name}{given}>{''.join(children)}</{name}>" if children else f"<{name}{given}/>"


def _attribute(value: object) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} has no place in a drawing")
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)


def text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = "ink", bold: bool = False) -> str:
    return element("text", html.escape(words), x=x, y=y, text_anchor=None if anchor == "start" else anchor,
                   class_=f"f-{colour}" + (" bold" if bold else ""))


def told(words: str, shape: str) -> str:
    """Return the shape with words that a pointer over it shows."""
    return element("g", element("title", html.escape(words)), shape)


@dataclass(frozen=True)
class Scale:
    """Converts values to pixels, within the ends of the axis."""

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value, clamped to the scale's ends, so that nothing is drawn outside."""
        low, high, at = (map(math.log10, (self.low, self.high, max(value, self.low)))
                         if self.log else (self.low, self.high, value))
        share = min(max((at - low) / (high - low), 0.0), 1.0)
        return self.start_px + share * (self.end_px - self.start_px)

    def shows(self, value: float | None) -> bool:
        return is_finite(value) and (value > 0 or not self.log)


def limits(found: Iterable[float | None], axis: Axis, room: float = 0.04) -> tuple[float, float]:
    """Return the ends of an axis that shows all finite values, with a little room; its own ends are taken as given."""
    real = [value for value in found if is_finite(value) and (value > 0 or not axis.log)]
    least, most = min(real, default=1.0), max(real, default=1.0)
    if axis.log:
        least, most = (least / 1.5, most * 1.5) if most / least < 1.5 else (least, most)
        factor = (most / least) ** room
        least, most = least / factor, most * factor
    else:
        if most == least:
            spread = abs(most) * 0.05 or 1.0
            least, most = least - spread, most + spread
        extra = (most - least) * room
        least, most = least - extra, most + extra
    low, high = least if axis.low is None else axis.low, most if axis.high is None else axis.high
    return (low, high) if high > low else (low, low + 1.0)


def ticks(low: float, high: float, *, log: bool, about: int) -> list[tuple[float, str]]:
    """Return about so many round values between the ends, with their labels."""
    if log and high / low >= NEARLY_LINEAR:
        return _log_ticks(low, high, about)
    rough = (high - low) / max(about, 1)
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * base for factor in (1, 2, 2.5, 5, 10) if factor * base >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(number * step, tick_label(number * step, step)) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, about: int) -> list[tuple[float, str]]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(found) <= about:
            break
    every = -(-len(found) // max(about, 1))
    return [(value, tick_label(value, value)) for value in found[::every]]


def tick_label(value: float, step: float) -> str:
    """Return the value with as few digits as distinguish values that are `step` apart."""
    if value == 0 or abs(value) < step * 1e-6:
        return "0"
    if abs(value) < 1e-4:
        digits = math.floor(math.log10(abs(value))) - math.floor(math.log10(step) + 1e-9)
        short = digits <= 0 and abs(step / 10 ** math.floor(math.log10(step) + 1e-9) - 1) < 1e-6
        return f"{value:.{max(0, digits) + (not short)}e}".replace("e-0", "e-")
    for unit, name in UNITS:
        if abs(value) >= unit and abs(value) >= 1e4:
            return f"{_plain(value / unit, step / unit)} {name}"
    return _plain(value, step)


def _plain(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{digits}f}" if abs(step * 10**digits - round(step * 10**digits)) < 1e-6 else f"{value:.{digits + 1}f}"


def width_of(words: str, *, bold: bool = False) -> float:
    return len(words) * (BOLD_PX if bold else CHAR_PX)


def shortened(words: str, width_px: float) -> str:
    """Return the words, cut so that they fit into the width."""
    most = max(4, int(width_px / CHAR_PX))
    return words if len(words) <= most else words[:most - 1].rstrip() + "…"


def legend(entries: Sequence[Entry], width_px: float) -> tuple[list[str], float]:
    """Return marks and height of a legend, in as many lines as its entries need."""
    marks: list[str] = []
    x, y = 0.0, TEXT_PX
    for label, colour, shape in entries:
        label = shortened(label, width_px - 24)
        needed = 20 + width_of(label) + 14
        if x and x + needed - 14 > width_px:
            x, y = 0.0, y + LINE_PX
        marks += [_swatch(x, y - 4, colour, shape), text(x + 20, y, label)]
        x += needed
    return marks, (y + 6 if entries else 0.0)


def _swatch(x: float, y: float, colour: str, shape: str) -> str:
    if shape == "hatch":
        return hatched(x + 2, y - 5, 12, 10, colour)
    if shape in ("box", "shade"):
        return element("rect", x=x + 2, y=y - 5, width=12, height=10, class_=f"f-{colour}" + " shade" * (shape == "shade"))
    if shape == "upright":
        return element("path", d=f"M{x + 8} {y - 6}V{y + 6}", class_=f"s-{colour} moment")
    if shape in ("line", "faint", "dashed"):
        return element("path", d=f"M{x} {y}H{x + 16}", class_=f"s-{colour} line {shape}")
    return symbol(x + 8, y, colour, shape)


def symbol(x: float, y: float, colour: str, shape: str) -> str:
    """Return the mark of a point: a ring, an upright bar, or a full circle."""
    if shape == "ring":
        return element("circle", cx=x, cy=y, r=4, class_=f"s-{colour} ring")
    if shape == "bar":
        return element("path", d=f"M{x:.2f} {y - 8:.2f}v16", class_=f"s-{colour} cross")
    return element("circle", cx=x, cy=y, r=4, class_=f"f-{colour} dot")


def stripe(left: float, top: float, right: float, bottom: float, colour: str) -> str:
    """Return a pale rectangle, at least a pixel wide and high."""
    return element("rect", x=left, y=top, width=max(right - left, 1.0), height=max(bottom - top, 1.0),
                   class_=f"f-{colour} shade")


def hatched(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Return a rectangle of slanted lines, for a mixture such as `other`."""
    lines = []
    at = x - height + 3
    while at < x + width:
        start, end = max(at, x), min(at + height, x + width)
        if end > start:
            lines.append(f"M{start:.1f} {y + height - (start - at):.1f}L{end:.1f} {y + height - (end - at):.1f}")
        at += 5
    return (element("rect", x=x, y=y, width=max(width, 0.0), height=height, class_=f"f-{colour} shade")
            + element("path", d="".join(lines) or "M0 0", class_=f"s-{colour} hatch"))
