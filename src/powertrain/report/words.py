"""Numbers, names and settings as people read them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from powertrain.records.sizes import digits as digits
from powertrain.records.sizes import memory as memory

LARGEST_LOSS = 700.0         # nats: e to the power of more is more than a float holds
ACCURACY = "rewards_accuracies"              # a metric of objectives that compare answers


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats a token."""
    return math.exp(min(loss, LARGEST_LOSS))


def count(value: float) -> str:
    """Return a count as '12,345', or from a million on as '12.3 M'."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{digits(value / limit)} {unit}"
    return f"{value:,.0f}"


def counted(number: float, noun: str) -> str:
    """Return '1 step' or '12.3 M steps'."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def flops(per_s: float) -> str:
    return f"{digits(per_s / 1e12)} TFLOP/s"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{digits(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def interval(low: str, high: str) -> str:
    """Return '3 to 5 s', or '3 s to 2 min' where the units differ."""
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if unit and high.partition(" ")[2] == unit else f"{low} to {high}" if low != high else low


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def said(value: str | float | None) -> str:
    """Return a cell as text: numbers with five digits; - for a value that is absent or not finite."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, (bool, str)):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1e5 else f"{value:.5g}"


def listed(words: Sequence[str]) -> str:
    """Return 'a, b and c'."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def labelled(label: str, lines: Iterable[str]) -> list[tuple[str, str]]:
    """Return rows of which the first has the label."""
    return [("" if number else label, line) for number, line in enumerate(lines)]


def pairs(settings: Mapping[str, Any]) -> str:
    """Return settings as 'examples=4, keep=True'."""
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def with_settings(name: str, settings: Mapping[str, Any]) -> str:
    """Return 'micro_batch (examples=4)', or the name alone without settings."""
    return f"{name} ({pairs(settings)})" if settings else name


def pins_in_words(pins: Mapping[str, Any]) -> str:
    """Return pins as 'micro_batch (examples=4), threads off'."""
    return ", ".join(f"{name} off" if pin == "off" else with_settings(name, pin if isinstance(pin, Mapping) else {})
                     for name, pin in pins.items())


def answers_said(metrics: Mapping[str, float]) -> str:
    """Return what the metrics of compared answers say, or "" where a loss compares none."""
    if ACCURACY not in metrics:
        return ""
    return (f"right in {metrics[ACCURACY]:.1%} of them, margin {metrics['rewards_margins']:.3f} (rewards "
            f"{metrics['rewards_chosen']:.3f} and {metrics['rewards_rejected']:.3f})")
