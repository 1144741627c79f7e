"""What is installed beside powertrain, and why the rest is not usable here. Nothing is imported to find out."""

import importlib.metadata
import importlib.util
import platform
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from powertrain.machine import COMPILERS, c_compiler, cpp_compiler
from powertrain.records import Hardware, Software

Capability = tuple[int, int]
AMD: Literal["AMD"] = "AMD"                  # a GPU of AMD, which has no compute capability

# Modules that techniques or the bridge may use; pip calls each by the same name with "-" for "_".
PARTS = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "flash_attn", "liger_kernel", "unsloth",
         "deepspeed", "bitsandbytes", "peft", "torchao", "gguf", "datasets")
# The least compute capability of an NVIDIA GPU that a part needs, from the READMEs: flash-attn 2 Ampere, the others Volta.
CAPABILITIES: Mapping[str, Capability] = {"triton": (7, 0), "flash_attn": (8, 0), "liger_kernel": (7, 0), "unsloth": (7, 0)}

THROUGH_TRITON = ("triton", "liger_kernel", "unsloth")       # parts whose kernels Triton compiles, as they are first used
NEEDED_BY_TRITON = ("c compiler", "python headers")


def read_software(hardware: Hardware | None = None) -> Software:
    """Return the version of each part that is usable here, and for each other part the reason why it is not.

    Where `hardware` is known, torch need not be loaded for its GPU.
    """
    versions = {"powertrain": version_of("powertrain"), "python": platform.python_version()}
    if hardware is None:
        import torch

        gpu = None if not torch.cuda.is_available() else AMD if torch.version.hip else torch.cuda.get_device_capability(0)
    else:
        gpu = AMD if hardware.architecture else hardware.compute_capability
    named = None if hardware is None or hardware.basis == "measured" else hardware.name
    tools = _compiling("torch.compile on a CPU" if gpu is None else "Triton")
    lacking = next((reason for part in NEEDED_BY_TRITON for found, reason in (tools[part],) if found is None), None)
    missing = {part: reason for part in PARTS if (reason := _why_not(part, gpu, lacking, named)) is not None}
    versions |= {part: version_of(part.replace("_", "-")) for part in PARTS if part not in missing}
    for part, (found, reason) in tools.items():
        (versions if found else missing)[part] = found or reason
    return Software(versions, missing)


def _compiling(user: str) -> Mapping[str, tuple[str | None, str]]:
    """Return for each part that compiling needs its place, or None, and the reason and cure if it is not there.

    `user` compiles. Triton builds a module of Python, in C, that loads and starts its kernels (triton/runtime/build.py).
    """
    (c, looked), include = c_compiler(), _python_include()
    headers = str(include) if (include / "Python.h").exists() else None
    return {
        "c++ compiler": (cpp_compiler(), f"torch.compile on a CPU needs one: none of {', '.join(COMPILERS)} is on the PATH "
                                         "(apt install g++)"),
        "c compiler": (c, f"Triton needs a C compiler, and there is no {looked} (apt install build-essential)"),
        "python headers": (headers, f"{user} needs Python.h, which is not in {include} (apt install python3-dev)"),
    }


def _python_include() -> Path:
    """Return the folder that Python.h is looked for in: Debian's own scheme names another one, which Triton leaves aside."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))


def _why_not(part: str, gpu: Capability | Literal["AMD"] | None, lacking: str | None, named: str | None) -> str | None:
    """Return why `part` cannot be used; None if it can. The machine comes first: installing would not help.

    `lacking` is why Triton cannot compile here, or None; `named` is the machine where it is not this one.
    """
    installed, needed = importlib.util.find_spec(part) is not None, CAPABILITIES.get(part)
    if needed is not None and gpu is None:
        seen = "torch sees none here" if named is None else f"{named} is none"
        return f"needs a CUDA GPU; {seen}" + (" (it is installed)" if installed else "")
    if needed is not None and isinstance(gpu, tuple) and gpu < needed:
        return "needs compute capability {}.{} or more; this GPU has {}.{}".format(*needed, *gpu)
    if not installed:
        return f"not installed (pip install {part.replace('_', '-')})"
    return lacking if part in THROUGH_TRITON else None


def version_of(distribution: str) -> str:
    """Return the version in the package's metadata; a package without metadata (a source folder) has an unknown one."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
