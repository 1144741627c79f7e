from __future__ import annotations

import os
import signal
import sys

import pytest

from powertrain.evidence.worker import process_context
from powertrain.run.part import listen


def _signalled_twice(number: signal.Signals) -> None:
    with listen() as interrupt:
        os.kill(os.getpid(), number)
        assert interrupt.requested == number.name
        os.kill(os.getpid(), number)
        sys.exit(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with listen() as interrupt:
        assert interrupt.requested is None
        os.kill(os.getpid(), number)
        assert interrupt.requested == number.name
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_exits_at_once(number: signal.Signals) -> None:
    process = process_context().Process(target=_signalled_twice, args=(number,))
    process.start()
    process.join()
    assert process.exitcode == 128 + number
