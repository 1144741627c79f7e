"""Numbers as people read them."""

from __future__ import annotations


def count(value: float) -> str:
    """12,345 or 12.3 M: exact while it is short."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:,.0f}"


def counted(number: float, noun: str, several: str | None = None) -> str:
    """'1 pass' and '2 passes': `several` where it is not the noun with an s."""
    return f"{count(number)} {noun if number == 1 else several or noun + 's'}"


def memory(size_bytes: float) -> str:
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size_bytes) >= limit:
            return f"{size_bytes / limit:.3g} {unit}"
    return f"{size_bytes:.0f} bytes"


def flops(per_s: float) -> str:
    return f"{per_s / 1e12:.3g} TFLOP/s"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def interval(low: str, high: str) -> str:
    """'3 s to 5 s' as '3 to 5 s' where both have one unit."""
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if unit and high.partition(" ")[2] == unit else f"{low} to {high}" if low != high else low
