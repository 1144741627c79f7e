"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from powertrain.report.words import count, duration, flops, memory, perplexity


@pytest.mark.parametrize(("shown", "text"), [
    (memory(1000 * 2**20), "1,000 MiB"), (memory(1023.9 * 2**30), "1,024 GiB"), (memory(12.34 * 2**30), "12.3 GiB"),
    (memory(500), "500 bytes"), (count(999.9e6), "1,000 M"), (count(1.2e15), "1,200 T"), (count(12_345), "12,345"),
    (flops(1.979e15), "1,979 TFLOP/s"), (flops(4e11), "0.4 TFLOP/s"), (duration(0.9999), "1,000 ms"),
    (duration(3.21), "3.21 s"), (duration(0.0), "0 ms")])
def test_no_number_is_shown_with_an_exponent(shown: str, text: str) -> None:
    assert shown == text


def test_the_perplexity_of_a_loss_beyond_all_bounds_is_a_number() -> None:
    assert perplexity(math.log(2)) == pytest.approx(2)
    assert math.isfinite(perplexity(1e4))
