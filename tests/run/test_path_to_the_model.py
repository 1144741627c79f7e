"""From the command to the model: at most six calls through the package, on the real stack; and a display that fails."""

from __future__ import annotations

import errno
import gc
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import powertrain
from driver import TINY
from powertrain.cli import app, output, streams
from powertrain.models.decoder import Decoder
from powertrain.records.event_log import read_events
from powertrain.records.events import End, Event, ListenerFailed, Step

PACKAGE = str(Path(powertrain.__file__).parent)
MOST_CALLS = 6
Train = Callable[..., list[Event]]


@pytest.fixture
def train(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs `powertrain train WORDS` in this process; returns the events of the run in the folder `run`, or `folder`."""
    monkeypatch.setenv("POWERTRAIN_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)

    def call(*words: str, folder: str = "run") -> list[Event]:
        code = app(["train", *words], standalone_mode=False)
        gc.unfreeze()
        assert code == 0
        return read_events(tmp_path / folder / "events.jsonl")

    return call


def calls_from_the_command() -> list[str]:
    """The functions of this package on the stack, from the one that the command calls to the one that calls the model."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            found.append(f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}")
            if found[-1] == "cli/training.py:train":
                return found[::-1]
        frame = frame.f_back  # type: ignore[assignment]
    return []


@pytest.mark.parametrize("continued", [False, True])
def test_the_model_is_at_most_six_calls_from_the_command(train: Train, source: Path, monkeypatch: pytest.MonkeyPatch,
                                                         continued: bool) -> None:
    hidden, stacks = Decoder.hidden, set[tuple[str, ...]]()

    def recording(self: Decoder, *arguments: Any, **named: Any) -> Tensor:
        if self.training and (calls := calls_from_the_command()):
            stacks.add(tuple(calls))
        return hidden(self, *arguments, **named)

    words = [f"data={source}", *TINY, "--output", "run", "--quiet"]
    if continued:                            # the last checkpoint is lost, and with it the last steps and the model
        train(*words)
        for path in (Path("run/model"), Path("run/checkpoints/step-000011")):
            shutil.rmtree(path)
        words = ["--resume", "run", "--quiet"]
    monkeypatch.setattr(Decoder, "hidden", recording)
    train(*words)
    assert stacks
    for calls in stacks:
        assert len(calls) + 1 <= MOST_CALLS, [*calls, "the model"]       # and the call of the model itself
    assert any(calls[:3] == ("cli/training.py:train", "run/session.py:run", "training/loop.py:train") for calls in stacks)


def test_a_display_that_raises_ends_no_run_and_loses_no_event(train: Train, source: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(f"data={source}", *TINY, "--output", "whole", "--quiet", folder="whole")

    def broken(value: Any) -> None:
        if value["event"] != "result":
            raise streams.OutputGone(BrokenPipeError(errno.EPIPE, "nobody reads on"))

    monkeypatch.setattr(output, "print_json", broken)
    events = train(f"data={source}", *TINY, "--output", "run", "--json")
    assert [event.step for event in events if isinstance(event, Step)] == [
        event.step for event in whole if isinstance(event, Step)]
    failures = [event for event in events if isinstance(event, ListenerFailed)]
    assert [event.why for event in failures] == [
        "OutputGone: standard output cannot be written (nobody reads on); send it to another file"]
    assert isinstance(events[-1], End)
    assert events[-1].reason == "finished"
