"""Examples packed so that each reads those before it."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import is_on, is_unread
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Evidence, Finding, Risk

SEPARATING = ("flash_attention_2", "flash_attention_3", "sdpa", "flex_attention", "xformers")      # axolotl's kernels
UNSURE = {"training.packing_strategy", "training.neat_packing", "model.attn_implementation"}


class PackingLeaks(Rule):
    name = "packing_leaks"
    rests_on = "technique: packing; features: F11 (naive concatenation leaks across examples)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if not is_on(subject, "training.packing") or any(is_unread(subject, key) for key in UNSURE):
            return
        leak: Evidence | None = None
        if subject.value("training.packing_strategy") == "wrapped":
            leak, cure = subject.settings["training.packing_strategy"].evidence, Cure(
                'Use packing_strategy="bfd"', set_to(subject, "training.packing_strategy", "bfd"), ("techniques.packing=on",))
        elif subject.framework == "llama-factory" and not is_on(subject, "training.neat_packing"):
            leak = Evidence("neat_packing is not on, which keeps the examples of a pack apart")
            cure = Cure("Set neat_packing: true", set_to(subject, "training.neat_packing", True), ("techniques.packing=on",))
        elif subject.framework == "axolotl" and subject.value("model.attn_implementation") not in SEPARATING:
            leak = Evidence("no attention that keeps packed examples apart is asked for")
            cure = Cure("Set flash_attention: true or sdp_attention: true", (), ("techniques.packing=on",))
        if leak is not None:
            yield cls.found("moderate", "packed examples see each other", "A token attends to the examples that happen to "
                            "lie before its own in the pack: the model is trained on contexts that do not exist, and "
                            "examples are cut where a pack ends", subject.settings["training.packing"], leak, expected=NO_SPEED,
                            risk=Risk("low", "none", "low"), cure=cure)
