"""Text turned into tokens again whenever it is drawn."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

DRAWING = ("__getitem__", "collate", "collate_fn", "collate_batch", "__iter__", "data_collator")
METHODS = ("encode", "encode_plus", "batch_encode_plus", "__call__", "tokenize")


class TokenisedEachEpoch(Rule):
    name = "tokenised_each_epoch"
    rests_on = "technique: the token store (examples are tokenised once); features: 2.2 (pre-tokenised data)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        for name in DRAWING if script is not None else ():
            function = script.functions.get(name) if script is not None else None
            call = next((node for node in ast.walk(function) if isinstance(node, ast.Call) and _tokenises(node)),
                        None) if function is not None else None
            if script is None or call is None or "IterableDataset" in script.text:
                continue
            yield cls.found(
                "low", "text is tokenised again in every epoch", f"{name} tokenises what it is asked for: the work of one "
                f"pass over "
                "the data is done in each, on the processor that also prepares the steps", script.evidence(call),
                expected=UNMEASURED, cure=Cure("Tokenise once before training (`dataset.map`), and keep token lists"))
            return


def _tokenises(node: ast.Call) -> bool:
    words = ast.unparse(node.func).split(".")
    named = words[-1] if words[-1] not in METHODS else words[-2] if len(words) > 1 else ""
    return named in ("tokenizer", "tok", "enc") and words[-1] not in ("pad", "decode")
