"""Sizes of files and memory as people read them."""


def digits(value: float) -> str:
    """Return the number with three digits, or all digits before the point; without an exponent."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


def memory(size_bytes: float) -> str:
    """Return '1.35 GiB', '72.4 KiB' or '12 bytes'."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size_bytes) >= limit:
            return f"{digits(size_bytes / limit)} {unit}"
    return f"{size_bytes:.0f} bytes"
