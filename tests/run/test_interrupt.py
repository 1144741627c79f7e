from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from powertrain.run.part import SAME_REQUEST_S, listen

TWICE = """
import os, signal, sys, time
from powertrain.run.part import listen
with listen() as interrupt:
    os.kill(os.getpid(), signal.{name})
    assert interrupt.requested == "{name}"
    time.sleep({later_s})
    os.kill(os.getpid(), signal.{name})
    sys.exit(0)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with listen() as interrupt:
        assert interrupt.requested is None
        os.kill(os.getpid(), number)
        assert interrupt.requested == number.name
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_second_signal_exits_at_once(name: str) -> None:
    found = subprocess.run([sys.executable, "-c", TWICE.format(name=name, later_s=SAME_REQUEST_S)], check=False)
    assert found.returncode == 128 + signal.Signals[name]


def test_a_request_that_is_told_twice_ends_nothing() -> None:
    with listen() as interrupt:              # else this test would end here: Linux tells of a parent's end once for each thread
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested == "SIGTERM"
