"""4-bit floats instead of NF4, because nobody said which."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import TRAINERS, is_four_bit, seen, value
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

KEY = "quantisation.bnb_4bit_quant_type"


class FourBitType(Rule):
    name = "four_bit_type"
    rests_on = "documentation: BitsAndBytesConfig (fp4 where it is not set); Dettmers et al. 2023 (NF4 is the more exact one)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if is_four_bit(subject) and value(subject, KEY) == "fp4" and (KEY in subject.settings or subject.framework in TRAINERS):
            yield cls.found("low", "4-bit weights as FP4", "Weights are spread like a normal distribution, which NF4's 16 "
                            "values are made for and FP4's are not: the same memory, a coarser model",
                            seen(subject, KEY), expected=NO_SPEED,
                            risk=Risk("none", "low", "low"),
                            cure=Cure('Set bnb_4bit_quant_type="nf4"', set_to(subject, KEY, "nf4"), ("quantisation.type=nf4",)))
