"""How a process finds its place among those of its run, and what it says where it does not find the others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from powertrain.cli import training
from powertrain.launch import group, local
from powertrain.launch.group import ERROR_FILE, STARTED_BY, TOLD, WITHIN, Place, place_of, without_place
from powertrain.records import WrongUse
from powertrain.records.errors import LostPeer
from powertrain.training.stalls import watching

SOON = timedelta(seconds=1)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket that holds the port at which the processes are told to meet; nobody listens until the test does."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(held.getsockname()[1]))
        monkeypatch.setenv("WORLD_SIZE", "2")
        yield held


def meet(monkeypatch: pytest.MonkeyPatch, rank: int) -> str:
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(WrongUse) as refused:
        group._meet(Place(rank, 2, rank, 2), SOON)
    return str(refused.value)


TOLD_WHOLE = dict(zip(TOLD, ("5", "8", "1", "4", "host", "29500"), strict=True))


def test_a_place_is_told_whole_or_not_at_all() -> None:
    told = TOLD_WHOLE
    assert place_of({"HOME": "/", **told}) == Place(5, 8, 1, 4)
    assert place_of({name: value for name, value in told.items() if name != "RANK"}) is None
    assert without_place({"HOME": "/", STARTED_BY: "1", **told}) == {"HOME": "/"}


@pytest.mark.parametrize(("name", "value", "said"), [
    ("RANK", "abc", "RANK=abc is no number"), ("RANK", "-1", "RANK=-1 is no number"),
    ("LOCAL_RANK", "", "LOCAL_RANK= is no number"), ("RANK", "8", "RANK=8 does not go with WORLD_SIZE=8"),
    ("WORLD_SIZE", "0", "RANK=5 does not go with WORLD_SIZE=0"),
    ("LOCAL_RANK", "4", "LOCAL_RANK=4 does not go with LOCAL_WORLD_SIZE=4"),
    ("MASTER_PORT", "abc", "MASTER_PORT=abc is no number"), ("MASTER_PORT", "65536", "MASTER_PORT=65536 is no port"),
    ("MASTER_PORT", "0", "MASTER_PORT=0 is no port")])
def test_a_place_that_cannot_be_is_refused_with_its_variable(name: str, value: str, said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        place_of({**TOLD_WHOLE, name: value})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_process_whose_starter_has_died_already_does_not_train() -> None:
    try:
        with pytest.raises(SystemExit) as ended:
            group.end_with_parent({STARTED_BY: str(os.getpid())})        # and not of its parent
        assert ended.value.code == 128 + signal.SIGTERM
        group.end_with_parent({STARTED_BY: str(os.getppid())})
        group.end_with_parent({})            # of torchrun nobody has said which process it is
    finally:
        ctypes.CDLL(None).prctl(group.PARENT_DEATH_SIGNAL, 0)


def test_torch_is_loaded_after_it_is_told_not_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "end_with_parent", lambda environment: None)
    for name, value in zip(TOLD, ("0", "2", "0", "2", "host", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(group.TORCH_SAYS, "")
    monkeypatch.delenv(group.TORCH_SAYS)
    assert training._place(1) == Place(0, 2, 0, 2)       # before `train` imports what needs torch
    assert os.environ.pop(group.TORCH_SAYS) == "ERROR"
    for name in TOLD:
        monkeypatch.delenv(name)
    assert training._place(1) is None                    # of one process it would warn in the midst of the steps
    assert os.environ[group.TORCH_SAYS] == "ERROR"


def test_one_process_of_all_prepares_first_then_one_of_each_machine() -> None:
    assert [Place(rank, 8, rank % 4, 4).prepares_after for rank in range(8)] == [None, 0, 0, 0, 0, 4, 4, 4]


def test_a_port_that_another_program_holds_is_named(port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port.listen()
    assert meet(monkeypatch, 0).endswith("is taken by another program; set MASTER_PORT to a free port in every process")


def test_a_first_process_that_cannot_be_reached_is_named(port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    began_s = time.monotonic()
    assert meet(monkeypatch, 1).startswith("process 1 does not reach the first process at port ")
    assert time.monotonic() - began_s < 1.4 * SOON.total_seconds()       # as the sentence says


def test_processes_that_do_not_come_are_counted(port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port.close()
    assert meet(monkeypatch, 0).startswith("not all of the 2 processes came to port ")


@pytest.mark.parametrize("told", ["", "soon", "-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(told: str) -> None:
    with pytest.raises(WrongUse, match="is no number of seconds"):
        group._answers_within({WITHIN: told})
    assert group._answers_within({WITHIN: "2.5"}) == timedelta(seconds=2.5)


def test_a_peer_that_ends_while_the_group_is_made_is_lost_and_no_error_of_this_process(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    with pytest.raises(LostPeer), group._telling(Place(1, 2, 1, 2), None):
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    with pytest.raises(RuntimeError, match="of its own"), group._telling(Place(1, 2, 1, 2), None):
        raise RuntimeError("an error of its own")


def test_what_the_first_process_refuses_ends_the_others_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)        # as with srun, which takes the highest code for that of the run
    first = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    second = torch.distributed.TCPStore("127.0.0.1", first.port)

    def lose() -> object:
        with pytest.raises(SystemExit) as ended, group._telling(Place(1, 2, 1, 2), second):
            group._await_prepared(second, [0])
        return ended.value.code

    with ThreadPoolExecutor() as beside:
        lost, began_s = beside.submit(lose), time.monotonic()
        with pytest.raises(WrongUse), group._telling(Place(0, 2, 0, 2), first):
            raise WrongUse("there is no such stage")
        assert lost.result() == WrongUse.exit_code
    assert time.monotonic() - began_s < group.FIRST_SAYS_WITHIN.total_seconds()      # it waits until the others know, no longer


def test_a_process_that_was_slow_and_came_to_the_end_leaves_no_stacks(tmp_path: Path) -> None:
    for _ in range(2):                       # a session that failed, and one that went on
        with contextlib.suppress(LostPeer), watching(tmp_path, 0, 0.01):
            time.sleep(0.1)
            raise LostPeer("gone")
    written = (tmp_path / "stacks" / "rank-0.txt").stat().st_size
    with watching(tmp_path, 0, 0.01), watching(tmp_path, 1, 0.01):
        time.sleep(0.1)
    assert [(path.name, path.stat().st_size) for path in (tmp_path / "stacks").iterdir()] == [("rank-0.txt", written)]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_frozen_process_writes_its_stacks_though_its_watch_is_not_the_first_to_wake(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)     # a thread that is given no time
    written = []
    for _ in range(2):
        with contextlib.suppress(LostPeer), watching(tmp_path, 0, 0.6) as watch:
            time.sleep(0.7)
            if goes_on:
                watch.renew()
            raise LostPeer("gone")
        written.append((tmp_path / "stacks" / "rank-0.txt").read_text())
    assert [text.count("Current thread") for text in written] == [1, 2]      # others may be alive, of other tests


def test_a_process_that_has_told_its_error_was_not_lost_though_another_process_ended_before_it() -> None:
    told = {0: {"message": "stage=4 is none of 1, 2 and 3", "exit_code": 2, "extraInfo": {}}, 1: "To enable traceback see"}
    codes = local._codes({0: -15, 1: LostPeer.exit_code}, told)
    assert local._ended(codes, told) == 2
    assert local._ended(local._codes({0: -15, 1: LostPeer.exit_code}, {0: "Signal 15", 1: ""}), {}) is None


@pytest.mark.parametrize(("codes", "stacks", "says"), [
    ({0: 76, 1: -9}, True, "process 1 was ended by SIGKILL"), ({0: 76, 1: -6}, True, "a process did not answer; "),
    ({0: 76, 1: -15}, False, "a process did not answer"), ({0: -11, 1: -15}, False, "process 0 was ended by SIGSEGV")])
def test_why_processes_ended_is_said_by_the_one_that_was_killed(tmp_path: Path, codes: dict[int, int], stacks: bool, says: str
                                                               ) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank-0.txt").write_text("most recent call first" * stacks)
    assert local._why(codes, tmp_path, 0.0).startswith(says)
