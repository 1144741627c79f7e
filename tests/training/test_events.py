"""events.jsonl: nothing is lost, nothing is doubled, whatever happens while it is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain.records import WrongUse
from powertrain.records.event_log import POLL_S, EventLog, followed, read_events, to_line
from powertrain.records.events import End, Evaluated, Event, Note, Resume, Saved, Start, Step


def step(number: int, **more: object) -> Step:
    return Step(step=number, loss=2.5, tokens=1, real_tokens=1, seconds=0.1, learning_rate=1e-3, grad_norm=1.0, more=more)


def steps(path: Path) -> list[int]:
    return [event.step for event in read_events(path) if isinstance(event, Step)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    written: list[Event] = [Start(name="é"), step(1)]
    for event in written:
        log.write(event)
    assert not log.path.exists()             # nothing reaches the disk step by step
    log.flush()
    assert read_events(log.path) == written


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for number in (1, 2):
        log.write(step(number))
        log.flush(durable=True)
    log.flush()
    assert steps(log.path) == [1, 2]


def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "note", "time": 1, "message": "x"}\n{"event": "st')
    assert len(read_events(path)) == 1
    log = EventLog(path)
    log.write(step(2))
    log.flush()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["note", "step"]


def test_steps_after_the_checkpoint_that_was_resumed_do_not_count_twice(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for event in (*(step(number, run="first") for number in (1, 2, 3)), End(step=3, reason="failed"), Resume(step=1),
                  *(step(number, run="second") for number in (2, 3, 4))):
        log.write(event)
    log.flush()
    found = [(event.step, event.more["run"]) for event in read_events(log.path) if isinstance(event, Step)]
    assert found == [(1, "first"), (2, "second"), (3, "second"), (4, "second")]
    assert not [event for event in read_events(log.path) if isinstance(event, End)]


def test_a_full_disk_keeps_the_events_until_there_is_room(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(step(1))
    log.path = Path("/dev/full")             # every write to it fails with ENOSPC
    log.flush()
    assert log.failure
    assert "No space left" in log.failure
    log.write(step(2))
    log.path = tmp_path / "events.jsonl"
    log.flush()
    assert log.failure is None
    assert steps(log.path) == [1, 2]


def test_a_disk_that_takes_half_of_a_flush_leaves_no_torn_and_no_doubled_line(tmp_path: Path,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(step(1))
    log.flush()
    full = [True]

    def half(file: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        if not full[0]:
            return write(file, data)
        write(file, data[:len(data) * 2 // 3])           # more than one line, and less than two
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    log.write(step(2))
    log.write(step(3))
    log.flush(durable=True)
    assert log.failure == "No space left on device"
    log.write(step(4))
    full[0] = False
    log.flush()
    assert log.failure is None
    assert steps(log.path) == [1, 2, 3, 4]


def test_an_event_of_a_signal_handler_within_a_flush_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    raised = []

    def write(file: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        if raised:
            return write(file, data)
        raised.append(True)
        found = write(file, data[:len(data) // 2])
        os.kill(os.getpid(), signal.SIGUSR1)             # the handler runs here, in the middle of the flush
        return found

    def handler(*_: object) -> None:
        log.write(Note(message="from the handler"))
        log.flush(durable=True)

    old = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(os, "write", write)
    try:
        log.write(step(1))
        log.flush()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert [event.kind for event in read_events(log.path)] == ["step", "note"]


def test_an_error_that_breaks_off_a_flush_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(step(1))
    monkeypatch.setattr(os, "fsync", lambda file: 1 / 0)     # the line is in the file, and nobody says so
    with pytest.raises(ZeroDivisionError):
        log.flush(durable=True)
    monkeypatch.undo()
    log.write(step(2))
    log.flush()
    assert steps(log.path) == [1, 2]


def test_events_of_other_threads_are_kept_once_and_in_their_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    def write(thread: int) -> None:
        for number in range(200):
            log.write(step(1000 * thread + number))
            if number % 7 == 0:
                log.flush()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.flush()
    found = steps(log.path)
    assert sorted(found) == [1000 * thread + number for thread in range(4) for number in range(200)]
    assert all([one for one in found if one // 1000 == thread] == list(range(1000 * thread, 1000 * thread + 200))
               for thread in range(4))


FOLLOWER = """
import sys
from pathlib import Path
from powertrain.records.event_log import followed
for event in followed(Path(sys.argv[1])):
    print(event.kind, event.step, flush=True)
sys.exit("torch" in sys.modules)
"""


def test_a_follower_in_a_process_of_its_own_reads_each_event_when_its_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with subprocess.Popen([sys.executable, "-c", FOLLOWER, str(path)], stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        log = EventLog(path)
        for event in (Start(), step(1), End(step=1, reason="stopped"), Resume(step=1)):      # it was stopped, and goes on
            log.write(event)
        log.flush()
        assert [follower.stdout.readline() for _ in range(4)] == ["start 0\n", "step 1\n", "end 1\n", "resume 1\n"]
        line = json.dumps(to_line(step(2)))
        with open(path, "a", encoding="utf-8") as file:
            file.write(line[:20])
            file.flush()
            time.sleep(2 * POLL_S)
            file.write(line[20:] + "\n")
        log.write(End(step=2, reason="finished"))
        log.flush()
        assert follower.stdout.read() == "step 2\nend 2\n"
    assert follower.returncode == 0


def test_a_follower_of_a_killed_run_reads_to_the_end_and_stops(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(step(1))
    log.flush()
    assert [event.step for event in followed(log.path, is_over=lambda: True)] == [1]


@pytest.mark.parametrize("line", [b'{"event": "st\n', b"[]\n", b'{"time": 3}\n', b"\0\0\0\n", b"\xff\n", b"\n",
                                  b'{"event": "step", "step": 1}\n', b'{"event": "evaluation", "loss": "x", "tokens": 1}\n'])
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "start"}\n' + line + b'{"event": "end", "reason": "finished"}\n')
    with pytest.raises(WrongUse, match=r"events\.jsonl:2 is no event of a run"):
        read_events(path)


def test_the_disk_has_what_precedes_a_save_before_the_save_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure could leave a damaged line before a whole one that says the disk was waited for."""
    done, write, fsync = [], os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda file, data: done.append(bytes(data)) or write(file, data))
    monkeypatch.setattr(os, "fsync", lambda file: done.append(b"sync") or fsync(file))
    log = EventLog(tmp_path / "events.jsonl")
    for event in (Evaluated(loss=1.0, tokens=1), Saved(path="step-000001", seconds=0.1, bytes=1), End(reason="finished")):
        log.write(event)
    log.flush(durable=True)
    kinds = ["sync" if one == b"sync" else json.loads(one)["event"] for one in done]
    assert kinds[:6] == ["evaluation", "sync", "checkpoint", "sync", "end", "sync"]
