"""A Python file that only sets values, as document 004 shows its configs: `per_device_train_batch_size = 2`."""

from __future__ import annotations

import ast
from pathlib import Path

from powertrain.audit.configs.marked import Marked
from powertrain.records import WrongUse


def assigned(path: Path) -> Marked:
    """Names that a file, or the one class in it, sets to literals. It is parsed and never run."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, SyntaxError) as error:
        raise WrongUse(f"{path} cannot be read as Python: {error}") from None
    found: dict[str, Marked] = {}
    for body in [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            value = getattr(node, "value", None)
            for target in targets:
                if not isinstance(target, ast.Name) or value is None:
                    continue
                try:
                    found[target.id] = Marked(ast.literal_eval(value), node.lineno)
                except ValueError:
                    continue                 # set to what only running it would tell
    return Marked({name: each.value for name, each in found.items()}, 1, found)
