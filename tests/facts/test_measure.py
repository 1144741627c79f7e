"""Measured peaks and their cache."""

import json

import pytest
import torch

from powertrain.facts import measure
from powertrain.facts.measure import (
    Peaks,
    cache_file,
    copy_bytes_per_s,
    gemm_flops_per_s,
    host_link_bytes_per_s,
    keep_peaks,
    kept_peaks,
    measurable_dtypes,
    measure_peaks,
)

PEAKS = Peaks({"fp32": 1e11, "bf16": 2e11}, 3e10, 2e10)
DTYPES = ("fp32", "bf16")


@pytest.fixture
def clock(monkeypatch):
    """A clock that a GEMM or a copy of this many bytes moves, in place of the real one."""

    class Clock:
        def __init__(self):
            self.now, self.edges = 0.0, []

        def mm(self, rows, weight, out):
            self.edges.append(len(rows))
            self.now += 2 * len(rows) ** 3 / 1e9            # a machine of 1 GFLOP/s

    fake = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: fake.now)
    monkeypatch.setattr(torch, "mm", fake.mm)
    return fake


def test_a_slow_machine_never_meets_the_large_sizes(clock):
    assert gemm_flops_per_s("cpu", "fp32", budget_s=0.05) == pytest.approx(1e9)
    assert max(clock.edges) == 128
    assert clock.now < 0.1


def test_a_larger_budget_reaches_larger_sizes(clock):
    gemm_flops_per_s("cpu", "bf16", budget_s=2.0)
    assert max(clock.edges) == 512
    assert clock.now < 2.5


def test_peaks_of_this_machine_are_positive_for_each_dtype_asked_for():
    peaks = measure_peaks("cpu", DTYPES, gemm_budget_s=0.02, copy_bytes=2**20)
    assert set(peaks.flops_per_s) == {"fp32", "bf16"}
    assert min(peaks.flops_per_s.values()) > 1e7
    assert peaks.bandwidth_bytes_per_s > 1e7


def test_a_copy_counts_bytes_read_and_bytes_written(monkeypatch):
    monkeypatch.setattr(measure, "_best_s", lambda work, device, until: 2.0)
    assert copy_bytes_per_s("cpu", 4000) == 2 * 4000 / 2.0


def test_the_slower_way_between_device_and_host_counts(monkeypatch):
    seconds = iter((2.0, 5.0))
    monkeypatch.setattr(measure, "_best_s", lambda work, device, until: work() is None or next(seconds))
    assert host_link_bytes_per_s("cpu", 4000) == 4000 / 5.0


def test_measuring_leaves_the_precision_of_the_process_as_it_was(monkeypatch):
    seen = []
    monkeypatch.setattr(measure, "_best_s", lambda *_: seen.append(torch.get_float32_matmul_precision()) or 1.0)
    before = torch.get_float32_matmul_precision()
    gemm_flops_per_s("cpu", "fp32")
    gemm_flops_per_s("cpu", "tf32")
    assert set(seen[:1]) == {"highest"}
    assert seen[-1] == "high"
    assert torch.get_float32_matmul_precision() == before


def test_dtypes_that_a_gpu_only_emulates_are_not_measured():
    assert measurable_dtypes("cuda", (7, 5)) == ("fp32", "fp16")
    assert measurable_dtypes("cuda", (9, 0)) == ("fp32", "tf32", "bf16", "fp16")
    assert measurable_dtypes("cuda", None, "gfx942") == ("fp32", "bf16", "fp16")
    assert measurable_dtypes("cpu", None) == ("fp32", "bf16")


def test_what_is_kept_is_found_again_and_nothing_else_lies_beside_it(tmp_path):
    file = cache_file(tmp_path, "abc")
    keep_peaks(file, PEAKS)
    assert kept_peaks(file, DTYPES) == PEAKS
    assert list(tmp_path.rglob("*.*")) == [file]


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    file = cache_file(tmp_path, "abc")
    keep_peaks(file, PEAKS)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        keep_peaks(file, Peaks({"fp32": 1.0}, 1.0))
    assert list(tmp_path.rglob("*.*")) == [file]
    assert kept_peaks(file, DTYPES) == PEAKS


@pytest.mark.parametrize("content", [
    "", "{", "[]", "null", "{}",
    json.dumps({"peak_flops_per_s": {"fp32": 1e11}, "bandwidth_bytes_per_s": 1e9}),              # bf16 is missing
    json.dumps({"peak_flops_per_s": {"fp32": 1e11, "bf16": 0}, "bandwidth_bytes_per_s": 1e9}),
    json.dumps({"peak_flops_per_s": {"fp32": 1e11, "bf16": "x"}, "bandwidth_bytes_per_s": 1e9}),
    '{"peak_flops_per_s": {"fp32": 1e11, "bf16": NaN}, "bandwidth_bytes_per_s": 1e9}',
    json.dumps({"peak_flops_per_s": {"fp32": 1e11, "bf16": 1e11}, "bandwidth_bytes_per_s": 1e9, "host_link_bytes_per_s": 0}),
    json.dumps({"peak_flops_per_s": [1], "bandwidth_bytes_per_s": 1e9}),
])
def test_a_broken_cache_file_is_as_good_as_none(tmp_path, content):
    file = tmp_path / "peaks.json"
    file.write_text(content)
    assert kept_peaks(file, DTYPES) is None


def test_a_cache_file_that_is_no_text_is_as_good_as_none(tmp_path):
    file = tmp_path / "peaks.json"
    file.write_bytes(b"\xff\xfe\x00")
    assert kept_peaks(file, DTYPES) is None
