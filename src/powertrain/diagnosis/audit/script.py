"""A training script as syntax: its calls, loops and assignments, with what its names are known to be."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Script:
    """A parsed script. Nothing of it is ever run."""

    path: Path
    text: str
    tree: ast.Module
    imported: Mapping[str, str]              # name in the script -> what it is: "F" -> "torch.nn.functional"
