"""The allocator's cache emptied while training."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import removed
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding, Risk, Severity

KEY = "training.torch_empty_cache_steps"


class CacheEmptied(Rule):
    name = "cache_emptied"
    rests_on = "technique: allocator; features: X3 (it gives torch no memory that it did not have)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        asked = subject.settings.get(KEY)
        if asked is None or not asked.value:
            return
        on_gpu = where.hardware is None or where.hardware.device == "cuda"
        severity: Severity = "moderate" if on_gpu else "low"
        yield cls.found(severity, "the allocator's cache is emptied", "What the next step needs is given back to the driver "
                        "and asked for again; torch reuses its cache anyway. It helps against fragmentation only, for which "
                        "there are expandable segments" if on_gpu else "There is no GPU whose cache could be emptied", asked,
                        expected=UNMEASURED if on_gpu else Expected("none", "none"), risk=Risk("low", "none", "low"),
                        cure=Cure("Leave it out; against fragmentation set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                                  removed(subject, KEY), ("techniques.allocator=on",) if on_gpu else ()))
