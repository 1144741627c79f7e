"""What is installed beside powertrain, and why the rest is not usable here. Nothing is imported to find out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from powertrain.machine import COMPILERS, cpp_compiler
from powertrain.records import Hardware, Software

Capability = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """A package that techniques or the bridge may use."""

    module: str
    distribution: str                        # the name that pip knows
    capability: Capability | None = None     # the least compute capability of an NVIDIA GPU it needs; None: needs none


# Least capabilities, from their READMEs: flash-attn 2 Ampere; triton, and so liger-kernel, and unsloth Volta.
PARTS = (
    Part("torch", "torch"), Part("transformers", "transformers"), Part("tokenizers", "tokenizers"),
    Part("safetensors", "safetensors"), Part("numpy", "numpy"),
    Part("triton", "triton", (7, 0)), Part("flash_attn", "flash-attn", (8, 0)),
    Part("liger_kernel", "liger-kernel", (7, 0)), Part("unsloth", "unsloth", (7, 0)),
    Part("deepspeed", "deepspeed"), Part("bitsandbytes", "bitsandbytes"), Part("peft", "peft"),
    Part("torchao", "torchao"), Part("gguf", "gguf"), Part("datasets", "datasets"),
)


def read_software(hardware: Hardware | None = None) -> Software:
    """Return the version of each part that is usable here, and for each other part the reason why it is not.

    Where `hardware` is known, torch need not be loaded for its GPU.
    """
    versions, missing = {"powertrain": version_of("powertrain"), "python": platform.python_version()}, {}
    if hardware is None:
        import torch

        capability = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    else:
        capability = hardware.compute_capability
    for part in PARTS:
        reason = _why_not(part, capability)
        if reason is None:
            versions[part.module] = version_of(part.distribution)
        else:
            missing[part.module] = reason
    for name, found, reason in _compile_tools():
        if found is None:
            missing[name] = reason
        else:
            versions[name] = found
    return Software(versions, missing)


def _why_not(part: Part, gpu: Capability | None) -> str | None:
    """Return why `part` cannot be used here; None if it can. The machine comes first: installing would not help."""
    installed = importlib.util.find_spec(part.module) is not None
    if part.capability is not None and gpu is None:
        return "needs a CUDA GPU; torch sees none here" + ("" if not installed else " (it is installed)")
    if part.capability is not None and gpu is not None and gpu < part.capability:
        needs, has = ("{}.{}".format(*capability) for capability in (part.capability, gpu))
        return f"needs compute capability {needs} or more; this GPU has {has}"
    return None if installed else f"not installed (pip install {part.distribution})"


def version_of(distribution: str) -> str:
    """Return the version in the package's metadata; a package without metadata (a source folder) has an unknown one."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _compile_tools() -> list[tuple[str, str | None, str]]:
    """Return the parts that torch.compile needs on a CPU: name, where it was found or None, and the reason if not."""
    compiler = cpp_compiler()
    include = Path(sysconfig.get_path("include"))
    return [
        ("c++ compiler", compiler,
         f"torch.compile on a CPU needs one: none of {', '.join(COMPILERS)} is on the PATH (apt install g++)"),
        ("python headers", str(include) if (include / "Python.h").exists() else None,
         f"torch.compile on a CPU needs Python.h, which is not in {include} (apt install python3-dev)"),
    ]
