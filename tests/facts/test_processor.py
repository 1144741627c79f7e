"""The CPU as this process may use it."""

from pathlib import Path

import psutil

from powertrain.facts.processor import (
    cpu_quota,
    group_folders,
    instructions_in,
    memory_limit,
    name_in,
    physical_cores,
    read_processor,
)

CPUINFO_X86 = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile avx512bw

processor\t: 1
model name\t: something else
flags\t\t: fpu
"""


def test_the_first_cpu_names_the_processor_and_its_instruction_sets():
    assert name_in(CPUINFO_X86) == "Intel(R) Xeon(R) Platinum 8488C"
    assert instructions_in(CPUINFO_X86) == ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def test_arm_features_and_apple_sysctl_keys_are_understood():
    assert instructions_in("Features\t: fp asimd bf16 i8mm sve\n") == ("asimd", "bf16", "sve", "i8mm")
    apple = "machdep.cpu.brand_string: Apple M3 Pro\nhw.optional.AdvSIMD: 1\nhw.optional.arm.FEAT_BF16: 0\n"
    assert name_in(apple) == "Apple M3 Pro"
    assert instructions_in(apple) == ("asimd",)


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


def test_the_processor_of_this_machine_is_within_what_the_machine_has():
    here = read_processor()
    cpuinfo = Path("/proc/cpuinfo")
    assert here.name == (name_in(cpuinfo.read_text()) if cpuinfo.exists() else here.name) != ""
    assert 1 <= here.cores <= psutil.cpu_count()
    assert 0 < here.free_memory_bytes <= here.memory_bytes <= psutil.virtual_memory().total
    assert set(here.sources) == {"name", "instructions", "cores", "memory_bytes", "free_memory_bytes"}


def test_a_memory_limit_of_the_control_group_beats_the_machine(monkeypatch, tmp_path):
    limit = 2**30
    (tmp_path / "memory.limit_in_bytes").write_text(str(limit))
    (tmp_path / "memory.usage_in_bytes").write_text("100")
    folders = {"memory": [tmp_path], "cpu": []}
    monkeypatch.setattr("powertrain.facts.processor.group_folders", lambda controller: folders[controller])
    here = read_processor()
    assert here.memory_bytes == limit
    assert here.free_memory_bytes <= limit - 100
    assert here.sources["memory_bytes"] == "memory limit of the control group"


def test_an_absent_file_is_no_limit():
    assert cpu_quota([Path("/nowhere")]) is None
    assert memory_limit([Path("/nowhere")]) == (None, None)
