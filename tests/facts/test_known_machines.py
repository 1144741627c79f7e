"""Machines that are not here, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from powertrain.cost.precision import bf16_pays, unit_of
from powertrain.facts.clusters import kinds, machine_and_software, machine_of, machines_of
from powertrain.facts.hardware import _normalised, datasheet, datasheets, read_hardware, shared_by
from powertrain.records import NETWORK, NODE, Software, WrongUse, to_plain
from powertrain.records.json_files import write_json


@pytest.mark.parametrize(("words", "nodes", "devices"), [
    ("h100", 1, 1), ("8xh100", 1, 8), ("64x8xh100", 64, 8), ("1x1xH100", 1, 1), ("2x4xa100-40gb", 2, 4), ("8xh100-80gb", 1, 8),
    ("rtx4090", 1, 1), ("t4", 1, 1), ("m4-max", 1, 1),
    ("2xRTX-4090", 1, 2), ("mi300x", 1, 1)])
def test_nodes_and_devices_of_a_node(words: str, nodes: int, devices: int, tmp_path: Path) -> None:
    found = machine_of(words, tmp_path)
    assert (found.nodes, found.devices, found.processes, found.basis) == (nodes, devices, nodes * devices, "published")


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_has_published_rates_and_says_where_from(kind: str, tmp_path: Path) -> None:
    found = machine_of(kind, tmp_path)
    if found.device == "mps":                # Apple publishes no rates of products
        assert (found.peak_flops_per_s, found.sources["peak_flops_per_s"]) == ({}, "not published")
        assert (found.compute_capability, found.architecture) == (None, "")
    else:
        assert found.peak_flops_per_s.keys() & {"bf16", "fp16"}
        assert (found.compute_capability is None) == bool(found.architecture)
    assert 7e9 < found.memory_bytes == found.free_memory_bytes < 300e9
    assert all("not measured: https://" in found.sources[field] for field in ("bandwidth_bytes_per_s", "links"))
    assert "https://" in found.sources["memory_bytes"]
    assert all(link.bandwidth_bytes_per_s > 1e10 for link in found.links.values())
    assert NODE in found.links or NETWORK not in found.links


@pytest.mark.parametrize(("kind", "gib"), [("h100", 79.65), ("a100", 80.0), ("h200", 140.4), ("t4", 15.0), ("mi300x", 191.98),
                                          ("m4-max", 96)])
def test_memory_is_what_the_driver_shows_and_not_the_product_s_number_in_powers_of_ten(kind: str, gib: float, tmp_path: Path
                                                                                      ) -> None:
    """Sources: thundergolfer.com/blog/nvidia-gpu-memory-capacity (nvidia-smi), ROCm/legacy-rocm-build issue 4750; of macOS,
    ggml-org/llama.cpp issue 3213: three quarters of the memory are the GPU's.
    """
    assert machine_of(kind, tmp_path).memory_bytes / 2**30 == pytest.approx(gib, abs=0.01)


def test_the_cpu_is_the_one_that_is_here_with_its_measured_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = read_hardware(tmp_path)
    shared = machine_of(f"2x{here.cores}xcpu", tmp_path)
    assert (shared.name, shared.basis, shared.nodes, shared.processes) == (here.name, "measured", 2, 2 * here.cores)


@pytest.mark.parametrize("name", ["AMD Instinct MI250", "AMD Instinct MI250X/MI250", "AMD Instinct MI250X / MI250"])
def test_an_mi250_has_a_row_by_each_of_its_names(name: str) -> None:
    sheet = datasheet(name)
    assert sheet is not None
    assert sheet.flops_per_s["bf16"] == 181.05e12


def test_a_product_with_a_datasheet_is_a_kind_of_machine(tmp_path: Path) -> None:
    named = {machine_of(kind, tmp_path).name for kind in kinds()}
    assert {name for name in datasheets() if "/" not in name} == {_normalised(name) for name in named}


def test_an_amd_gpu_is_known_by_its_architecture(tmp_path: Path) -> None:
    found = machine_of("8xmi300x", tmp_path)
    assert (found.architecture, found.compute_capability) == ("gfx942", None)
    assert bf16_pays(found)
    assert unit_of(found, "fp8") is None


def test_a_mac_has_one_gpu_and_its_cores_are_no_devices(tmp_path: Path) -> None:
    mac = replace(machine_of("m4-max", tmp_path), basis="measured", cores=12)
    assert shared_by(mac, 1, 1) == mac
    with pytest.raises(WrongUse, match=r"2 processes are more than the 1 GPU of this machine; use --processes 1"):
        shared_by(mac, 2, 2)


def test_the_facts_of_another_machine_are_read_from_its_file(tmp_path: Path) -> None:
    there = replace(machine_of("2xh100", tmp_path), basis="measured")
    software = Software({"torch": "2.12.0+cu130"}, {"triton": "there is no C compiler"})
    write_json(tmp_path / "facts.json", {"hardware": to_plain(there), "software": to_plain(software), "another": 1})
    assert machine_and_software(str(tmp_path / "facts.json"), tmp_path) == (there, software)


def test_all_is_every_kind_and_several_of_each_but_macs(tmp_path: Path) -> None:
    assert machines_of("all", tmp_path) == {kind: machine_of(kind, tmp_path) for kind in kinds()}
    several = machines_of("2x8xALL", tmp_path)
    assert set(kinds()) - set(several) == {"m4-max"}
    assert {found.processes for found in several.values()} == {16}
    assert not any(machines_of(words, tmp_path) for words in ("h100", "facts.json", "8x", "8xcpu"))


@pytest.mark.parametrize("wrong", [{"memory_bytes": "x"}, {"cores": "two"}, {"bandwidth_bytes_per_s": 0}, {"devices": 0},
                                   {"free_memory_bytes": -5}, {"peak_flops_per_s": {"bf16": "fast"}},
                                   {"peak_flops_per_s": {"bf16": 0.0}}, {"memory_bytes": 10**400}, {"devices": 10**9},
                                   {"compute_capability": [9]}, {"compute_capability": "9.0"}, {"device": "tpu"},
                                   {"instructions": "amx"}, {"links": {"node": 3}}, {"unknown": 1}])
def test_a_file_with_figures_that_cannot_be_is_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    there = to_plain(machine_of("h100", tmp_path)) | wrong
    write_json(tmp_path / "facts.json", {"hardware": there, "software": to_plain(Software({}, {}))})
    with pytest.raises(WrongUse, match="holds no facts"):
        machine_and_software(str(tmp_path / "facts.json"), tmp_path)


def test_a_file_with_software_of_another_form_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "facts.json", {"hardware": to_plain(machine_of("h100", tmp_path)),
                                         "software": {"versions": 5, "missing": None}})
    with pytest.raises(WrongUse, match="holds no facts"):
        machine_and_software(str(tmp_path / "facts.json"), tmp_path)


@pytest.mark.parametrize("content", ["[[[", "", "[]", "{}", '{"hardware": {"name": 3}, "software": {}}',
                                     '{"hardware": [], "software": 4}'])
def test_a_file_without_facts_is_refused_with_the_command_that_writes_them(content: str, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(content)
    for path in (tmp_path / "facts.json", tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(WrongUse, match="powertrain facts --output" if path != tmp_path else "NODESxDEVICESxKIND"):
            machine_and_software(str(path), tmp_path)


@pytest.mark.parametrize(("words", "says"), [
    ("h300", "no figures are known for h300; known kinds are b200, h200, h100"), ("8x", "is not NODESxDEVICESxKIND"),
    ("0xh100", "is not NODESxDEVICESxKIND"), ("8x8x", "is not NODESxDEVICESxKIND"), ("", "is not NODESxDEVICESxKIND"),
    ("8xm4-max", "a Mac has one GPU"), ("16xh100", "a DGX H100 has 8 such GPUs; use 2x8xh100"),
    ("3x9xb200", "a DGX B200 has 8 such GPUs; use 6x8xb200"), ("all", "is for `powertrain plan`"),
    ("2x2x2xh100", "is not NODESxDEVICESxKIND"), ("999xcpu", "processes are more than the")])
def test_what_is_no_machine_is_one_sentence_with_the_kinds(words: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=says):
        machine_of(words, tmp_path)
