"""The scales of 4-bit weights left in fp32."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import is_four_bit, seen, value
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding
from powertrain.shapes import FOUR_BIT_BYTES, FP32, QUANTISED_BLOCK

KEY = "quantisation.bnb_4bit_use_double_quant"
SAVED_BYTES = 0.5 + FP32 / QUANTISED_BLOCK - FOUR_BIT_BYTES            # a weight


class DoubleQuantisationOff(Rule):
    name = "double_quantisation_off"
    rests_on = "technique: four_bit_base; Dettmers et al. 2023 (QLoRA), section 3"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if not is_four_bit(subject) or value(subject, KEY) is not False:
            return
        saved = f": {SAVED_BYTES * where.model.matmul_parameters / 2**20:.0f} MiB here" if where.model else ""
        expected = Expected(f"{SAVED_BYTES * 8:.2f} bits a weight less{saved}", "formula: a scale of 8 bits instead of 32 "
                            f"for each {QUANTISED_BLOCK} weights") if where.model else NO_SPEED
        yield cls.found("low", "scales of 4-bit weights are not quantised",
                        f"Each {QUANTISED_BLOCK} weights have a scale in fp32; quantised too, they take "
                        f"{SAVED_BYTES * 8:.2f} bits a weight less{saved}. It matters where memory is short",
                        seen(subject, KEY), expected=expected,
                        cure=Cure("Set bnb_4bit_use_double_quant=True if memory is short", set_to(subject, KEY, True),
                                  ("quantisation.double=true",)))
