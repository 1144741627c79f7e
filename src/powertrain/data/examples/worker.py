"""A further process that tokenises stretches of files, as sharing.py tells it on its standard input.

The first line is the work, and each one behind it a stretch, which it answers with a line end when it is done.

It ends with its input, so that it cannot outlive who started it; what goes wrong ends it, and the other does its stretch again.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path

from powertrain.data.examples.work import work_from
from powertrain.data.rows.stretches import Stretch

ANSWER = b"\n"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # who started this is interrupted too, and ends it
    answers, sys.stdout = os.dup(sys.stdout.fileno()), sys.stderr        # nothing else may be taken for an answer
    work = work_from(json.loads(sys.stdin.readline()))
    gc.freeze()                              # what is here stays to the end
    for line in sys.stdin:
        told = json.loads(line)
        work.write(Path(told["folder"]), Stretch(Path(told["path"]), told["start"], told["size_bytes"], told["line"]))
        os.write(answers, ANSWER)
