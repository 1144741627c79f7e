from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from powertrain.run.part import listen

TWICE = """
import os, signal, sys
from powertrain.run.part import listen
with listen() as interrupt:
    os.kill(os.getpid(), signal.{name})
    assert interrupt.requested == "{name}"
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
    found = subprocess.run([sys.executable, "-c", TWICE.format(name=name)], check=False)
    assert found.returncode == 128 + signal.Signals[name]
