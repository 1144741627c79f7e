"""The index of runs says what the whole log says, however it grew, was cut, written anew or damaged."""

import io
import json
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs_written import line_of, write_run

from powertrain.records.event_log import counted, read_all_events
from powertrain.records.events import Step
from powertrain.run.folder import RunFolder, summarise
from powertrain.web import log_lines, series
from powertrain.web.log_lines import ROW_BYTES
from powertrain.web.series import MOST_CHUNKS, Index


@pytest.fixture
def index(tmp_path):
    return Index(tmp_path / "page" / "index.sqlite")


def check_same(index, run):
    """Compare with what reads the whole file."""
    events = counted(read_all_events(run / "events.jsonl"))
    steps, series = [event for event in events if isinstance(event, Step)], index.series(run)
    assert series["step"].tolist() == [step.step for step in steps]
    np.testing.assert_array_equal(series["loss"], [step.loss for step in steps])         # nan is nan
    np.testing.assert_array_equal(series["backward"], [step.parts.get("backward", 0.0) for step in steps])
    assert list(series.others) == [event for event in events if not isinstance(event, Step)]
    before = [sum(isinstance(old, Step) for old in events[:number]) for number, event in enumerate(events)
              if not isinstance(event, Step)]
    assert list(series.places) == before
    assert series.end == (run / "events.jsonl").stat().st_size


EVENTS = st.one_of(st.integers(1, 3).map(lambda number: ["step"] * number), st.just(["evaluation"]), st.just(["end"]),
                   st.integers(0, 9).map(lambda step: [("resume", step)]),
                   st.integers(0, 9).map(lambda step: [("rewound", step)]), st.just(["bad step"]), st.just(["read"]))


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(EVENTS, max_size=14))
def test_it_says_what_the_whole_log_says(parts, tmp_path_factory):
    run, step = tmp_path_factory.mktemp("run"), 0
    index = Index(run / "index.sqlite")
    log = run / "events.jsonl"
    log.write_text(json.dumps({"event": "start", "time": 1.0, "step": 0, "version": 2}) + "\n")
    for what in (what for part in parts for what in part):
        with open(log, "a") as file:
            if what == "step":
                step += 1
                file.write(line_of(step))
            elif what == "bad step":
                step += 1
                file.write(line_of(step).replace('"grad_norm": ', '"grad_norm": "nan", "was": '))
            elif what == "read":
                index.series(run)
            elif isinstance(what, tuple):
                step = min(step, what[1])
                file.write(json.dumps({"event": "resume", "time": 2.0, "step": step, "version": 2} if what[0] == "resume" else {
                    "event": "warning", "about": "rewound", "time": 2.0, "step": step, "bad_step": step + 1}) + "\n")
            elif what == "evaluation":
                file.write(json.dumps({"event": "evaluation", "time": 2.0, "step": step, "loss": 1.0, "tokens": 3}) + "\n")
            else:
                file.write(json.dumps({"event": "end", "time": 3.0, "step": step, "reason": "stopped"}) + "\n")
    check_same(index, run)


def test_it_is_kept_and_read_on(index, tmp_path):
    run = write_run(tmp_path / "run", 200, ended=False)
    check_same(index, run)
    for step in range(201, 201 + 2 * MOST_CHUNKS):
        with open(run / "events.jsonl", "a") as log:
            log.write(line_of(step))
        index.series(run)
    check_same(index, run)
    again = Index(index.file)
    check_same(again, run)


def test_a_line_without_its_end_waits(index, tmp_path):
    run = write_run(tmp_path / "run", 20, ended=False)
    line = line_of(21)
    with open(run / "events.jsonl", "a") as log:
        log.write(line[:40])
    assert len(index.series(run).steps) == 20
    with open(run / "events.jsonl", "a") as log:
        log.write(line[40:])
    check_same(index, run)


def test_a_line_that_is_completed_while_the_log_is_read_waits_for_the_next_reading():
    class Growing(io.BytesIO):
        def readlines(self, size=-1):
            found = super().readlines(size)
            if found:                        # the writer goes on between two readings
                place = self.tell()
                self.write(rest.pop() if rest else b"")
                self.seek(place)
            return found

    line = line_of(21).encode()
    whole, rest = line_of(20).encode(), [line[40:]]
    assert list(log_lines.blocks(Growing(whole + line[:40]), 0, 1000)) == [[whole]]


def test_many_new_steps_are_several_chunks_that_stay_apart(index, tmp_path, monkeypatch):
    monkeypatch.setattr(log_lines, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(log_lines, "CHUNK_STEPS", 30)
    monkeypatch.setattr(series, "CHUNK_STEPS", 30)
    run = write_run(tmp_path / "run", 200, ended=False)
    check_same(index, run)
    with index._database() as database:
        sizes = [size // ROW_BYTES for size, in database.execute("SELECT LENGTH(steps) FROM chunk ORDER BY begin")]
    assert len(sizes) > 4
    assert min(sizes[:-1]) >= 30
    for step in range(201, 201 + 2 * MOST_CHUNKS):
        with open(run / "events.jsonl", "a") as log:
            log.write(line_of(step))
        Index(index.file).series(run)
    with index._database() as database:
        joined = [size // ROW_BYTES for size, in database.execute("SELECT LENGTH(steps) FROM chunk ORDER BY begin")]
    assert joined[:len(sizes) - 1] == sizes[:-1]
    assert len(joined) < len(sizes) + 2 * MOST_CHUNKS - 10
    check_same(Index(index.file), run)


@pytest.mark.parametrize("moved", [False, True])
def test_a_long_log_is_read_in_several_processes(index, tmp_path, monkeypatch, moved):
    run = write_run(tmp_path / "run", 300)
    monkeypatch.setattr(log_lines, "READ_APART_BYTES", (run / "events.jsonl").stat().st_size // 3)
    monkeypatch.setattr(log_lines, "usable_cpus", lambda: 8)
    other = write_run(tmp_path / "other", 300, ended=False)
    asked, submit = [], ProcessPoolExecutor.submit

    def watched(pool, work, path, *rest):
        asked.append(rest[1:])
        return submit(pool, work, other / "events.jsonl" if moved else path, *rest)          # then this process reads it all

    monkeypatch.setattr(ProcessPoolExecutor, "submit", watched)
    check_same(index, run)
    assert len(asked) == 2


@pytest.mark.parametrize("error", [OSError("no more processes"), NotImplementedError(), BrokenProcessPool()])
def test_where_no_process_can_be_started_a_long_log_is_read_in_this_one(index, tmp_path, monkeypatch, error):
    run = write_run(tmp_path / "run", 300)
    monkeypatch.setattr(log_lines, "READ_APART_BYTES", (run / "events.jsonl").stat().st_size // 3)
    monkeypatch.setattr(log_lines, "usable_cpus", lambda: 8)

    def refused(*arguments):
        raise error

    monkeypatch.setattr(ProcessPoolExecutor, "submit", refused)
    check_same(index, run)


def test_a_number_beyond_any_float_damages_its_line_alone(index, tmp_path):
    run = write_run(tmp_path / "run", 20, ended=False)
    with open(run / "events.jsonl", "a") as log:
        log.write(line_of(21).replace('"loss": ', f'"loss": 1{"0" * 400}, "was": '))
    assert index.series(run)["step"].tolist() == list(range(1, 21))
    assert "is damaged" in index.series(run).damaged


@pytest.mark.parametrize("how", ["another inode", "shorter", "same length"])
def test_a_log_that_was_written_anew_is_read_anew(index, tmp_path, how):
    run = write_run(tmp_path / "run", 50)
    check_same(index, run)
    log = run / "events.jsonl"
    text = log.read_text()
    if how == "another inode":
        other = tmp_path / "other"
        other.write_text(text.replace("0.001", "0.002"))
        os.replace(other, log)
    elif how == "shorter":
        log.write_text("".join(text.splitlines(keepends=True)[:10]))
    else:
        log.write_text(text.replace("1000", "2000") if "1000" in text else text.replace("0.06", "0.07"))
    check_same(index, run)


def test_a_damaged_line_is_left_out_and_said(index, tmp_path):
    run = write_run(tmp_path / "run", 10)
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    lines[3] = lines[3][:50] + "\n"
    (run / "events.jsonl").write_text("".join([*lines, "[1]\n"]))
    series = index.series(run)
    assert series["step"].tolist() == [1, *range(3, 11)]
    assert "damaged" in series.damaged


def test_a_damaged_index_is_made_anew(index, tmp_path):
    run = write_run(tmp_path / "run", 10)
    check_same(index, run)
    index.file.write_bytes(b"no database" * 1000)
    check_same(Index(index.file), run)


def test_a_run_without_a_log_has_no_steps(index, tmp_path):
    assert index.series(tmp_path).steps.shape[0] == 0
    (tmp_path / "events.jsonl").symlink_to("/etc/passwd")
    assert index.series(tmp_path).end == 0


@pytest.mark.parametrize("ended", [True, False])
def test_the_line_of_a_list_is_that_of_runs_list(index, tmp_path, ended):
    run = write_run(tmp_path / "run", 20, ended=ended)
    assert index.summaries([run]) == {}
    expected = summarise(RunFolder(run))
    for found in (index.summary(run), index.summaries([run])[run]):
        assert {name: getattr(found, name) for name in vars(expected)} == pytest.approx(vars(expected))
    with open(run / "events.jsonl", "a") as log:
        log.write(line_of(21))
    assert index.summaries([run]) == {}
    assert index.summary(run).step == 21
