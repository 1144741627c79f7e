"""Locks of files, which end with the process that holds them, however it ends."""

import errno
from typing import TextIO


def got_lock(file: TextIO, *, alone: bool = True) -> bool | None:
    """Lock the file if nobody holds it; None on Windows without advisory locks, where two writers are the user's care."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
