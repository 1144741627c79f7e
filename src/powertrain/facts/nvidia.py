"""NVIDIA's driver beside the installed build of torch: why torch does not use a GPU that is here, and which build would.

A build of torch is made for one release of CUDA. Its code runs on a driver of the same major release of CUDA or a later one
(docs.nvidia.com/deploy/cuda-compatibility), and on a GPU for which it has code: machine code of the GPU's own major capability
and at most its minor one, or PTX of at most its capability, which the driver compiles (CUDA C++ Programming Guide, "Application
Compatibility").
"""

import platform
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from powertrain.machine import hidden_gpus, hiding_amd
from powertrain.records import IdleGpu, WrongUse

T = TypeVar("T")
Version = tuple[int, int]

# of CUDA's major release -> the oldest driver on Linux, from the release notes of CUDA's toolkit
OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"))       # these exist where a driver has found a GPU
AMD_DRIVER = Path("/sys/class/kfd/kfd/topology/nodes")       # of ROCm: a processor has the gpu_id 0
INTEGRATED = {(5, 3), (6, 2), (7, 2), (8, 7)}    # GPUs of Jetsons, which run no machine code for others
PAGE = "the page \"Get started\" of pytorch.org gives the command"
NO_BUILD = "this release of torch has no build for such a GPU"


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver and the first GPU that it has found."""

    version: str                             # "550.54.14"
    cuda: Version                            # the newest release whose programs it runs
    gpu: str
    capability: Version


def read_driver() -> Driver | None:
    """Return the driver and its first GPU; None where there is no such library, no driver or no GPU. No torch is loaded."""
    return told_by_nvml(_driver, None)


def _driver(nvml: Any) -> Driver:
    gpu, cuda = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlSystemGetCudaDriverVersion_v2()         # 12040 is 12.4
    return Driver(nvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10), nvml.nvmlDeviceGetName(gpu),
                  nvml.nvmlDeviceGetCudaComputeCapability(gpu))


def told_by_nvml(ask: Callable[[Any], T], otherwise: T) -> T:
    """Return what `ask` learns of NVIDIA's own library; `otherwise` where it is not here, or does not answer."""
    try:
        import pynvml
    except ImportError:                      # nvidia-ml-py is not for macOS
        return otherwise
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return otherwise
    try:
        return ask(pynvml)
    except pynvml.NVMLError:                 # there is no GPU, or it was lost meanwhile
        return otherwise
    finally:
        pynvml.nvmlShutdown()


def idle_gpu(torch_version: str, torch_cuda: str | None, torch_hip: str | None = None) -> IdleGpu | None:
    """Return the GPU of this machine that torch does not see, with the reason; None where there is none.

    `torch_cuda` and `torch_hip` are the releases of CUDA and ROCm that torch was built for, None for a build without them.
    Ask where torch sees no GPU.
    """
    driver = read_driver()
    if driver is None:
        if not any(path.exists() for path in DRIVER_FILES):
            return _idle_amd_gpu(torch_version, torch_hip)
        return IdleGpu("an NVIDIA GPU", "no_library", "NVIDIA's driver has found a GPU, and its library NVML does not answer",
                       "start the container with access to the GPU (docker run --gpus all), or install the driver again")
    if (hidden := hidden_gpus()) is not None:
        return IdleGpu(driver.gpu, "hidden", f"CUDA_VISIBLE_DEVICES={hidden} hides {driver.gpu} from torch",
                       "unset CUDA_VISIBLE_DEVICES to train on it")
    published = builds_for(driver.capability)
    knows = f"the driver {driver.version} of {driver.gpu} knows CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    if torch_cuda is not None and driver.cuda[0] >= _major(torch_cuda):
        return IdleGpu(driver.gpu, "unknown", f"torch {torch_version} is built for CUDA {torch_cuda}, {knows}, and torch sees "
                       "no GPU", "`python -c \"import torch; torch.cuda.init()\"` shows torch's reason")
    usable = [cuda for cuda in published if _major(cuda) <= driver.cuda[0]]
    cures = [f"install {build_name(torch_version, usable[-1])}"] if usable else []
    if torch_cuda is None:
        cause, because = "no_cuda_build", f"torch {torch_version} is a build without CUDA, and {knows}"
        cures = cures or [f"install {_newer_driver(cuda)}" for cuda in published[:1]]
    else:
        cause, because = "old_driver", f"{knows}, and torch {torch_version} is built for CUDA {torch_cuda}"
        if any(_major(cuda) == _major(torch_cuda) for cuda in published):
            cures.append(f"install {_newer_driver(torch_cuda)}")
    return IdleGpu(driver.gpu, cause, because, " or ".join(cures) or f"{NO_BUILD}; train on the CPU")


def _idle_amd_gpu(torch_version: str, torch_hip: str | None) -> IdleGpu | None:
    if not any(_is_gpu(node) for node in AMD_DRIVER.glob("*/gpu_id")):
        return None
    if torch_hip is not None and (hiding := hiding_amd()) is not None:
        return IdleGpu("an AMD GPU", "hidden", f"{hiding} hides an AMD GPU from torch",
                       f"unset {hiding.partition('=')[0]} to train on it")
    found = f"AMD's driver has found a GPU, and torch {torch_version}"
    if torch_hip is None:
        return IdleGpu("an AMD GPU", "no_rocm_build", f"{found} is a build without ROCm",
                       f"if ROCm supports the GPU, install torch's build for ROCm: {PAGE}")
    return IdleGpu("an AMD GPU", "unknown", f"{found}, built for ROCm {torch_hip}, sees none",
                   "`rocminfo` shows whether ROCm supports it; your user has to be in the groups render and video")


def _is_gpu(node: Path) -> bool:
    with suppress(OSError):
        return node.read_text(encoding="ascii", errors="replace").strip() not in ("", "0")
    return False


def check_code(gpu: str, capability: Version, codes: Iterable[str], torch_version: str, torch_cuda: str) -> None:
    """Raise WrongUse where torch, built for `codes` ("sm_90", "compute_90"), has none that runs on the GPU of that name.

    Where torch lists no code, nothing is known and nothing is refused.
    """
    codes = list(codes)
    if not codes or any(runs_on(code, capability) for code in codes):
        return
    published = builds_for(capability)
    driver = read_driver()
    newest = driver.cuda[0] if driver else _major(torch_cuda)    # that the driver runs, at least
    usable = [cuda for cuda in published if _major(cuda) <= newest]
    cures = [f"install {build_name(torch_version, usable[-1])}"] if usable else [
        f"install {_newer_driver(cuda)}, and {build_name(torch_version, cuda)}" for cuda in published[:1]]
    raise WrongUse(f"{gpu} has compute capability {capability[0]}.{capability[1]}, and torch {torch_version} has code for "
                   f"{', '.join(codes)} only", advice=f"{(cures or [NO_BUILD])[0]}; or set CUDA_VISIBLE_DEVICES to nothing to "
                   "train on the CPU")


def runs_on(code: str, capability: Version) -> bool:
    """Return whether code as torch.cuda.get_arch_list names it runs on a GPU of this capability."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", code)
    if match is None:
        return False
    built, only = (int(match[2]), int(match[3])), match[4]
    if only == "a" or (match[1] == "sm" and INTEGRATED & {built, capability}):
        return built == capability
    if match[1] == "sm" or only == "f":
        return built[0] == capability[0] and built <= capability
    return built <= capability


def builds_for(capability: Version) -> list[str]:
    """Return the releases of CUDA, oldest first, of the published builds of this torch with machine code for such a GPU."""
    import torch

    published: Mapping[str, Mapping[str, set[int]] | set[int]] = getattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", {})
    processor = "aarch64" if platform.machine().lower() == "aarch64" else "x86_64"
    built = {cuda: codes.get(processor, set()) if isinstance(codes, Mapping) else codes for cuda, codes in published.items()}
    found = [cuda for cuda, codes in built.items() if any(runs_on(f"sm_{code}", capability) for code in codes)]
    return sorted(found, key=_numbers)


def build_name(torch_version: str, cuda: str) -> str:
    """Return the words for a build of this torch, with the name that pip has for it: torch==2.13.0+cu126."""
    release = torch_version.partition("+")[0]
    return f"torch {release} for CUDA {cuda} (torch=={release}+cu{cuda.replace('.', '')}; {PAGE})"


def _newer_driver(cuda: str) -> str:
    oldest = OLDEST_DRIVER.get(_major(cuda))
    return "a newer driver" if oldest is None else f"a driver of version {oldest} or newer"


def _numbers(cuda: str) -> list[int]:
    return [int(number) for number in cuda.split(".")]


def _major(cuda: str) -> int:
    return _numbers(cuda)[0]
