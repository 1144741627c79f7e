"""The machine as this process may use it: what affinity and control groups leave of it."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from powertrain import machine
from powertrain.machine import (
    COMPILER_BYTES,
    compilers_at_once,
    cpp_compiler,
    cpu_quota,
    group_folders,
    memory_limit,
    one_at_a_time,
    physical_cores,
    usable_cores,
    usable_cpus,
)


@pytest.fixture
def quota_of_three(monkeypatch, tmp_path):
    """A process that may run on 16 CPUs of 8 cores, and whose control group grants the time of three."""
    for cpu in range(16):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    (tmp_path / "cpu.max").write_text("300000 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(machine, "physical_cores", lambda cpus: physical_cores(cpus, tmp_path))
    monkeypatch.setattr(machine, "group_folders", lambda controller: [tmp_path] if controller == "cpu" else [])
    return tmp_path / "cpu.max"


def test_a_cpu_quota_limits_cores_and_cpus(quota_of_three):
    assert usable_cores() == (3, "CPU quota of the control group")
    assert usable_cpus() == 3


def test_without_a_quota_kernels_have_the_cores_and_processes_the_cpus(quota_of_three):
    quota_of_three.write_text("max 100000\n")
    assert usable_cores() == (8, "psutil, physical cores")
    assert usable_cpus() == 16


def test_as_many_compilers_run_as_there_are_cpus_and_memory(quota_of_three, monkeypatch):
    free_bytes = [100 * COMPILER_BYTES]
    monkeypatch.setattr(machine, "usable_memory", lambda: (200 * COMPILER_BYTES, free_bytes[0], ""))
    assert compilers_at_once() == 3
    free_bytes[0] = 4 * COMPILER_BYTES                       # half of it is left alone
    assert compilers_at_once() == 2
    free_bytes[0] = 1
    assert compilers_at_once() == 1


def test_the_first_compiler_on_the_path_is_taken(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert cpp_compiler() == "/usr/bin/g++"
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name == "clang++" else None)
    assert cpp_compiler() == "/usr/bin/clang++"


def test_two_threads_of_one_core_count_once(tmp_path):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores([0, 1, 2, 3], tmp_path) == 2
    assert physical_cores([0, 2], tmp_path) == 1
    assert physical_cores([7, 8], tmp_path) == 2


def test_the_smallest_cpu_quota_of_both_control_group_versions_counts(tmp_path):
    unlimited, second, first = (tmp_path / name for name in ("unlimited", "second", "first"))
    for folder in (unlimited, second, first):
        folder.mkdir()
    (unlimited / "cpu.max").write_text("max 100000\n")
    assert cpu_quota([unlimited, tmp_path]) is None
    (second / "cpu.max").write_text("300000 100000\n")
    assert cpu_quota([unlimited, second]) == 3.0
    (first / "cpu.cfs_quota_us").write_text("150000\n")
    (first / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota([unlimited, second, first]) == 1.5


def test_a_version_1_group_without_a_quota_limits_nothing(tmp_path):
    (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota([tmp_path]) is None


def test_file_cache_counts_as_free_within_the_memory_limit(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 400\n")
    assert memory_limit([tmp_path]) == (1000, 700)


def test_file_cache_of_the_groups_below_counts_as_free_in_version_1(tmp_path):
    (tmp_path / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory.usage_in_bytes").write_text("700\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\ntotal_inactive_file 400\n")
    assert memory_limit([tmp_path]) == (1000, 700)


def test_a_group_without_a_memory_limit_gives_none(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit([tmp_path]) == (None, None)


def test_limits_are_read_from_the_group_up_to_the_mount(tmp_path):
    (tmp_path / "pod" / "container").mkdir(parents=True)
    assert group_folders("memory", tmp_path, "0::/pod/container\n") == [
        tmp_path / "pod" / "container", tmp_path / "pod", tmp_path]


def test_a_path_that_the_container_cannot_see_leaves_the_mount(tmp_path):
    (tmp_path / "cpu").mkdir()
    assert group_folders("cpu", tmp_path, "3:memory:/far/away\n1:cpu:/far/away\n") == [tmp_path / "cpu"]


def test_an_absent_file_is_no_limit():
    assert cpu_quota([Path("/nowhere")]) is None
    assert memory_limit([Path("/nowhere")]) == (None, None)


def test_what_may_be_done_once_is_done_by_one_at_a_time(tmp_path: Path) -> None:
    folder, inside, most = tmp_path / "code", [], []

    def work() -> None:
        with one_at_a_time(folder):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert most == [1, 1, 1, 1]


def test_a_folder_that_cannot_be_locked_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with one_at_a_time(tmp_path / "file"):
        pass
