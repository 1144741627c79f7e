"""torch.compile on a model with 4-bit weights."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import compile_seen, is_four_bit, is_on
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding


class CompileQuantised(Rule):
    name = "compile_quantised"
    rests_on = "features: F9; documentation: transformers' validate_quantization_for_training"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        seen = compile_seen(subject)
        if seen is None or not (is_four_bit(subject) or is_on(subject, "quantisation.load_in_8bit")):
            return
        bits = "quantisation.load_in_4bit" if is_four_bit(subject) else "quantisation.load_in_8bit"
        yield cls.found("critical", "torch.compile on quantised weights", "Trainer raises \"You cannot fine-tune quantized "
                        "model with torch.compile()\" for a model that was compiled; compiled by the trainer itself, the "
                        "graph breaks at every quantised matrix, and little is left to fuse",
                        seen, subject.settings.get(bits), expected=UNMEASURED,
                        cure=Cure("Leave one of the two: compile the model unquantised if it fits, else do not compile",
                                  set_to(subject, "training.torch_compile", False), ("techniques.torch_compile=off",)))
