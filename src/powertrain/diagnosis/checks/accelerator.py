"""A GPU that is there and not used, or one of several: the dearest of all mistakes, and a silent one."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding


class Accelerator(Check):
    name = "accelerator"
    rests_on = "fact: torch.cuda.is_available, and the driver's own files"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        hardware, machine = where.prepared.facts.hardware, where.machine
        if hardware.device == "cpu" and machine.has_nvidia_driver:
            built = "sees none: its driver, or CUDA_VISIBLE_DEVICES, hides it" if machine.torch_has_cuda else \
                "is a build without CUDA"
            yield cls.says("critical", "a GPU is there, and the CPU would train",
                           f"the NVIDIA driver has found a GPU, and torch {built}", seen=f"device {hardware.device}",
                           cure="install a torch that matches the driver, or show it the device, then `powertrain facts`")
        elif hardware.devices > 1:
            yield cls.says("low", f"one of {hardware.devices} GPUs trains", "a run is one process on one device, its model is "
                           "never split over several",
                           seen=f"{hardware.devices} x {hardware.name}",
                           cure="use the others for other runs (CUDA_VISIBLE_DEVICES=1, 2, ...)")
        elif hardware.device == "cpu":
            yield cls.says("good", "no GPU is there, and none is missed", f"{hardware.name} trains on {hardware.cores} cores",
                           seen=hardware.sources.get("device", "device cpu"))
        else:
            yield cls.says("good", f"{hardware.name} trains", "torch sees it", seen=f"device {hardware.device}")
