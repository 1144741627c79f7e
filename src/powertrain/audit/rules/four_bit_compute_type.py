"""4-bit weights that are widened to another type than the rest is computed in."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import dtype_named, is_four_bit, is_unread, products_dtype, seen, value
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding, Risk

KEY = "quantisation.bnb_4bit_compute_dtype"


class FourBitComputeType(Rule):
    name = "four_bit_compute_type"
    rests_on = "documentation: BitsAndBytesConfig (bnb_4bit_compute_dtype is torch.float32 where it is not set)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if not is_four_bit(subject) or is_unread(subject, KEY):
            return
        rest, widened = products_dtype(subject), dtype_named(value(subject, KEY))
        if rest not in ("bf16", "fp16") or widened is None or widened == rest:
            return
        if widened == "fp32":
            why = f"Every frozen matrix is widened to fp32 and multiplied in it, while the rest is computed in {rest}"
        else:
            why = f"The frozen matrices are multiplied in {widened} and the rest in {rest}: each layer converts twice, " \
                  f"and what {widened} cannot hold is lost"
        yield cls.found("moderate", f"4-bit weights are multiplied in {widened}", why, seen(subject, KEY),
                        seen(subject, f"training.{rest}"), expected=Expected(f"products in {rest}", "none"),
                        risk=Risk("none", "low", "low"),
                        cure=Cure(f"Set bnb_4bit_compute_dtype to {'bfloat16' if rest == 'bf16' else 'float16'}",
                                  set_to(subject, KEY, "bfloat16" if rest == "bf16" else "float16"), ("method=qlora",)))
