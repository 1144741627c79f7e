from __future__ import annotations

import json
from pathlib import Path

import pytest

from powertrain.records import WrongUse
from powertrain.training.events import EventLog, read_events


def test_what_is_written_is_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("start", name="é")
    log.write("step", step=1, loss=2.5)
    assert not log.path.exists()             # nothing reaches the disk step by step
    log.flush()
    assert [(e["event"], e.get("step")) for e in read_events(log.path)] == [("start", None), ("step", 1)]


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for step in (1, 2):
        log.write("step", step=step)
        log.flush(durable=True)
    log.flush()
    assert [event["step"] for event in read_events(log.path)] == [1, 2]


def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    assert len(read_events(path)) == 1
    log = EventLog(path)
    log.write("step", step=2)
    log.flush()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_steps_after_the_checkpoint_that_was_resumed_do_not_count_twice(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for step in (1, 2, 3):
        log.write("step", step=step, run="first")
    log.write("end", step=3, reason="failed")
    log.write("resume", step=1)
    for step in (2, 3, 4):
        log.write("step", step=step, run="second")
    log.flush()
    steps = [(e["step"], e["run"]) for e in read_events(log.path) if e["event"] == "step"]
    assert steps == [(1, "first"), (2, "second"), (3, "second"), (4, "second")]
    assert not [e for e in read_events(log.path) if e["event"] == "end"]


def test_a_full_disk_keeps_the_events_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("step", step=1)
    log.path = Path("/dev/full")             # every write to it fails with ENOSPC
    log.flush()
    assert log.failure
    assert "No space left" in log.failure
    log.write("step", step=2)
    log.path = tmp_path / "events.jsonl"
    log.flush()
    assert log.failure is None
    assert [e["step"] for e in read_events(log.path)] == [1, 2]


@pytest.mark.parametrize("line", [b'{"event": "st\n', b"[]\n", b'{"time": 3}\n', b"\0\0\0\n", b"\xff\n", b"\n"])
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "start"}\n' + line + b'{"event": "end"}\n')
    with pytest.raises(WrongUse, match=r"events\.jsonl:2 is no event of a run .*take that line out"):
        read_events(path)
