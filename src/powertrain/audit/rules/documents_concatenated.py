"""Documents laid end to end and cut into blocks, with nothing that keeps them apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.script import Script
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

APART = ("position_ids", "cu_seqlens", "cu_seq_lens", "seq_lens", "document_mask", "doc_ids", "flex_attention", "seq_idx",
         "varlen", "packed_sequence_mask")
PROMPTED = ("instruction", "question", "messages", "prompt", "apply_chat_template")


class DocumentsConcatenated(Rule):
    name = "documents_concatenated"
    rests_on = "technique: packing; features: F11 (naive concatenation leaks across examples, trl #1230)"
    gives_way_to = frozenset({"packing_leaks"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None or any(word in script.text for word in APART):
            return
        for function in script.functions.values():
            joined = next((node for node in ast.walk(function) if _joins(script, node)), None)
            if joined is None or not any(_cuts(node) for node in ast.walk(function)):
                continue
            examples = any(word in script.text for word in PROMPTED)
            yield cls.found(
                "moderate" if examples else "low", "documents in one block see each other", "Token lists are joined and cut "
                "into blocks without marking where one ends: a token attends to documents that merely happen to lie before "
                "its own, "
                "and what lies across a cut is torn apart", script.evidence(joined), expected=NO_SPEED,
                risk=Risk("low", "low", "medium"),
                cure=Cure("Pack whole examples, and restart positions and attention at each (in TRL packing=True with "
                          "packing_strategy=\"bfd\")", (), ("techniques.packing=on",)))
            return


def _joins(script: Script, node: ast.AST) -> bool:
    """`sum(lists, [])` or `chain(*lists)` over token lists."""
    if not isinstance(node, ast.Call):
        return False
    name = script.name(node.func)
    if name == "sum" and len(node.args) == 2 and isinstance(node.args[1], ast.List):
        return True
    return name in ("itertools.chain", "itertools.chain.from_iterable") and bool(node.args)


def _cuts(node: ast.AST) -> bool:
    """`x[i : i + block]` for i in range(0, total, block)."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and len(node.args) == 3
