"""Datasheet peaks by product name."""

import pytest

from powertrain.facts.hardware import datasheet, datasheets


def test_a_name_that_contains_another_name_is_another_product():
    ada, ada_s, small = (datasheet(name) for name in ("NVIDIA L40", "NVIDIA L40S", "NVIDIA L4"))
    assert len({row.flops_per_s["bf16"] for row in (ada, ada_s, small)}) == 3


@pytest.mark.parametrize("name", ["NVIDIA L40X", "NVIDIA", "", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100"])
def test_an_unknown_product_gives_nothing(name):
    assert datasheet(name) is None


def test_case_spaces_and_the_vendor_word_do_not_matter():
    assert datasheet("nvidia  h200") == datasheet("NVIDIA H200") == datasheet("H200")


@pytest.mark.parametrize("name", datasheets())
def test_every_row_has_a_link_and_plausible_figures(name):
    row = datasheet(name)
    rates = row.flops_per_s
    assert row.link.startswith("https://")
    assert all(8e12 <= rate < 3e15 for rate in rates.values())
    assert bool(rates) == (not name.startswith("apple"))     # Apple publishes none
    fp16 = rates.get("fp16", 0)
    assert rates.get("fp32", 0) <= rates.get("tf32", fp16) <= fp16
    assert rates.get("bf16", fp16) == fp16
    assert row.bandwidth_bytes_per_s is None or 2e11 < row.bandwidth_bytes_per_s < 1e13


def test_gpus_before_ampere_have_no_bf16():
    for name in ("Tesla T4", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 2080 Ti"):
        assert "bf16" not in datasheet(name).flops_per_s
