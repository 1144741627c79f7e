"""The machine, with the GPU paths run against stand-ins: no GPU exists here."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from powertrain.facts import hardware as room
from powertrain.facts.hardware import fingerprint, read_hardware
from powertrain.facts.machine_watch import MachineWatch, Meanwhile
from powertrain.facts.measure import Peaks, cache_file
from powertrain.facts.software import read_software

GIB = 2**30


@pytest.fixture
def measured(monkeypatch):
    """Stands in for the measurement; lists the (device, dtypes) it was asked for."""
    calls = []

    def fake(device, dtypes):
        calls.append((device, dtypes))
        return Peaks(dict.fromkeys(dtypes, 1e12), 5e10, 2e10 if device == "cuda" else None)

    monkeypatch.setattr(room, "measure_peaks", fake)
    watched(monkeypatch, Meanwhile(wall_s=2.0, own_s=4.0, busy_s=4.0))
    return calls


def watched(monkeypatch, seen):
    """Plant what the watch on the machine sees while the peaks are measured."""
    monkeypatch.setattr(room, "MachineWatch", type("Planted", (MachineWatch,), {
        "__exit__": lambda self, *_: setattr(self, "seen", seen)}))


@pytest.fixture
def gpu(monkeypatch):
    """An L4, as torch would report it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (20 * GIB, 22 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_a_second_look_finds_the_peaks_in_the_cache(tmp_path, measured):
    first, second = read_hardware(tmp_path), read_hardware(tmp_path, measure=False)
    assert len(measured) == 1
    assert second.peak_flops_per_s == first.peak_flops_per_s
    assert second.bandwidth_bytes_per_s == first.bandwidth_bytes_per_s == 5e10
    assert "now" in first.sources["peak_flops_per_s"]
    assert "earlier" in second.sources["peak_flops_per_s"]


def test_without_measuring_the_peaks_are_absent(tmp_path, measured):
    here = read_hardware(tmp_path, measure=False)
    assert (dict(here.peak_flops_per_s), here.bandwidth_bytes_per_s, measured) == ({}, None, [])
    assert "peak_flops_per_s" not in here.sources
    assert not list(tmp_path.iterdir())


def test_a_broken_cache_is_measured_anew(tmp_path, measured):
    file = cache_file(tmp_path, read_hardware(tmp_path, measure=False).fingerprint)
    file.parent.mkdir()
    file.write_text("{ half a fi")
    assert read_hardware(tmp_path).peak_flops_per_s
    assert len(measured) == 1
    assert "half" not in file.read_text()


def test_a_cache_that_cannot_be_written_is_said_and_is_no_error(tmp_path, measured):
    (tmp_path / "hardware").write_text("a file where the folder should be")
    here = read_hardware(tmp_path)
    assert here.peak_flops_per_s
    assert "cannot be written" in here.sources["peak_flops_per_s"]


@pytest.mark.parametrize(("seen", "says"), [
    (Meanwhile(wall_s=2.0, own_s=2.0, busy_s=5.0), "measured now while other processes kept 1.5 cores busy; not cached"),
    (Meanwhile(wall_s=2.0, own_s=2.0, busy_s=2.0, host_s=1.0),
     "measured now while the hypervisor gave 0.5 cores to other machines; not cached")])
def test_peaks_from_a_busy_machine_are_used_once_and_measured_again_next_time(tmp_path, measured, monkeypatch, seen, says):
    watched(monkeypatch, seen)
    busy = read_hardware(tmp_path)
    assert busy.peak_flops_per_s
    assert busy.sources["peak_flops_per_s"] == says
    assert not cache_file(tmp_path, busy.fingerprint).exists()
    watched(monkeypatch, Meanwhile(wall_s=2.0, own_s=4.0, busy_s=4.1))
    assert "kept in" in read_hardware(tmp_path).sources["peak_flops_per_s"]
    assert len(measured) == 2


def test_busy_cores_do_not_change_the_peaks_of_a_gpu(tmp_path, measured, gpu, monkeypatch):
    watched(monkeypatch, Meanwhile(wall_s=2.0, own_s=2.0, busy_s=5.0))
    assert "kept in" in read_hardware(tmp_path).sources["peak_flops_per_s"]


def test_every_known_field_has_a_source(tmp_path, measured):
    here = read_hardware(tmp_path)
    without = {"sources", "fingerprint", "devices", "compute_capability", "architecture", "datasheet_flops_per_s",   # of a CPU
               "host_link_bytes_per_s", "host_free_memory_bytes",
               "processes", "nodes", "links", "basis",         # of a run, not of a machine
               "speeds"}                     # which runs leave in the cache, each with its own source
    assert set(here.sources) == {field.name for field in dataclasses.fields(here)} - without


def test_a_gpu_brings_its_capability_memory_and_datasheet(tmp_path, measured, gpu):
    here = read_hardware(tmp_path)
    assert (here.device, here.name, here.compute_capability, here.devices) == ("cuda", "NVIDIA L4", (8, 9), 2)
    assert (here.memory_bytes, here.free_memory_bytes) == (22 * GIB, 20 * GIB)
    assert here.datasheet_flops_per_s["bf16"] == 121e12
    assert here.sources["datasheet_flops_per_s"].startswith("https://")
    assert measured == [("cuda", ("fp32", "tf32", "bf16", "fp16"))]


def test_an_amd_gpu_has_an_architecture_and_no_compute_capability(tmp_path, measured, gpu, monkeypatch):
    without = fingerprint(read_hardware(tmp_path, measure=False))
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda index: SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"))
    here = read_hardware(tmp_path)
    assert (here.compute_capability, here.architecture, here.sources["architecture"]) == (
        None, "gfx942", "torch.cuda.get_device_properties")
    assert "compute_capability" not in here.sources
    assert here.datasheet_flops_per_s["bf16"] == 1307.4e12
    assert measured == [("cuda", ("fp32", "bf16", "fp16"))]
    software = read_software(here)
    assert "CUDA GPU" not in "".join(software.missing.get(part, "") for part in ("triton", "flash_attn"))
    assert here.fingerprint not in (without, fingerprint(here, dataclasses.replace(room._ask_torch(), hip="7.2")))


def test_a_gpus_link_to_its_host_is_measured_also_where_peaks_were_kept_without_it(tmp_path, measured, gpu):
    here = read_hardware(tmp_path)
    assert here.host_link_bytes_per_s == 2e10
    assert here.host_free_memory_bytes > 0
    assert {"host_link_bytes_per_s", "host_free_memory_bytes"} <= set(here.sources)
    assert read_hardware(tmp_path).host_link_bytes_per_s == 2e10
    file = cache_file(tmp_path, here.fingerprint)
    file.write_text(file.read_text().replace("20000000000.0", "null"))
    assert read_hardware(tmp_path).host_link_bytes_per_s == 2e10
    assert len(measured) == 2


def test_a_gpu_without_a_datasheet_row_has_no_datasheet_figures(tmp_path, measured, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Imaginary 1")
    here = read_hardware(tmp_path)
    assert dict(here.datasheet_flops_per_s) == {}
    assert "datasheet_flops_per_s" not in here.sources


def test_an_apple_gpu_has_what_metal_leaves_it(tmp_path, measured, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: GIB // 4)
    here = read_hardware(tmp_path)
    assert (here.device, here.memory_bytes) == ("mps", GIB)
    assert here.free_memory_bytes <= GIB - GIB // 4
    assert measured == [("mps", ("fp32", "bf16", "fp16"))]


@pytest.mark.parametrize("change", [
    {"name": "other"}, {"device": "cuda"}, {"cores": 99}, {"memory_bytes": 2**50}, {"instructions": ("avx2",)},
])
def test_the_fingerprint_changes_with_the_machine(tmp_path, change):
    here = read_hardware(tmp_path, measure=False)
    assert fingerprint(dataclasses.replace(here, **change)) != here.fingerprint


def test_the_fingerprint_changes_with_the_threads(tmp_path, monkeypatch):
    before = read_hardware(tmp_path, measure=False).fingerprint
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert read_hardware(tmp_path, measure=False).fingerprint != before


def test_the_fingerprint_stays_while_memory_is_used_up(tmp_path):
    here = read_hardware(tmp_path, measure=False)
    assert fingerprint(dataclasses.replace(here, free_memory_bytes=1)) == here.fingerprint
