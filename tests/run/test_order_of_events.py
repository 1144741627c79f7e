"""Events stand in the order in which things happened, so that a report can put them on one clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from driver import TINY
from powertrain.records.event_log import read_events
from powertrain.records.timeline import read


def test_what_was_seen_of_a_step_stands_behind_it_and_the_parts_are_the_wall_time(cli: Callable[..., tuple[int, str, str]],
                                                                                  tmp_path: Path) -> None:
    words = [*TINY, "max_steps=25", "logging_steps=10", "--output", str(tmp_path / "run")]
    code, _, err = cli("train", *words, fault=("sync", 50))
    assert code == 0, err
    events = read_events(tmp_path / "run" / "events.jsonl")
    places = {(event.kind, event.step): place for place, event in enumerate(events)}
    assert places["step", 1] < places["step", 2] < places["memory", 2] < places["step", 3]
    assert read(events).overrun_s < 0.002    # times of day are written in milliseconds, and parts of steps in millionths


def test_a_program_hears_of_what_comes_before_the_first_step(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, err = cli("train", *TINY, "max_steps=2", "techniques.torch_compile=true", "--output", "run", "--json")
    assert code == 0, err
    heard = [json.loads(line) for line in out.splitlines()]
    about = [event["about"] if event["event"] == "phase" else event["event"] for event in heard]
    assert about[:about.index("step") + 1] == ["machine", "reading", "folder", "compiling", "building", "start", "step"]
    assert "torch_compile" in heard[about.index("compiling")]["techniques"]
    assert "looking at the machine" not in err
