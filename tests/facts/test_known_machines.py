"""Machines that are not here, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from powertrain.facts.clusters import kinds, machine_of
from powertrain.facts.hardware import read_hardware
from powertrain.records import NETWORK, NODE, WrongUse


@pytest.mark.parametrize(("words", "nodes", "devices"), [
    ("h100", 1, 1), ("8xh100", 1, 8), ("64x8xh100", 64, 8), ("1x1xH100", 1, 1), ("2x4xa100-40gb", 2, 4), ("8xh100-80gb", 1, 8)])
def test_nodes_and_devices_of_a_node(words: str, nodes: int, devices: int, tmp_path: Path) -> None:
    found = machine_of(words, tmp_path)
    assert (found.nodes, found.devices, found.processes, found.basis) == (nodes, devices, nodes * devices, "published")


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_has_published_rates_and_says_where_from(kind: str, tmp_path: Path) -> None:
    found = machine_of(kind, tmp_path)
    assert found.device == "cuda"
    assert "bf16" in found.peak_flops_per_s
    assert found.compute_capability is not None
    assert 20e9 < found.memory_bytes == found.free_memory_bytes < 300e9
    assert all("not measured: https://" in found.sources[field] for field in ("peak_flops_per_s", "memory_bytes", "links"))
    assert all(link.bandwidth_bytes_per_s > 1e10 for link in found.links.values())
    assert NODE in found.links or NETWORK not in found.links


def test_the_cpu_is_the_one_that_is_here_with_its_measured_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = read_hardware(tmp_path)
    shared = machine_of(f"2x{here.cores}xcpu", tmp_path)
    assert (shared.name, shared.basis, shared.nodes, shared.processes) == (here.name, "measured", 2, 2 * here.cores)


@pytest.mark.parametrize(("words", "says"), [
    ("h300", "no figures are known for h300; known kinds are b200, h200, h100"), ("8x", "is not NODESxDEVICESxKIND"),
    ("0xh100", "is not NODESxDEVICESxKIND"), ("8x8x", "is not NODESxDEVICESxKIND"), ("", "is not NODESxDEVICESxKIND"),
    ("2x2x2xh100", "is not NODESxDEVICESxKIND"), ("999xcpu", "processes are more than the")])
def test_what_is_no_machine_is_one_sentence_with_the_kinds(words: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=says):
        machine_of(words, tmp_path)
