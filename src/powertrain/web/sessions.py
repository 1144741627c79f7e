"""Who may use the page: whoever opens the link that `powertrain ui` printed gets a cookie, which outlives the server."""

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path

KEPT_S = 30 * 24 * 3600      # that a cookie is good for
SECRET_BYTES = 32


class Sessions:
    """The link's token, which works once, and cookies, which anybody can check who has the secret in `folder`."""

    def __init__(self, folder: Path, scope: str):
        self.scope = scope                   # what a cookie opens: the folder of runs that the page shows
        self._secret = _secret(folder / "secret")
        self.token = secrets.token_urlsafe(16)

    def exchange(self, token: str) -> str | None:
        """Return a cookie for the token of the link, and make another token; None for a wrong one."""
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        self.token = secrets.token_urlsafe(16)
        until = str(int(time.time()) + KEPT_S)
        return f"{until}.{self.sign(until)}"

    def is_good(self, cookie: str) -> bool:
        until, _, signature = cookie.partition(".")
        return hmac.compare_digest(signature.encode(), self.sign(until).encode()) and until.isdecimal() \
            and time.time() < int(until)

    def sign(self, text: str) -> str:
        """Return what only somebody who has the secret can write of a text."""
        return hmac.new(self._secret, f"{text} {self.scope}".encode(), hashlib.sha256).hexdigest()


def _secret(path: Path) -> bytes:
    """Return the bytes of the file, made for this user alone where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except FileExistsError:
        found = path.read_bytes()
        if len(found) == SECRET_BYTES:
            return found
        path.unlink()                        # cut off by a full disk
        return _secret(path)
    try:
        made = secrets.token_bytes(SECRET_BYTES)
        os.write(file, made)
    finally:
        os.close(file)
    return made
