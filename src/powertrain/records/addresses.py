"""Addresses of places where a run is mirrored, such as s3://bucket/prefix."""

import re

from powertrain.records.errors import WrongUse

SCHEMES = ("s3", "gs", "az", "hf", "sftp", "file")
EXAMPLE = "s3://bucket/prefix"


def is_address(text: str) -> bool:
    return "://" in text


def check_address(text: str) -> str:
    """Return the address without a slash at its end. Raises WrongUse for one that cannot be used, or that holds a secret."""
    scheme, _, rest = text.partition("://")
    if "@" in rest.partition("/")[0] and ":" in rest.partition("@")[0]:
        raise WrongUse(f"the address {scheme}://... holds a password, which would stand in recipes and logs; leave it out, and "
                       "give it as the store's own tools take it (environment, credentials file or key)")
    if scheme not in SCHEMES or not re.fullmatch(r"[^\s?#\x00-\x1f\x7f]{1,1000}", rest.strip("/")):
        raise WrongUse(f"{text.partition('?')[0][:80]!r} is not an address; use for example {EXAMPLE} "
                       f"(known: {', '.join(SCHEMES)})")
    if scheme == "file" and not rest.startswith("/"):
        raise WrongUse(f"{text[:80]} is not an address: after file:// comes a full path, such as file:///mnt/nas")
    return f"{scheme}://{rest.rstrip('/')}"
