"""What works beside a training takes only what the training leaves of the processor, where the system can do that."""

import contextlib
import os
import sys
import threading
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")     # of Linux, where sessions get equal shares whatever priorities are within them
LOWER, LOWEST = 10, 19       # a training waits for a thread at times, which must not starve beside others: it gets a tenth


def lower_thread() -> None:
    """Let the other threads of this process go first, where the system has a priority for each thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWER)


def lower_process() -> None:
    """Let this process, and its session, run while a core has nothing else to do; else at the lowest priority."""
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(str(LOWEST))
    try:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        with contextlib.suppress(AttributeError, OSError):
            os.nice(LOWEST)
