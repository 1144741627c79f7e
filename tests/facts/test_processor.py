"""The CPU as this process may use it."""

from pathlib import Path

import psutil

from powertrain.facts.hardware import instructions_in, name_in, read_processor

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
    monkeypatch.setattr("powertrain.machine.group_folders", lambda controller: folders[controller])
    here = read_processor()
    assert here.memory_bytes == limit
    assert here.free_memory_bytes <= limit - 100
    assert here.sources["memory_bytes"] == "memory limit of the control group"
