"""docs/ARCHITECTURE.md: who may import whom, from the map that tests/test_architecture.py enforces."""

from __future__ import annotations

import ast
from pathlib import Path

from tables.stored import markdown_table

MAP = Path(__file__).resolve().parents[2] / "tests" / "test_architecture.py"


def imports(studies: Path) -> str:
    """Return a row for each room with the rooms that it may import."""
    tree = ast.parse(MAP.read_text(encoding="utf-8"))
    found = next(node.value for node in tree.body if isinstance(node, ast.AnnAssign)
                 and isinstance(node.target, ast.Name) and node.target.id == "MAY_IMPORT" and node.value is not None)
    may_import = ast.literal_eval(ast.unparse(found).replace("set()", "()"))     # literal_eval reads no empty set
    return markdown_table(("room", "may import"), [(f"`{room}`", ", ".join(f"`{name}`" for name in sorted(others)) or "nothing")
                                                   for room, others in may_import.items() if not room.startswith("__")])
