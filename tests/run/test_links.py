"""The link between the processes of a run: what is measured is what a plan expects, and it is found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from powertrain.cost.collectives import ALL_REDUCE, WHOLE, Collectives
from powertrain.records import Facts, PeerLink
from powertrain.run import links
from powertrain.run.links import keep_link, links_file, measure_link, with_links
from powertrain.shapes import BUCKET_BYTES
from powertrain.training.ranks import Ranks

LINK = PeerLink(1e-4, 2e9)


@pytest.mark.parametrize("world", [2, 5])
def test_the_plan_expects_of_a_sum_the_time_that_was_measured(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.004, 0.002, 0.003, 0.005, 0.009, 0.06, 0.05, 0.07, 0.09, 0.08])
    monkeypatch.setattr(links, "seconds_of", lambda work, device: next(times))
    link = measure_link(Ranks(0, world), "cpu")
    seconds = [Collectives(ALL_REDUCE, 1, nbytes, WHOLE, world).seconds(link) for nbytes in (0, BUCKET_BYTES)]
    assert seconds == pytest.approx([0.002, 0.05])


def test_a_link_is_kept_for_runs_of_as_many_processes_on_as_many_machines(facts: Facts, tmp_path: Path) -> None:
    two = replace(facts.hardware, fingerprint="here", processes=2)
    others = replace(two, processes=4), replace(two, nodes=2), replace(two, fingerprint="there")
    keep_link(tmp_path, two, LINK)
    assert dict(with_links(two, tmp_path).links) == {WHOLE: LINK}
    assert "links" in with_links(two, tmp_path).sources
    assert not any(with_links(other, tmp_path).links for other in others)
    keep_link(tmp_path, others[0], PeerLink(1.0, 1.0))
    assert dict(with_links(two, tmp_path).links) == {WHOLE: LINK}


@pytest.mark.parametrize("text", ["", "[]", "[3]", "{", '{"2 processes on 1 machines": {"latency": 1}}',
                                  '{"2 processes on 1 machines": 3}'])
def test_a_broken_file_is_no_link_and_is_written_anew(facts: Facts, tmp_path: Path, text: str) -> None:
    two = replace(facts.hardware, fingerprint="here", processes=2)
    file = links_file(tmp_path, "here")
    file.parent.mkdir()
    file.write_text(text)
    assert not with_links(two, tmp_path).links
    keep_link(tmp_path, two, LINK)
    assert dict(with_links(two, tmp_path).links) == {WHOLE: LINK}


def test_a_cache_that_cannot_be_written_ends_no_run(facts: Facts, tmp_path: Path) -> None:
    (tmp_path / "links").write_text("a file")
    keep_link(tmp_path, facts.hardware, LINK)
