"""How a script makes its labels: copied from the tokens that the model reads, and what is taken out of them."""

from __future__ import annotations

import ast

from powertrain.audit.script import Script


def is_copied(script: Script, node: ast.AST) -> bool:
    """`labels = input_ids.clone()`, `x["labels"] = x["input_ids"].copy()`, `{"labels": ids["input_ids"]}`."""
    pairs: list[tuple[str, ast.expr]] = []
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        name = target.slice.value if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) else getattr(
            target, "id", "")
        pairs = [(str(name), node.value)]
    elif isinstance(node, ast.Dict):
        pairs = [(str(key.value), value) for key, value in zip(node.keys, node.values, strict=True)
                 if isinstance(key, ast.Constant)]
    return any(name == "labels" and "input_ids" in script.words(value) and "[1:" not in script.words(value)
               for name, value in pairs)
