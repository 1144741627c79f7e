"""A quantised model given to a trainer as it is."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import TRAINERS, is_unread
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

BITS = ("quantisation.load_in_4bit", "quantisation.load_in_8bit")


class QuantisedWithoutAdapters(Rule):
    name = "quantised_without_adapters"
    rests_on = "documentation: transformers' validate_quantization_for_training"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if subject.framework not in TRAINERS or script is None or is_unread(subject, "lora.r"):
            return
        if any(key.startswith("lora.") for key in subject.settings) or any(
                name.split(".")[0] in ("peft", "unsloth") for name in script.imported.values()):
            return
        key = next((key for key in BITS if subject.on(key)), None)
        if key is not None:
            yield cls.found("critical", "quantised weights without adapters", "Rounded weights cannot be trained: Trainer "
                            "raises \"You cannot perform fine-tuning on purely quantized models. Please attach trainable "
                            "adapters\"",
                            subject.settings[key], expected=Expected("the run starts", "none"),
                            cure=Cure("Put adapters on the model (peft's LoraConfig), or load it unquantised", (),
                                      ("method=qlora",)))
