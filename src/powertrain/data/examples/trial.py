"""Tries a chat template before any row is rendered, or a tokenizer: both are programs, and may loop or fill the memory.

It works once in a forked process, which the system ends after a time, and which it refuses more than some memory. For a
template a few messages are enough: what takes long by the number of messages alone takes long for these too.
"""

import os
import signal
import sys
from collections.abc import Callable

TRIAL_S = 3.0                # of the processor; a template takes milliseconds
MOST_BYTES = 1 << 30         # more than the process has, of addresses
ENDED = 0


def ends(render: Callable[[], object]) -> bool:
    """Return whether `render` ends in time and memory, with a result or an error. True where the system has no fork."""
    if not hasattr(os, "fork"):
        return True
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if not child:
        code = ENDED + 1
        try:
            _limit()
            code = _code_of(render)
        finally:
            os._exit(code)                   # nothing of the parent's is cleaned up or written here
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ENDED


def _limit() -> None:
    """Let the system end this process after TRIAL_S, also in the middle of a call of C, and refuse it much more memory."""
    import resource

    import psutil

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, TRIAL_S)        # of processor time: on a busy machine nothing takes too long
    most = psutil.Process().memory_info().vms + MOST_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _code_of(render: Callable[[], object]) -> int:
    try:
        render()
    except MemoryError:
        return ENDED + 1
    except Exception:        # what a template raises is told where it is rendered
        return ENDED
    return ENDED
