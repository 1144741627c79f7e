"""Alerts: a command and a web address are told of failure, stall, NaN and end, whatever becomes of the trainer."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from driver import TINY
from powertrain.launch import alerts
from powertrain.launch.alerts import Alert, Teller, Watch, checked, follow
from powertrain.records import WrongUse
from powertrain.records.event_log import EventLog
from powertrain.records.events import End, Evaluated, Event, Resume, Start, Step

SECRET = "t0ken-nobody-may-see"
WITHIN_S = 120


@pytest.fixture
def hook() -> Iterator[SimpleNamespace]:
    """A local web address: `told` are the bodies that came, `codes` the answers that it gives first, else 200."""
    found = SimpleNamespace(told=[], codes=[], asked=[])

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.asked.append((self.path, self.headers.get("Authorization")))
            code = found.codes.pop(0) if found.codes else 200
            if code == 200:
                found.told.append(body)
            self.send_response(code)
            if code == 302:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found.address = f"http://127.0.0.1:{server.server_port}/hook/{SECRET}?key={SECRET}"
    found.with_user = f"http://me:{SECRET}@127.0.0.1:{server.server_port}/"
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "WAIT_S", 0.01)


def step(number: int, at: float, loss: float = 2.0) -> Step:
    return Step(step=number, time=at, loss=loss, tokens=1, real_tokens=1, seconds=0.1, learning_rate=1e-3, grad_norm=1.0)


def kinds(events: list[Event], *, since: float = 0.0) -> list[str]:
    """What a follower tells of these events, and of the end after them."""
    watch = Watch(Alert("", "runs/one", since=since))
    return [kind for event in events for kind, _ in watch.take(event)] + [kind for kind, _ in watch.end()]


NAN = {"kind": "loss_not_finite"}
OCCASIONS = {
    "end": [Start(time=1, total_steps=9), step(1, 2), End(time=3, step=1, reason="finished")],
    "failure": [Start(time=1, total_steps=9), step(1, 2), End(time=3, step=1, reason="failed", message="no room")],
    "nan": [Start(time=1, total_steps=9), step(1, 2), End(time=3, step=1, reason="failed", error=NAN, message="not finite")]}


class TestOccasions:
    @pytest.mark.parametrize("kind", OCCASIONS)
    def test_an_end_is_told_as_what_it_is(self, kind: str) -> None:
        assert kinds(OCCASIONS[kind]) == [kind]

    def test_a_run_without_an_end_was_killed(self) -> None:
        watch = Watch(Alert("", "runs/one", pid=4711))
        for event in (Start(total_steps=9), step(4, 2)):
            assert not list(watch.take(event))
        assert list(watch.end()) == [("failure", "process 4711 is gone; runs/one stopped at step 4 of 9; continue with: "
                                                 "powertrain train --resume runs/one")]

    def test_a_nan_is_told_once_and_the_failure_after_it_as_one(self) -> None:
        events = [Start(time=1), Evaluated(time=2, loss=float("nan"), tokens=1), step(1, 3, loss=float("inf")),
                  End(time=4, reason="failed", error=NAN)]
        assert kinds(events) == ["nan", "failure"]

    def test_what_happened_before_is_no_news(self) -> None:
        before = [*OCCASIONS["nan"], Resume(time=10), step(2, 11)]
        assert kinds([*before, End(time=12, reason="finished")], since=9.0) == ["end"]
        assert kinds(OCCASIONS["end"], since=9.0) == []

    def test_a_stall_is_a_silence_five_times_as_long_as_the_longest_pause(self) -> None:
        watch = Watch(Alert("", "runs/one", stall_s=10))
        for event in (Start(time=0), step(1, 600), step(2, 602), step(3, 632)):      # the first step compiled
            list(watch.take(event))
        assert not list(watch.silence(632 + 149))
        [(kind, sentence)] = watch.silence(632 + 151)
        assert kind == "stall"
        assert "at step 3: nothing was written for 151 s, the longest pause before was 30.0 s" in sentence

    def test_a_first_step_has_more_time_and_an_end_no_stall(self) -> None:
        watch = Watch(Alert("", "runs/one"))
        list(watch.take(Start(time=1)))
        assert not list(watch.silence(1700))
        assert list(watch.silence(1900))
        list(watch.take(End(time=2, reason="finished")))
        assert not list(watch.silence(1e6))

    def test_the_pause_before_a_continuation_counts_for_nothing(self) -> None:
        watch = Watch(Alert("", "runs/one", stall_s=10))
        for event in (Start(time=0), step(1, 1), Resume(time=9000), step(2, 9001)):
            list(watch.take(event))
        assert list(watch.silence(9012))


class TestFollowing:
    def run(self, tmp_path: Path, events: list[Event]) -> EventLog:
        log = EventLog(tmp_path / "events.jsonl")
        for event in events:
            log.write(event)
        log.flush()
        return log

    @pytest.mark.parametrize("kind", OCCASIONS)
    def test_an_address_and_a_command_get_the_facts(self, tmp_path: Path, hook: SimpleNamespace, kind: str) -> None:
        self.run(tmp_path, OCCASIONS[kind])
        follow(Alert(hook.address, str(tmp_path)), lambda: True)
        [told] = hook.told
        assert told["run"] == str(tmp_path)
        assert (told["event"], told["step"], told["text"]) == (kind, 1, told["sentence"])
        says = {"end": "finished at step 1", "failure": "failed after step 1: no room", "nan": "not finite"}
        assert says[kind] in told["text"]
        assert told["host"]
        follow(Alert(f"sh -c 'cat > {tmp_path}/told'", str(tmp_path)), lambda: True)
        assert json.loads((tmp_path / "told").read_text()) | {"text": told["text"]} == told

    def test_a_stall_is_told_once_and_again_after_the_run_went_on(self, tmp_path: Path, hook: SimpleNamespace) -> None:
        log = self.run(tmp_path, [Start(total_steps=9), step(1, time.time())])
        over, word = threading.Event(), f"sh -c 'echo $POWERTRAIN_EVENT >> {tmp_path}/told'"
        threading.Thread(target=follow, args=(Alert(word, str(tmp_path), stall_s=0.6), over.is_set)).start()
        follower = threading.Thread(target=follow, args=(Alert(hook.address, str(tmp_path), stall_s=0.6), over.is_set))
        follower.start()
        wait_for(lambda: len(hook.told) == 1)
        time.sleep(1.2)
        assert [told["event"] for told in hook.told] == ["stall"]
        log.write(step(2, time.time()))
        log.flush()
        wait_for(lambda: len(hook.told) == 2 and (tmp_path / "told").read_text().count("stall") == 2)
        over.set()
        follower.join(WITHIN_S)
        assert [told["event"] for told in hook.told] == ["stall", "stall", "failure"]
        wait_for(lambda: (tmp_path / "told").read_text().split() == ["stall", "stall", "failure"])

    def test_an_end_counts_after_a_while_and_a_new_start_of_the_same_process_is_followed(
            self, tmp_path: Path, hook: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(alerts, "SETTLED_S", 0.5)
        log = self.run(tmp_path, OCCASIONS["failure"])
        over = threading.Event()
        follower = threading.Thread(target=follow, args=(Alert(hook.address, str(tmp_path)), over.is_set))
        follower.start()
        wait_for(lambda: len(hook.told) == 1)
        time.sleep(1.2)
        for event in (Resume(step=1, total_steps=9), step(2, time.time()), End(step=2, reason="finished")):
            log.write(event)
        log.flush()
        over.set()
        follower.join(WITHIN_S)
        assert [told["event"] for told in hook.told] == ["failure", "end"]

    def test_a_damaged_line_and_a_deleted_run_are_passed_over(self, tmp_path: Path, hook: SimpleNamespace) -> None:
        log = self.run(tmp_path, [Start(total_steps=9), step(1, time.time())])
        with open(log.path, "a") as file:
            file.write('{"event": "step"}\n{"event": "end", "reason": "finished", "step": 1, "time": 5}\n{"torn')
        calls = iter([False, True])
        follow(Alert(hook.address, str(tmp_path)), lambda: next(calls))
        follow(Alert(hook.address, str(tmp_path / "gone")), lambda: True)
        assert [told["event"] for told in hook.told] == ["end", "failure"]


class TestDelivering:
    def test_a_command_gets_the_facts_as_variables_and_on_its_input(self, tmp_path: Path) -> None:
        (tmp_path / "note.py").write_text(
            "import json, os, sys\nprint(json.dumps([sys.argv[2], json.load(sys.stdin), {k: v for k, v in os.environ.items() "
            "if k.startswith('POWERTRAIN_')}]), file=open(sys.argv[1], 'w'))")
        word = f"{sys.executable} {tmp_path}/note.py {tmp_path}/told \"two $HOME;words\""
        Teller(checked(word))(("stall", "it\nstands\0"), 7)
        argument, body, variables = json.loads((tmp_path / "told").read_text())
        assert argument == "two $HOME;words"             # no shell has read it
        assert (body["event"], body["sentence"], body["step"]) == ("stall", "it stands", 7)
        assert {variables[f"POWERTRAIN_{name.upper()}"] for name in body} == {str(value) for value in body.values()}

    def test_a_user_in_the_address_becomes_a_header(self, hook: SimpleNamespace) -> None:
        Teller(Alert(hook.with_user))(("end", "done"), 1)
        assert hook.asked == [("/", f"Basic {base64.b64encode(f'me:{SECRET}'.encode()).decode()}")]

    def test_it_is_tried_three_times(self, hook: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
        hook.codes = [500, 503]
        Teller(Alert(hook.address))(("end", "done"), 1)
        assert len(hook.told) == 1
        assert not capfd.readouterr().err

    @pytest.mark.parametrize(("codes", "says"), [([404] * 9, "code 404"), ([302] * 9, "code 302")])
    def test_what_fails_is_said_once_and_without_the_address(
            self, hook: SimpleNamespace, capfd: pytest.CaptureFixture[str], codes: list[int], says: str) -> None:
        hook.codes = codes
        tell = Teller(Alert(hook.address, "runs/one"))
        tell(("stall", "x"), 1)
        tell(("end", "y"), 2)
        said = capfd.readouterr().err
        assert len(hook.asked) == 6
        assert said.count("\n") == 1
        assert says in said
        assert SECRET not in said

    @pytest.mark.parametrize("word", [
        f"http://127.0.0.1:1/{SECRET}", f"https://me:{SECRET}@127.0.0.1:1/", f"http://nowhere.invalid/{SECRET}",
        f"{sys.executable} -c 'import sys; sys.exit(3)' {SECRET}"])
    def test_nothing_that_fails_shows_the_secret(self, word: str, capfd: pytest.CaptureFixture[str]) -> None:
        Teller(checked(word))(("end", "done"), 1)
        said = capfd.readouterr().err
        assert "was not delivered" in said
        assert SECRET not in said

    @pytest.mark.parametrize("word", [
        "", " ", f"no-such-program {SECRET}", f"sh -c '{SECRET}", f"ftp://host/{SECRET}", f"file:///{SECRET}",
        f"https:///{SECRET}", f"http://host:port/{SECRET}", f"https://[::{SECRET}/"])
    def test_what_cannot_be_told_is_refused_before_the_training(self, word: str) -> None:
        with pytest.raises(WrongUse, match="--alert") as refused:
            checked(word)
        assert SECRET not in str(refused.value)


# ------------------------------------------------------------------------------------------------ a real trainer


def wait_for(what: Any) -> None:
    until = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


def trainer(cache: Path, folder: Path, words: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "powertrain", "train", *TINY, f"data={folder}/data.txt", "--output", f"{folder}/run",
         *words],
        env=os.environ | {"POWERTRAIN_CACHE": str(cache)} | environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, cwd=folder)


def followers() -> list[str]:
    """The command lines and environments of processes that send alerts."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text()
            found += [words] if "powertrain.launch.alerts" in words else []
        except OSError:
            pass
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.txt").write_text("the cat sat on the mat and ran away from the dog\n" * 60)
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_a_killed_trainer_is_told_by_a_process_that_outlives_it_and_ends(
        cache: Path, folder: Path, hook: SimpleNamespace) -> None:
    process = trainer(cache, folder, ["max_steps=1000000", "logging_steps=1"], POWERTRAIN_ALERT=hook.address)
    events = folder / "run" / "events.jsonl"
    wait_for(lambda: events.is_file() and '"checkpoint"' in events.read_text())
    listed = followers()
    assert listed
    assert not any(SECRET in words for words in listed)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=WITHIN_S)
    wait_for(lambda: hook.told)
    [told] = hook.told
    assert told["event"] == "failure"
    assert f"process {process.pid} is gone" in told["sentence"]
    assert told["step"] >= 4
    wait_for(lambda: len(followers()) < len(listed))
    assert SECRET not in said
    assert not [path for path in (folder / "run").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_run_that_ends_is_told_and_an_alert_that_fails_harms_nothing(
        cache: Path, folder: Path, hook: SimpleNamespace) -> None:
    process = trainer(cache, folder, ["max_steps=2", "--alert", hook.address])
    process.communicate(timeout=WITHIN_S)
    wait_for(lambda: hook.told)
    assert (process.returncode, hook.told[0]["event"], hook.told[0]["step"]) == (0, "end", 2)
    process = trainer(cache, folder, ["max_steps=2", "--output", "other", "--alert", "false"])
    _, said = process.communicate(timeout=WITHIN_S)      # which ends when the follower has let go of stderr
    assert process.returncode == 0
    assert said.count("was not delivered: the command ended with code 1") == 1
