"""The stream of a run: all its numbers at once, then what is new, nothing twice and nothing left out."""

import asyncio
import contextlib
import json
import re

import pytest
from runs_written import line_of, write_run

from powertrain.run.folder import RunFolder, locked
from powertrain.web import live
from powertrain.web.guard import COOKIE


async def listen(client, path, *, until, after=lambda messages: None, headers=(), seconds=20.0):
    """Return the messages of a stream as (id, value), up to the first one that `until` likes. `after` acts on each."""
    messages, done = [], asyncio.Event()

    async def receive():
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        for found in re.finditer(r"(?:event: (\w+)\n)?id: (\d+)\ndata: (.*)\n\n", message.get("body", b"").decode()):
            if found[1] != "beat":
                messages.append((int(found[2]), json.loads(found[3])))
                after(messages)
                if until(messages):
                    done.set()

    where, _, query = path.partition("?")
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
             "path": where, "raw_path": where.encode(), "query_string": query.encode(), "root_path": "",
             "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8790), "headers": [
                 (b"host", client.host.encode()), (b"cookie", f"{COOKIE}={client.cookie}".encode()), *headers]}
    await asyncio.wait_for(client.app(scope, receive, send), seconds)
    return messages


def append(run, *lines):
    with open(run / "events.jsonl", "a") as log:
        log.writelines(lines)


def evaluation(step):
    return json.dumps({"event": "evaluation", "time": 1.7e9, "step": step, "loss": step / 100, "tokens": 5}) + "\n"


@pytest.fixture
def training(root, monkeypatch):
    """Yield a run that trains: its lock is held."""
    monkeypatch.setattr(live, "LOOK_S", 0.05)
    run = write_run(root / "runs" / "live", 20, ended=False)
    with locked(RunFolder(run)):
        yield run


def test_all_numbers_come_at_once_and_then_what_changed(client, training):
    def act(messages):
        if len(messages) == 1:
            append(training, line_of(21), evaluation(21))

    first, second = asyncio.run(listen(client, "/runs/live/stream", until=lambda found: len(found) == 2, after=act))
    assert first[1]["fields"]["step"] == "20"
    assert first[1]["fields"]["state"] == "running"
    assert second[1]["fields"]["step"] == "21"
    assert [line.partition("  ")[2] for line in second[1]["lines"]] == ["step 21: held-out loss 0.2100 (5 tokens)"]
    assert second[1]["changed"]
    assert second[0] == (training / "events.jsonl").stat().st_size
    assert client.site.streams.open == 0


def test_numbers_alone_are_told_now_and_then_and_what_happens_at_once(client, training, monkeypatch):
    looks, look = [], live._look
    monkeypatch.setattr(live, "TOLD_S", 1000.0)

    def grow(*args):                         # at each look a step is new
        looks.append(None)
        step = 20 + len(looks)
        append(training, *([line_of(step), evaluation(step)] if len(looks) == 9 else [line_of(step)]))
        return look(*args)

    monkeypatch.setattr(live, "_look", grow)
    first, second = asyncio.run(listen(client, "/runs/live/stream", until=lambda found: len(found) == 2))
    assert first[1]["fields"]["step"] == "21"
    assert second[1]["fields"]["step"] == "29"
    assert second[1]["lines"]


def test_a_tab_that_comes_back_hears_every_line_once(client, training):
    begin, heard, last = (training / "events.jsonl").stat().st_size, [], ""
    written = 20
    for _ in range(4):
        def act(messages):
            nonlocal written
            written += 1
            append(training, line_of(written), evaluation(written))

        headers = [(b"last-event-id", last.encode())] if last else []
        messages = asyncio.run(listen(client, f"/runs/live/stream?since={begin}", after=act, headers=headers,
                                      until=lambda found: len(found) == 3))
        heard += [line for _, value in messages for line in value["lines"]]
        last = str(messages[-1][0])
    told = [int(re.search(r"step (\d+):", line)[1]) for line in heard]
    assert told == list(range(21, 21 + len(told)))
    assert len(told) >= 8


def test_what_is_written_while_a_tab_connects_is_not_told_twice(client, training, monkeypatch):
    begin, since = (training / "events.jsonl").stat().st_size, live._since
    append(training, evaluation(20))

    def late(*args):
        append(training, evaluation(21))     # behind what the first look at the log has read
        return since(*args)

    monkeypatch.setattr(live, "_since", late)
    messages = asyncio.run(listen(client, f"/runs/live/stream?since={begin}", until=lambda found: len(found) == 2))
    assert [re.search(r"step (\d+):", line)[1] for _, value in messages for line in value["lines"]] == ["20", "21"]


def test_a_killed_trainer_is_shown_and_the_stream_says_that_it_is_over(client, root, monkeypatch):
    monkeypatch.setattr(live, "LOOK_S", 0.05)
    run = write_run(root / "runs" / "live", 5, ended=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(RunFolder(run)))
        messages = asyncio.run(listen(client, "/runs/live/stream", until=lambda found: found[-1][1]["ended"],
                                      after=lambda found: stack.close() if len(found) == 1 else None))
    assert not messages[0][1]["ended"]
    assert messages[-1][1]["fields"]["state"] == "killed"
    assert messages[-1][1]["changed"]


def test_only_so_many_tabs_listen_and_the_others_are_told_so(client, training):
    client.site.streams.open = live.MOST_STREAMS
    answer = client.get("/runs/live/stream")
    assert answer.status == 503
    assert "close one of them" in answer.text


@pytest.mark.parametrize("since", ["0", "7", "99999999", "-1", "x", "9" * 40])
def test_any_place_of_the_log_may_be_asked_for(client, training, since):
    messages = asyncio.run(listen(client, f"/runs/live/stream?since={since}", until=len))
    assert messages[0][1]["fields"]["step"] == "20"


def test_what_events_say_cannot_steer_a_terminal(client, training):
    append(training, json.dumps({"event": "sample", "time": 1.7e9, "step": 20, "text": "\x1b[2J\x07red"}) + "\n")
    messages = asyncio.run(listen(client, "/runs/live/stream?since=0", until=len))
    assert any("red" in line for line in messages[0][1]["lines"])
    assert not any("\x1b" in line or "\x07" in line for line in messages[0][1]["lines"])
