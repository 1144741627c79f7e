"""A mode of torch.compile whose point is CUDA graphs, without CUDA."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import removed
from powertrain.audit.resolved import compile_mode
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding


class ReduceOverheadWithoutGpu(Rule):
    name = "reduce_overhead_without_gpu"
    rests_on = "documentation: torch.compile (reduce-overhead is CUDA graphs)"
    gives_way_to = frozenset({"compile_changing_lengths"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        mode, hardware = compile_mode(subject), where.hardware
        if mode is not None and mode.value == "reduce-overhead" and hardware is not None and hardware.device != "cuda":
            yield cls.found("low", "reduce-overhead without CUDA", f"The mode records CUDA graphs; {hardware.name} has none, "
                            "and what is left is the default mode", mode,
                            expected=Expected("none here: study 2026-11-21_claims, 000-16-speed, cannot tell it from no effect",
                                              "study: 2026-11-21_claims"),
                            cure=Cure("Leave the mode out on this machine", removed(subject, "training.torch_compile_mode")))
