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


def lower_process(priority: int = LOWEST) -> None:
    """Let others go before this process and its session: at LOWER it gets a tenth beside them, at LOWEST what they leave."""
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(str(priority))
    if priority < LOWEST or not _runs_when_idle():
        with contextlib.suppress(AttributeError, OSError):
            os.nice(priority)


def _runs_when_idle() -> bool:
    """Give all threads of this process the class that gets what is left; return whether the system has one."""
    try:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        return False
    return True
