"""What users, terminals and machines do to a run: signals, a closed terminal, two commands at once, little memory, clocks."""

from __future__ import annotations

import random
import signal
import time

import pytest
from forked import Commands
from layer import HUNG_UP, JUMPS, PAUSED, STOPPED
from runs import AGAIN, RUN, Count, Few, World, check_ended, check_recovered

from powertrain.records.event_log import read_all_events
from powertrain.records.events import Resume, Start


def places(world: World) -> range:
    """Return calls all through a run."""
    return range(1, world.calls + 1, 5)


@pytest.mark.parametrize("part", range(3))
def test_sigterm_at_any_call_stops_and_saves_and_goes_on_to_the_same_bytes(world: World, few: Few, count: Count, part: int
                                                                           ) -> None:
    tried = few(places(world)[part::3], 1)
    for call in tried:
        folder = world.folder("signal")
        ended = world.run(RUN, folder, fault=STOPPED.at(call, folder / "run"))
        print(call, ended.code)
        check_ended(ended, folder / "run", (0, 75, -signal.SIGTERM))     # -15: before or after the run itself
        check_recovered(world, folder)
    count("SIGTERM", len(tried))


def test_two_interrupts_end_a_run_at_once_and_lose_nothing(world: World, few: Few, count: Count) -> None:
    tried = few([0.05 * step for step in range(2, 14)], 2)
    for pause_s in tried:
        folder = world.folder("interrupts")
        ended = world.run((*RUN, "max_steps=2000"), folder,
                          signals=[(pause_s, signal.SIGINT), (0.7, signal.SIGINT)])
        print(pause_s, ended.code)
        # 130: the second one ended it; 75: it had stopped and saved before; 1: before the run began; -2: before or after
        assert ended.code in (1, 75, 130, -signal.SIGINT), ended.said[-2000:]
        if (folder / "run" / "events.jsonl").exists():
            check_ended(ended, folder / "run", (1, 75, 130, -signal.SIGINT))
    count("two SIGINT", len(tried))


def test_a_paused_run_goes_on_as_if_nothing_had_been(world: World, few: Few, count: Count) -> None:
    tried = few(places(world)[::4], 1)
    for call in tried:
        folder = world.folder("paused")
        ended = world.run(RUN, folder, fault=PAUSED.at(call, folder / "run"), signals=[(3.0, signal.SIGCONT)])
        check_ended(ended, folder / "run", (0,))
        check_recovered(world, folder)
    count("SIGSTOP and SIGCONT", len(tried))


def test_a_terminal_that_hangs_up_loses_nothing(world: World, few: Few, count: Count) -> None:
    tried = few(places(world)[::4], 1)
    for call in tried:
        folder = world.folder("terminal")
        check_ended(world.run(RUN, folder, fault=HUNG_UP.at(call, folder / "run")), folder / "run", (0, 75, -signal.SIGHUP))
        check_recovered(world, folder)
    count("SIGHUP", len(tried))


def test_a_run_whose_output_nobody_reads_goes_on_to_its_end(world: World, count: Count) -> None:
    folder = world.folder("closed")
    ended = world.run(RUN, folder, closed=(1, 2))
    assert ended.code == 0, ended
    check_recovered(world, folder)
    count("closed terminal", 1)


@pytest.mark.parametrize("kind", JUMPS, ids=lambda kind: kind.words)
def test_a_clock_that_jumps_changes_nothing(world: World, few: Few, count: Count, kind: object) -> None:
    tried = few(places(world)[::4], 1)
    for call in tried:
        folder = world.folder("clock")
        check_ended(world.run(RUN, folder, fault=kind.at(call, folder / "run")), folder / "run", (0,))  # type: ignore[attr-defined]
        check_recovered(world, folder)
    count(kind.words, len(tried))            # type: ignore[attr-defined]


def test_little_memory_is_a_sentence_and_the_run_goes_on_later(world: World, few: Few, count: Count) -> None:
    tried = few([6000 + 40 * step for step in range(12)], 1)
    for mebibytes in tried:
        folder = world.folder("memory")
        ended = world.run(RUN, folder, limits={"RLIMIT_DATA": mebibytes << 16})
        print(mebibytes, ended.code)
        check_ended(ended, folder / "run", (0, 1, 2, 3))
        check_recovered(world, folder)
    count("memory limits", len(tried))


def test_of_two_commands_on_one_run_one_trains_and_the_other_refuses(world: World, few: Few, count: Count) -> None:
    tried = few(range(8), 1)
    with Commands(world.cache) as other:
        other.run(("--help",), world.folder("help"), within_s=120)
        for seed in tried:
            folder = world.folder("shared")
            beside = world.folder("beside")
            words = (*RUN[:-1], str(folder / "run"), "--continue")
            world.commands.begin(words, folder, within_s=120)
            time.sleep(random.Random(seed).uniform(0.05, 0.4))
            second = other.run(words, beside, within_s=120)
            first = world.commands.end()
            codes = {first.code, second.code}
            print(seed, first.code, second.code)
            assert codes in ({0, 2}, {0}), (first.said[-1000:], second.said[-1000:])
            refused = first if first.code == 2 else second
            if 2 in codes:
                said = ("another process is training in", "already holds a run")
                assert any(words in refused.said for words in said), refused.said
            began = [event for event in read_all_events(folder / "run" / "events.jsonl") if isinstance(event, (Start, Resume))]
            assert len(began) == 1 or codes == {0}       # one after the other: the second found the first one's end
            check_recovered(world, folder, AGAIN)
    count("two commands on one run", len(tried))
