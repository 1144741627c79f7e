"""NVIDIA's driver beside the build of torch, with stand-ins for NVML and torch.cuda: no GPU exists here."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from driver import TINY
from powertrain.facts import hardware, nvidia
from powertrain.facts.nvidia import builds_for, idle_gpu, read_driver, runs_on
from powertrain.records import WrongUse

CODES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]      # of torch for CUDA 13.0
# what a process sees of NVML; in a file of its own it stands in for the module of another process
NVML = """
class NVMLError(Exception):
    pass

def nvmlInit():
    if not {cuda}:
        raise NVMLError("Driver Not Loaded")

def nvmlShutdown():
    pass

def nvmlDeviceGetHandleByIndex(index):
    return index

def nvmlSystemGetCudaDriverVersion_v2():
    return {cuda}

def nvmlSystemGetDriverVersion():
    return "{version}"

def nvmlDeviceGetName(handle):
    return "{gpu}"

def nvmlDeviceGetCudaComputeCapability(handle):
    return {capability}
"""


def nvml(cuda: int = 12040, version: str = "550.54.14", gpu: str = "NVIDIA L4", capability: tuple[int, int] = (8, 9)) -> str:
    return NVML.format(cuda=cuda, version=version, gpu=gpu, capability=capability)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a driver, and a torch that knows its builds."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", {
        "12.6": {"x86_64": {50, 60, 70, 75, 80, 86, 90}, "aarch64": {80, 90}},
        "12.9": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 120}},
        "13.0": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 110, 120}}})
    monkeypatch.setattr(nvidia.platform, "machine", lambda: "x86_64")

    def install(**given: Any) -> None:
        module = types.ModuleType("pynvml")
        exec(nvml(**given), vars(module))
        monkeypatch.setitem(sys.modules, "pynvml", module)

    return install


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no driver has found a GPU."""
    monkeypatch.setattr(nvidia, "DRIVER_FILES", ())
    monkeypatch.setattr(nvidia, "AMD_DRIVER", Path("/dev/nothing"))
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("hip", "hidden", "cause", "says"), [
    (None, None, "no_rocm_build", "torch 2.13.0+cu130 is a build without ROCm"), ("7.0", None, "unknown", "built for ROCm 7.0"),
    ("7.0", "", "hidden", "HIP_VISIBLE_DEVICES= hides an AMD GPU"), (None, "", "no_rocm_build", "a build without ROCm")])
def test_an_amd_gpu_that_torch_does_not_see_is_named(hip: str | None, hidden: str | None, cause: str, says: str, driver: Any,
                                                     nobody: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(cuda=0)
    monkeypatch.setattr(nvidia, "AMD_DRIVER", tmp_path)
    if hidden is not None:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(hardware, "_ask_torch", lambda: hardware.Seen("cpu", "2.13.0+cu130", "13.0", 2, hip))
    for node, number in (("0", "0"), ("1", "31415")):    # a processor, and a GPU
        (tmp_path / node).mkdir()
        (tmp_path / node / "gpu_id").write_text(f"{number if node == '0' else 0}\n")
    assert idle_gpu("2.13.0+cu130", "13.0", hip) is None
    (tmp_path / "1" / "gpu_id").write_text("31415\n")
    found = hardware.read_hardware(tmp_path / "cache", measure=False).idle_gpu
    assert found is not None
    assert (found.cause, found.name) == (cause, "an AMD GPU")
    assert says in found.because


def test_without_a_gpu_there_is_nothing_to_say(driver: Any, nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(cuda=0)
    assert idle_gpu("2.13.0+cpu", None) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)         # as on macOS, where it cannot be imported
    assert idle_gpu("2.13.0+cpu", None) is None


def test_a_driver_too_old_for_the_build_is_named_with_the_build_that_it_runs(driver: Any) -> None:
    driver(cuda=12040)
    found = idle_gpu("2.13.0+cu130", "13.0")
    assert found is not None
    assert (found.cause, found.name) == ("old_driver", "NVIDIA L4")
    assert found.because == ("the driver 550.54.14 of NVIDIA L4 knows CUDA up to 12.4, and torch 2.13.0+cu130 is built for "
                             "CUDA 13.0")
    assert "torch==2.13.0+cu129" in found.cure               # the newest that the driver runs: of the same major release
    assert "a driver of version 580 or newer" in found.cure


def test_a_driver_too_old_for_every_build_has_to_be_replaced(driver: Any) -> None:
    driver(cuda=11040)
    found = idle_gpu("2.13.0+cu130", "13.0")
    assert found is not None
    assert found.cure == "install a driver of version 580 or newer"


def test_a_build_without_cuda_is_named_with_the_build_to_install(driver: Any) -> None:
    driver(cuda=13000)
    found = idle_gpu("2.13.0+cpu", None)
    assert found is not None
    assert found.cause == "no_cuda_build"
    assert "torch==2.13.0+cu130" in found.cure


def test_a_gpu_that_newer_builds_left_out_gets_an_older_one(driver: Any) -> None:
    driver(cuda=13000, gpu="NVIDIA GeForce GTX 1080", capability=(6, 1))
    found = idle_gpu("2.13.0+cpu", None)
    assert found is not None
    assert "torch==2.13.0+cu126" in found.cure


def test_a_gpu_that_no_build_supports_trains_nothing(driver: Any) -> None:
    driver(gpu="Tesla K80", capability=(3, 7))
    found = idle_gpu("2.13.0+cpu", None)
    assert found is not None
    assert found.cure == "this release of torch has no build for such a GPU; train on the CPU"


def test_a_hidden_gpu_is_hidden(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = idle_gpu("2.13.0+cu126", "12.6")
    assert found is not None
    assert (found.cause, found.because) == ("hidden", "CUDA_VISIBLE_DEVICES=-1 hides NVIDIA L4 from torch")


def test_a_driver_that_should_work_leads_to_torchs_own_reason(driver: Any) -> None:
    driver(cuda=12040)
    found = idle_gpu("2.13.0+cu129", "12.9")                 # newer than the driver, within the same major release
    assert found is not None
    assert found.cause == "unknown"
    assert "torch.cuda.init()" in found.cure


def test_a_container_without_the_drivers_library_is_told_so(
        driver: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(cuda=0)
    monkeypatch.setattr(nvidia, "DRIVER_FILES", (tmp_path,))
    found = idle_gpu("2.13.0+cu130", "13.0")
    assert found is not None
    assert (found.cause, "--gpus all" in found.cure) == ("no_library", True)


def test_the_driver_is_read_from_nvml(driver: Any) -> None:
    driver(cuda=12080, version="570.1")
    found = read_driver()
    assert found is not None
    assert (found.version, found.cuda, found.capability) == ("570.1", (12, 8), (8, 9))


@pytest.mark.parametrize("command", ["train", "plan", "facts"])
def test_commands_say_why_they_will_use_the_cpu(command: str, tmp_path: Path, cache: Path, source: Path) -> None:
    (tmp_path / "nvml").mkdir()
    (tmp_path / "nvml" / "pynvml.py").write_text(nvml(), encoding="utf-8")
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA; the test needs a build without")
    variables = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    words = [word for word in TINY if not word.startswith("max_steps")]
    done = subprocess.run(
        [sys.executable, "-m", "powertrain", command, f"data={source}", *words, "max_steps=2"], cwd=tmp_path, check=False,
        capture_output=True, text=True, env=variables | {
            "POWERTRAIN_CACHE": str(cache),
            "PYTHONPATH": os.pathsep.join((str(tmp_path / "nvml"), variables.get("PYTHONPATH", "")))})
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert f"the run will use the CPU: torch {torch.__version__} is a build without CUDA, and the driver 550.54.14" in said
    assert "install torch" in said
    if command == "facts":
        assert "GPU that is not used" in done.stdout


# ------------------------------------------------------------------------------------------------ code for a GPU


@pytest.mark.parametrize(("code", "capability", "runs"), [
    ("sm_80", (8, 0), True), ("sm_80", (8, 9), True), ("sm_86", (8, 0), False), ("sm_80", (9, 0), False),
    ("sm_75", (8, 0), False), ("compute_75", (8, 0), True), ("compute_120", (12, 1), True), ("compute_80", (7, 5), False),
    ("sm_90a", (9, 0), True), ("sm_100a", (10, 3), False), ("sm_100f", (10, 3), True), ("compute_90a", (10, 0), False),
    ("sm_80", (8, 7), False), ("sm_87", (8, 7), True), ("sm_87", (8, 9), False), ("compute_80", (8, 7), True),
    ("sm_120", (12, 1), True), ("gfx942", (9, 4), False),
])
def test_code_runs_where_nvidias_rules_say(code: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(code, capability) == runs


def seen(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], codes: list[str], cuda: str) -> None:
    """Plants a GPU that torch sees, and the code that torch was built with."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Planted")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: codes)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize(("capability", "codes", "cuda", "driver_cuda", "build"), [
    ((6, 1), CODES, "13.0", 13000, "install torch 2.13.0 for CUDA 12.6 (torch==2.13.0+cu126"),
    ((12, 0), ["sm_50", "sm_80", "sm_90"], "12.6", 12080, "install torch 2.13.0 for CUDA 12.9 (torch==2.13.0+cu129"),
    ((12, 0), ["sm_50", "sm_80", "sm_90"], "12.6", 13000, "install torch 2.13.0 for CUDA 13.0 (torch==2.13.0+cu130"),
    ((12, 0), ["sm_60"], "11.8", 11080, "install a driver of version 525 or newer, and torch 2.13.0 for CUDA 12.9"),
    ((3, 7), CODES, "13.0", 13000, "this release of torch has no build for such a GPU"),
])
def test_a_gpu_for_which_torch_has_no_code_is_refused_with_the_build_that_has(
        capability: tuple[int, int], codes: list[str], cuda: str, driver_cuda: int, build: str, driver: Any,
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(cuda=driver_cuda)
    seen(monkeypatch, capability, codes, cuda)
    monkeypatch.setattr(torch, "__version__", f"2.13.0+cu{cuda.replace('.', '')}")
    with pytest.raises(WrongUse) as refused:
        hardware.read_hardware(tmp_path, measure=False)
    assert refused.value.reason.startswith("NVIDIA Planted has compute capability {}.{}".format(*capability))
    assert build in str(refused.value)
    assert "CUDA_VISIBLE_DEVICES" in str(refused.value)


def test_a_gpu_newer_than_every_machine_code_runs_by_ptx(driver: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(cuda=13000)
    seen(monkeypatch, (13, 0), CODES, "13.0")
    assert hardware.read_hardware(tmp_path, measure=False).compute_capability == (13, 0)


def test_torch_knows_its_own_builds() -> None:
    assert builds_for((9, 0))                # of the installed torch: where the table has moved, cures name no build
    assert not builds_for((3, 0))


def test_a_new_driver_is_seen_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a driver has found a GPU, an earlier answer of torch is not kept: it would hide the GPU for ever."""
    monkeypatch.delitem(sys.modules, "torch")
    asked = []
    monkeypatch.setattr(hardware, "_ask_torch", lambda: asked.append(1) or hardware.Seen("cpu", "2.13.0", None, 1))
    monkeypatch.setattr(hardware, "gpu_devices", lambda: ["/dev/nvidia0"])
    hardware._seen_by_torch(tmp_path)
    hardware._seen_by_torch(tmp_path)
    assert len(asked) == 2
    monkeypatch.setattr(hardware, "gpu_devices", list)
    hardware._seen_by_torch(tmp_path)
    hardware._seen_by_torch(tmp_path)
    assert len(asked) == 3
