"""torch.compile where each batch has another shape."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import changes_lengths, compile_mode, compile_seen
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

RECOMPILE_LIMIT = 8          # torch._dynamo.config.recompile_limit


class CompileChangingLengths(Rule):
    name = "compile_changing_lengths"
    rests_on = "technique: torch_compile; features: X9; documentation: torch.compile (recompile_limit)"
    gives_way_to = frozenset({"compile_quantised"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        seen = compile_seen(subject)
        if seen is None or not changes_lengths(subject, where):
            return
        mode = compile_mode(subject)
        graphs = "; a mode with CUDA graphs records one more for each shape" if mode is not None and mode.value in (
            "reduce-overhead", "max-autotune") else ""
        yield cls.found("moderate", "compiled for shapes that keep changing", "Batches are as long as their longest example: "
                        f"the graph is compiled again for new lengths, then for any length, and after {RECOMPILE_LIMIT} times "
                        "not at all"
                        + graphs, seen, None if mode is None or mode.evidence == seen else mode.evidence, expected=UNMEASURED,
                        risk=Risk("low", "none", "medium"),
                        cure=Cure("Give all batches one length (examples cut from packed text), or do not compile",
                                  set_to(subject, "training.torch_compile", False), ("techniques.torch_compile=off",)))
