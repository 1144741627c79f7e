"""How a process finds its place among those of its run, and what it says where it does not find the others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest

from powertrain.launch import group
from powertrain.launch.group import TOLD, WITHIN, Place, place_of, without_place
from powertrain.records import WrongUse

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


def test_a_place_is_told_whole_or_not_at_all() -> None:
    told = dict(zip(TOLD, ("5", "8", "1", "4", "host", "29500"), strict=True))
    assert place_of({"HOME": "/", **told}) == Place(5, 8, 1, 4)
    assert place_of({name: value for name, value in told.items() if name != "RANK"}) is None
    assert without_place({"HOME": "/", **told}) == {"HOME": "/"}


def test_one_process_of_all_prepares_first_then_one_of_each_machine() -> None:
    assert [Place(rank, 8, rank % 4, 4).prepares_after for rank in range(8)] == [None, 0, 0, 0, 0, 4, 4, 4]


def test_a_port_that_another_program_holds_is_named(port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port.listen()
    assert meet(monkeypatch, 0).endswith("is taken by another program; set MASTER_PORT to a free port in every process")


def test_a_first_process_that_cannot_be_reached_is_named(port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    assert meet(monkeypatch, 1).startswith("process 1 does not reach the first process at port ")


def test_processes_that_do_not_come_are_counted(port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port.close()
    assert meet(monkeypatch, 0).startswith("not all of the 2 processes came to port ")


@pytest.mark.parametrize("told", ["", "soon", "-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(told: str) -> None:
    with pytest.raises(WrongUse, match="is no number of seconds"):
        group._answers_within({WITHIN: told})
    assert group._answers_within({WITHIN: "2.5"}) == timedelta(seconds=2.5)
