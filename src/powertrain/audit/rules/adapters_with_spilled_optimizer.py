"""A compressed or paged optimizer for the few weights of adapters."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import method
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

KEY = "training.optim"
MOMENTS_BYTES = 8            # of AdamW, for each trained weight


class AdaptersWithSpilledOptimizer(Rule):
    name = "adapters_with_spilled_optimizer"
    rests_on = "technique: paged_adamw, eight_bit_adamw"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        found = str(subject.value(KEY) or "")
        if method(subject) not in ("lora", "qlora") or not ("paged" in found or "8bit" in found):
            return
        here = f": {MOMENTS_BYTES * where.model.trainable / 2**20:.0f} MiB here" if where.model else ""
        yield cls.found("low", "a small optimizer state made smaller", "Only adapters are trained, and their moments are "
                        f"small{here}. {found} saves part of that, and updates through another library's kernels",
                        subject.settings[KEY],
                        expected=UNMEASURED, risk=Risk("none", "none", "low"),
                        cure=Cure("Use adamw_torch_fused", set_to(subject, KEY, "adamw_torch_fused"),
                                  ("techniques.fused_adamw=on",)))
