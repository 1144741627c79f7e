import os
import subprocess
import sys
from pathlib import Path

import pytest

from powertrain.records.priority import AUTOGROUP

LOWERED = """
import os, threading
from powertrain.records.priority import AUTOGROUP, lower_process
other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
lower_process()
print([os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")])
print(AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else "")
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE") or not Path("/proc/self/task").exists(), reason="this system is not Linux")
def test_a_process_in_a_session_of_its_own_has_the_lowest_priority_beside_other_sessions() -> None:
    ended = subprocess.run([sys.executable, "-c", LOWERED], start_new_session=True, capture_output=True, text=True, check=True)
    policies, autogroup = ended.stdout.splitlines()
    assert policies == str([os.SCHED_IDLE, os.SCHED_IDLE])
    assert autogroup.endswith("nice 19") or not AUTOGROUP.exists()
