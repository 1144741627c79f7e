"""The parts of a machine that a claim needs, and the reason why a part is missing here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from powertrain.cost.estimate import COMPILER_PARTS
from powertrain.records import Hardware, Software

CAPABILITY = re.compile(r"cuda(>=|<)(\d+)\.(\d+)")


def why_not(needs: Sequence[str], hardware: Hardware, software: Software) -> str | None:
    """Return the reason why the first missing one of `needs` is missing; None where all are there.

    cuda, cuda>=8.0, cuda<8.0 (compute capability), two_gpus, compiler (for torch.compile), gpu:NAME (a figure of one
    machine), or a part of facts/software.py.
    """
    return next((reason for need in needs if (reason := _missing(need, hardware, software)) is not None), None)


def _missing(need: str, hardware: Hardware, software: Software) -> str | None:
    if need == "cuda" or CAPABILITY.fullmatch(need):
        return _no_gpu(need, hardware)
    if need == "two_gpus":
        return None if hardware.device == "cuda" and hardware.devices > 1 else \
            f"the claim needs two GPUs, and {_seen(hardware)}"
    if need == "compiler":
        lacking = [f"{part}: {software.missing[part]}" for part in COMPILER_PARTS.get(hardware.device, ())
                   if part in software.missing]
        return f"torch.compile cannot work here ({lacking[0]})" if lacking else None
    if need.startswith("gpu:"):
        name = need.removeprefix("gpu:")
        return None if name in hardware.name else f"the figure was measured on {name}, and this machine is {hardware.name}"
    if need in software.missing:
        return f"the claim needs {need}: {software.missing[need]}"
    if need not in software.versions:
        raise ValueError(f"claims.yaml: needs={need!r} is neither a word of claims/needs.py nor a part of facts/software.py")
    return None


def _no_gpu(need: str, hardware: Hardware) -> str | None:
    if hardware.device != "cuda" or hardware.compute_capability is None:
        return f"the claim needs an NVIDIA GPU, and {_seen(hardware)}"
    found = CAPABILITY.fullmatch(need)
    if found is None:
        return None
    wanted, here = (int(found[2]), int(found[3])), hardware.compute_capability
    holds = here >= wanted if found[1] == ">=" else here < wanted
    words = "at least" if found[1] == ">=" else "below"
    return None if holds else f"the claim is for compute capability {words} {wanted[0]}.{wanted[1]}, and {hardware.name} has " \
                              f"{here[0]}.{here[1]}"


def _seen(hardware: Hardware) -> str:
    return "torch sees no GPU here" if hardware.device != "cuda" else f"there is one {hardware.name}"
