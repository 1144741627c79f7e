"""What several processes gain, and what holds them back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from powertrain.cost.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    PUBLISHED_SHARE,
    REPLICAS,
    SHARDS,
    WHOLE,
    Collectives,
    exchanged_s,
)
from powertrain.cost.sharing import BETWEEN_NODES, BETWEEN_PROCESSES, UNEVEN, WAITING, Sharing, sharing_of
from powertrain.records import NETWORK, NODE, Hardware, PeerLink, UnknownFact

LINK = PeerLink(0.0, 1e9)
HERE = Hardware("a GPU", "cuda", 8, 80 << 30, 79 << 30, processes=4, links={WHOLE: LINK})
SUM = Collectives(ALL_REDUCE, 1, 10**9, WHOLE, 4)                  # 1.5 s over LINK
THERE = Hardware("a GPU", "cuda", 0, 80 << 30, 80 << 30, processes=16, nodes=2, devices=8, basis="published",
                 links={NODE: PeerLink(0.0, 4e11), NETWORK: PeerLink(0.0, 5e10)})


def shared(hardware: Hardware = HERE, own_s: float = 2.0, alone_s: float = 8.0, waiting: float = 0.0, hides: bool = False,
           found: Collectives = SUM) -> Sharing:
    return sharing_of([found], hardware, own_s=(own_s, own_s), alone_s=(alone_s, alone_s), waiting=waiting, hides=hides,
                      longest_part="compute")


def test_a_step_takes_its_own_share_and_the_exchange() -> None:
    found = shared()
    assert found.step_s == pytest.approx((3.5, 3.5))
    assert found.efficiency == pytest.approx((2 / 3.5, 2 / 3.5))
    assert found.held_back_by == "compute"
    assert found.exchanges == "1 all-reduce: 954 MiB"


@pytest.mark.parametrize(("change", "part"), [
    ({"found": replace(SUM, total_bytes=4 * 10**9)}, BETWEEN_PROCESSES), ({"own_s": 6.0, "alone_s": 8.0}, UNEVEN),
    ({"own_s": 9.0, "waiting": 0.7}, WAITING),
    ({"hardware": replace(HERE, nodes=2), "found": replace(SUM, total_bytes=4 * 10**9)}, BETWEEN_NODES)])
def test_what_takes_most_of_a_step_is_named(change: dict[str, object], part: str) -> None:
    assert shared(**change).held_back_by == part                   # type: ignore[arg-type]


def test_what_runs_ahead_of_its_use_may_take_no_time() -> None:
    found = shared(hides=True)
    assert found.step_s == pytest.approx((2.0, 3.5))
    assert found.efficiency == pytest.approx((2 / 3.5, 1.0))


def test_without_a_known_link_nothing_is_said_of_the_gain() -> None:
    found = shared(replace(HERE, links={}))
    assert (found.step_s, found.efficiency, found.held_back_by) == ((2.0, 2.0), None, "")
    assert "not measured" in found.basis
    assert found.exchanges


@pytest.mark.parametrize(("among", "processes", "bytes_per_s"), [
    (SHARDS, 8, 4e11), (REPLICAS, 2, 5e10), (WHOLE, 16, 4e11)])
def test_published_links_are_those_of_the_processes_that_exchange(among: str, processes: int, bytes_per_s: float) -> None:
    """A ring through both nodes leaves each through eight network cards, as fast as the link within."""
    one = Collectives(ALL_GATHER, 1, 10**9, among, processes)
    (low_s, high_s), basis = exchanged_s([one], THERE)
    sent_s = (processes - 1) / processes * 1e9 / bytes_per_s
    assert low_s == pytest.approx(sent_s)
    assert high_s == pytest.approx(sent_s / PUBLISHED_SHARE)
    assert "without the latency of messages" in basis


def test_the_link_of_one_machine_stands_for_all_groups_in_it() -> None:
    one = replace(SUM, among=SHARDS)
    assert exchanged_s([one], HERE)[0] == pytest.approx((1.5, 1.5))
    with pytest.raises(UnknownFact, match="latency and bandwidth between the shards"):
        exchanged_s([one], replace(HERE, nodes=2))


def test_a_machine_without_a_published_network_has_no_time() -> None:
    with pytest.raises(UnknownFact, match="no bandwidth between nodes is published for a GPU"):
        exchanged_s([replace(SUM, among=REPLICAS)], replace(THERE, links={NODE: LINK}))
