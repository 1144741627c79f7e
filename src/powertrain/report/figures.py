"""Numbers as people read them."""

import math

LARGEST_LOSS = 700.0         # nats: e to the power of more is more than a float holds


def digits(value: float) -> str:
    """Return the number with three digits, or all digits before the point; without an exponent."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats a token."""
    return math.exp(min(loss, LARGEST_LOSS))


def count(value: float) -> str:
    """Return a count as '12,345', or from a million on as '12.3 M'."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{digits(value / limit)} {unit}"
    return f"{value:,.0f}"


def counted(number: float, noun: str, several: str | None = None) -> str:
    """Return '1 pass' or '2 passes'. `several`: the plural, if it is not the noun with an s."""
    return f"{count(number)} {noun if number == 1 else several or noun + 's'}"


def memory(size_bytes: float) -> str:
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size_bytes) >= limit:
            return f"{digits(size_bytes / limit)} {unit}"
    return f"{size_bytes:.0f} bytes"


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
