"""What the last releases of libraries that are not read here do not have: known.yaml lists it."""

import re
from pathlib import Path

from powertrain.audit.commands import text_of
from powertrain.audit.installed import LIBRARIES
from powertrain.audit.rules.base import known
from powertrain.audit.script import Script

GONE, OF_CLASSES = known("gone_elsewhere"), known("gone_of_classes")
BOUND = frozenset(["torchtune", "torchao", "torchtext", "pytorch_lightning", "torchmetrics", "vllm"])     # to torch, or others
SAYING = ("requirements*.txt", "requirements/*.txt", "pyproject.toml", "setup.py", "setup.cfg", "environment*.y*ml", "Pipfile",
          "Dockerfile", "README*", "*.sh", "*.lock")


def plain(dotted: str) -> str:
    """Return a dotted name with the older of the two names of Lightning."""
    return re.sub(r"^lightning(\.pytorch)?\.", "pytorch_lightning.", dotted)


def gone(module: str, name: str) -> str:
    """Return the dotted name of what a library's last release lacks of a module and its name; "" for neither."""
    parts = [*plain(module).split("."), *([name] if name else [])]
    for at in range(1, len(parts) + 1):
        names = GONE.get(".".join(parts[:at]), "").split()
        if names == ["*"]:
            return ".".join(parts[:at])
        if at < len(parts) and parts[at] in names:
            return ".".join(parts[:at + 1])
    return ""


def gone_of_class(dotted: str) -> frozenset[str]:
    """Return the arguments and attributes that a class no longer has."""
    return frozenset(OF_CLASSES.get(plain(dotted), "").split())


def gone_of_objects(dotted: str) -> frozenset[str]:
    """Return the attributes that objects of a class no longer have: with the arguments, but for those that are still there."""
    return gone_of_class(dotted) - {"checkpoint_callback"}


def is_other(dotted: str) -> bool:
    """Return whether a name is of a library that is not read here, and listed."""
    first = plain(dotted).partition(".")[0]
    return first not in LIBRARIES and any(each.partition(".")[0] == first for each in (*GONE, *OF_CLASSES))


def is_pinned(script: Script, library: str) -> bool:
    """Return whether the project holds a library to a release of its own, which may be there beside the others."""
    key = ("pinned", library)
    if key not in script.kept:
        script.kept[key] = library not in BOUND and bool(asked_of(script.root or script.path.parent, library))
    return bool(script.kept[key])


def asked_of(root: Path, library: str) -> list[tuple[int, ...]]:
    """Return the releases to which the project's own lists hold a library: `numpy==1.23` gives (1, 23)."""
    name = library.replace("_", "[-_]?")
    words = re.compile(rf"\b{name}(?:\[[^]]*\])?[\"']?\s*(?:==?|<=?|~=|:v?|@v?)\s*[\"'^~]?(\d[\d.]*)", re.IGNORECASE)
    files = [file for pattern in SAYING for file in sorted(root.glob(pattern))[:20]]
    return [tuple(map(int, filter(None, each.split(".")))) for file in files for each in words.findall(text_of(file))]
