"""Facts that are pasted into an issue: without what names a machine, its user or their files."""

import getpass
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powertrain.records.redaction import redacted

LEFT_OUT = "names of this machine and user, home folder, paths, fingerprints, digests, serial numbers, addresses and tokens"
WHOLLY = ("fingerprint", "digest")           # fields: a digest tells who has the same private data
MARK = "[left out]"
NAMING = re.compile(r"""
    \b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b       # UUIDs, of GPUs too
  | \b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b                              # MAC addresses
  | \b(?:\d{1,3}\.){3}\d{1,3}\b                                       # addresses
  | \bserial(?:[ ]number)?[ :=]+[^\s,;]+
  | \b[A-Za-z]:[\\/][^\s"',;()]*                                       # paths of Windows
  | (?<![\w.:/~-])~?(?:/[^\s"',;()/]+)+/?                              # absolute paths, and those of a home folder
""", re.VERBOSE | re.IGNORECASE)


def shareable(value: Any) -> Any:
    """Return the value of JSON with MARK in place of whatever names this machine, its user, or a file."""
    if isinstance(value, Mapping):
        return {shareable(key): MARK if key in WHOLLY and item else shareable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(shareable, value))
    return _without_names(value) if isinstance(value, str) else value


def _without_names(text: str) -> str:
    text = NAMING.sub(MARK, redacted(text))      # first, or a path with a name in it would be cut
    for name in sorted(_names(), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", MARK, text, flags=re.IGNORECASE)
    return text


def _names() -> set[str]:
    """Return the names of this machine and its user, and the home folder."""
    found = {str(Path.home())}
    for ask in (getpass.getuser, socket.gethostname):
        try:
            found.add(ask())
        except (OSError, KeyError, ImportError):
            continue
    return {name for name in found | {name.partition(".")[0] for name in found} if len(name) > 1}
