"""Alerts: a command or a web address is told of a run's failure, stall, NaN and end, by a process that outlives the trainer.

The command or address may hold a secret. It comes through a pipe, and stands in no message, no file and no list of processes.
"""

import base64
import contextlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from http.client import HTTPException
from pathlib import Path
from socket import gethostname
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit

from powertrain.records import WrongUse
from powertrain.records.event_log import POLL_S, EventReader
from powertrain.records.events import End, Evaluated, Event, Start, Step
from powertrain.records.timeline import is_finite

STALLED_TIMES = 5            # the longest pause between two events so far: a run that is silent for longer has stalled, ...
STALL_S = 300.0              # ... but not before this, ...
FIRST_STEP_S = 1800.0        # ... and before a first step, which may compile, not before this
TRIES, WAIT_S = 3, 2.0       # of a delivery, and before the second one; before the third one twice as long
ANSWER_S, COMMAND_S = 15, 60 # that an address and a command have
SETTLED_S = 60               # without a new start, after which an end counts though the trainer's process lives
HANDLERS = [getattr(urllib.request, f"{name}Handler") for name in ("Proxy", "HTTP", "HTTPS", "HTTPDefaultError")] + [
    urllib.request.HTTPErrorProcessor]
NOT_FINITE = ("loss_not_finite", "weights_not_finite")           # kinds of errors of an `end`

Occasion = tuple[str, str]   # "failure", "stall", "nan" or "end", and the sentence


@dataclass(frozen=True)
class Alert:
    word: str                                # a command or an address
    run: str = ""                            # its folder
    stall_s: float = STALL_S
    pid: int | None = None                   # of the trainer, as far as it is known
    since: float = 0.0                       # time of day: what happened before is no news


def checked(word: str) -> Alert:
    """Raise WrongUse for what is neither an http address nor a command of this machine. The message does not repeat it."""
    with contextlib.suppress(ValueError):    # quotes that are not closed, a port that is no number
        if not _is_address(word) and (words := shlex.split(word)) and shutil.which(words[0]):
            return Alert(word)
        parts = urlsplit(word)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return Alert(word)
    raise WrongUse("--alert needs an address with https:// or http://, or a command that is on this machine; for pipes and "
                   "variables use sh -c '...'")


def start(alert: Alert) -> subprocess.Popen[str] | None:
    """Start the process that follows the run of this process. It gets no signal of the terminal, and ends by itself."""
    alert = replace(alert, pid=os.getpid(), since=time.time())
    try:
        follower = subprocess.Popen([sys.executable, "-m", "powertrain.launch.alerts"], stdin=subprocess.PIPE, text=True,
                                    stdout=subprocess.DEVNULL, start_new_session=True)
        assert follower.stdin is not None
        with follower.stdin as pipe:
            json.dump(asdict(alert), pipe)
        return follower
    except OSError as error:                 # which harms no run
        print(f"powertrain: no alerts of {alert.run} will be sent: {error.strerror}", file=sys.stderr, flush=True)
        return None


# ------------------------------------------------------------------------------------------------ following


class Watch:
    """Turns a run's events, and its silence, into occasions."""

    def __init__(self, alert: Alert):
        self.alert, self.start, self.last = alert, Start(), Event(time=0.0)
        self.step, self.longest_s = 0, 0.0
        self.stepped = self.had_nan = False  # in this session

    def take(self, event: Event) -> Iterator[Occasion]:
        if isinstance(event, Start):         # the pause before it is nobody's
            self.start, self.step, self.stepped, self.had_nan = event, event.step, False, False
        elif self.stepped:
            self.longest_s = max(self.longest_s, event.time - self.last.time)
        self.last = event
        if isinstance(event, (Step, Evaluated)):
            self.step, self.stepped = event.step, True
            if not self.had_nan and not is_finite(event.loss):
                self.had_nan = True
                which = "loss" if isinstance(event, Step) else "held-out loss"
                yield from self._news("nan", f"the {which} of step {event.step:,} of {self.alert.run} is {event.loss}")

    def _news(self, kind: str, sentence: str) -> Iterator[Occasion]:
        if self.last.time >= self.alert.since:
            yield kind, sentence

    def silence(self, now: float) -> Iterator[Occasion]:
        """Yield a stall, as long as it lasts."""
        patience_s = max(self.alert.stall_s, STALLED_TIMES * self.longest_s if self.stepped else FIRST_STEP_S)
        if self.last.time and not isinstance(self.last, End) and (silent_s := now - self.last.time) > patience_s:
            yield "stall", (f"{self.alert.run} has stalled at step {self.step:,}: nothing was written for {silent_s:,.0f} s, "
                            f"the longest pause before was {self.longest_s:,.1f} s; kill -INT {self.alert.pid or 'PID'} asks "
                            "the run to save and stop")

    def end(self) -> Iterator[Occasion]:
        """Yield how the run ended; without an `end`, its process was killed."""
        run, end = self.alert.run, self.last
        again = f"; continue with: powertrain train --resume {run}"
        if not isinstance(end, End):
            process = f"process {self.alert.pid}" if self.alert.pid else "its process"
            yield "failure", f"{process} is gone; {run} stopped at step {self.step:,} of {self.start.total_steps:,}{again}"
        elif end.reason == "failed":
            is_nan = end.error.get("kind") in NOT_FINITE and not self.had_nan
            yield from self._news("nan" if is_nan else "failure", f"{run} failed after step {self.step:,}: {end.message}")
        else:
            more = "" if end.reason == "finished" else again
            yield from self._news("end", f"{run} {end.state} at step {end.step:,}{more}")


def follow(alert: Alert, is_over: Callable[[], bool]) -> None:
    """Tell of each occasion until the run is over."""
    watch, tell, reader = Watch(alert), Teller(alert), EventReader(Path(alert.run) / "events.jsonl")
    told, read_s = (0, False), time.monotonic()
    while True:
        over = is_over()                     # asked before reading: what was written until then is read
        for event in reader.read_whole()[0]:
            read_s = time.monotonic()
            for occasion in watch.take(event):
                tell(occasion, watch.step)
        ended = over or (isinstance(watch.last, End) and time.monotonic() - read_s > SETTLED_S)
        for occasion in watch.end() if ended else watch.silence(time.time()):
            if told != (now := (id(watch.last), ended)):             # no second time before something happens
                tell(occasion, watch.step)
            told = now
        if over:
            return
        time.sleep(POLL_S)


# ------------------------------------------------------------------------------------------------ delivering


class Teller:
    """Delivers occasions, and says once on stderr that this fails."""

    def __init__(self, alert: Alert):
        self.alert, self.failed = alert, False

    def __call__(self, occasion: Occasion, step: int) -> None:
        sentence = " ".join(occasion[1].replace("\0", " ").split())
        body: dict[str, str | int] = {"run": self.alert.run, "event": occasion[0], "sentence": sentence, "step": step,
                                      "host": gethostname()}
        why = None
        for attempt in range(TRIES):
            time.sleep(WAIT_S * attempt * random.uniform(0.5, 1.5))
            if (why := _delivered(self.alert.word, body)) is None:
                return
        if not self.failed:
            self.failed = True
            with contextlib.suppress(OSError):           # the terminal may be gone
                print(f"powertrain: the alert ({occasion[0]}) of {self.alert.run} was not delivered: {why}", file=sys.stderr)


def _is_address(word: str) -> bool:
    return "://" in (word.split() or [""])[0]


def _delivered(word: str, body: dict[str, str | int]) -> str | None:
    """Return None, or why not: in words of this file and of the system only, as a library's may repeat the address."""
    try:
        if _is_address(word):
            _post(word, body)
            return None
        told = {f"POWERTRAIN_{name.upper()}": str(value) for name, value in body.items()}
        done = subprocess.run(shlex.split(word), input=json.dumps(body), env={**os.environ, **told}, text=True, check=False,
                              stdout=subprocess.DEVNULL, timeout=COMMAND_S)
        return f"the command ended with code {done.returncode}" if done.returncode else None
    except HTTPError as error:
        return f"the address answered with code {error.code}"
    except subprocess.TimeoutExpired:
        return f"the command did not end within {COMMAND_S} s"
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        return (reason.strerror if isinstance(reason, OSError) else None) or type(reason).__name__


def _post(address: str, body: dict[str, str | int]) -> None:
    parts = urlsplit(address)
    user, _, host = parts.netloc.rpartition("@")
    known = {"Authorization": f"Basic {base64.b64encode(unquote(user).encode()).decode()}"} if user else {}
    request = urllib.request.Request(
        parts._replace(netloc=host, fragment="").geturl(), json.dumps({**body, "text": body["sentence"]}).encode(),
        {"Content-Type": "application/json", "User-Agent": "powertrain", **known})       # chats such as Slack show `text`
    opener = urllib.request.OpenerDirector()             # one that follows no redirect: another address is not the user's
    for handler in HANDLERS:
        opener.add_handler(handler())
    if (answer := opener.open(request, timeout=ANSWER_S)) is not None:
        answer.close()


if __name__ == "__main__":
    asked = Alert(**json.load(sys.stdin))
    follow(asked, lambda: os.getppid() != asked.pid)     # a process that loses its parent gets another one at once
