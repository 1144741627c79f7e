"""The process that uploads: `python -m powertrain.mirror.process RUN PID`, started by the training, PID, which it never slows.

It has the lowest priority, and takes only what lies in mirror/waiting. On its standard input "end" says that nothing more will
come; the end of that input, or another parent than PID, that the training is gone: it finishes the upload in hand and ends.
Exit code: 0 everything uploaded and verified, 3 something still waits.
"""

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from powertrain.mirror import waiting
from powertrain.mirror.pace import Pace
from powertrain.mirror.shelf import Shelf
from powertrain.mirror.store import Store, cure_of, told
from powertrain.mirror.waiting import ABOUT, EVENTS, FOLDER, LOCK, PACKED, Settings, Waiting, all_waiting, settings_of
from powertrain.records import NotDurable, events
from powertrain.records.errors import DONE
from powertrain.records.event_log import EventLog
from powertrain.records.locks import got_lock
from powertrain.records.priority import lower_process

Listener = Callable[[events.Event], None]

LOOK_EVERY_S = 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0  # between two tries: twice as long each time, by chance up to that
BLOCKED_PAUSE_S = 300.0                      # where a person has to do something first
LAST_TRIES = 6                               # of one set, after the training is over


class Orders:
    """What the training says: whether more will come, and whether it is gone."""

    def __init__(self, trainer: int | None = None, *, over: bool = False) -> None:
        self._changed = threading.Event()
        self._trainer, self._closed = trainer, False     # the parent of this process, where that is the training
        self.over = over                     # nothing more will come

    @property
    def gone(self) -> bool:
        """Whether the training is gone. A process that it has forked, and that outlives it, keeps standard input open."""
        return not self.over and (self._closed or self._trainer not in (None, os.getppid()))

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.over = self.over or line.strip() == "end"
            self._changed.set()
        self._closed = True
        self._changed.set()

    def wait(self, seconds: float) -> None:
        """Wait so long, or until the training says something."""
        self._changed.wait(seconds)
        self._changed.clear()


@dataclass(frozen=True)
class Failure:
    """Why a set is not uploaded, what a person has to do about that, and when it is tried again."""

    why: str
    cure: str | None
    tries: int
    again_s: float


class Uploader:
    """Uploads what waits, one set after the other, and tells what happened in a log of its own."""

    def __init__(self, run: Path, settings: Settings, orders: Orders, listener: Listener = lambda event: None) -> None:
        self.run, self.settings, self.orders, self.listener = run, settings, orders, listener
        self.log = EventLog(run / FOLDER / EVENTS)
        self._shelf: Shelf | None = None
        self._failures: dict[str, Failure] = {}          # by set; "" for the mirror as a whole
        self._rebuilt: set[str] = set()                  # names of sets that were told of

    def work(self) -> bool:
        """Upload until nothing more will come; return whether everything is uploaded."""
        last = False
        while not self.orders.gone:
            if self.orders.over and not last:
                last = True                  # each once more, however long ago it failed
                self._failures.clear()
            over, sets = last, {one.name: one for one in self._wanted()}
            names = list(sets) if self._shelf is not None else [""]
            if over and (not names or all(self._is_given_up(name) for name in names)):
                return not sets
            if (name := next((name for name in names if self._is_due(name)), None)) is None:
                self.orders.wait(LOOK_EVERY_S)
                continue
            try:
                self._upload(sets[name]) if name else self._open()
                self._failures.pop(name, None)
            except Exception as error:
                self._fail(name, error)
        return not all_waiting(self.run)

    def _is_due(self, name: str) -> bool:
        return name not in self._failures or time.monotonic() >= self._failures[name].again_s

    def _is_given_up(self, name: str) -> bool:
        return name in self._failures and (self._failures[name].cure is not None or self._failures[name].tries >= LAST_TRIES)

    def _open(self) -> None:
        """Look whether the store can be written, read and cleared, and whether no other run lies there."""
        began_s = time.perf_counter()
        store = Store(self.settings.address)
        store.probe()
        shelf = Shelf(store)
        shelf.check_run(self.settings.run)
        with contextlib.suppress(Exception): # who may not list them leaves them to the bucket's own rules
            store.drop_unfinished()
        shelf.clear({one.name for one in all_waiting(self.run)})
        self._shelf = shelf
        if self.settings.paced:              # from now on the training does not wait
            store.keep_pace(Pace(is_over=lambda: self.orders.over or self.orders.gone).rest)
        self._tell(events.MirrorReady(address=self.settings.address, seconds=time.perf_counter() - began_s))

    def _wanted(self) -> list[Waiting]:
        """Return the sets to upload, in order. A checkpoint whose place a newer one has taken waits no longer."""
        sets, wanted = all_waiting(self.run), []
        for one in sets:
            if one.rebuilt and one.name not in self._rebuilt:
                self._rebuilt.add(one.name)
                self._tell(events.WaitingRebuilt(step=one.step, name=one.name, path=str(one.path / ABOUT)))
            if one.is_wanted(sets, self.settings.keep_every):
                wanted.append(one)
                continue
            waiting.remove(one)
            newer = max((other for other in sets if other.name.startswith("step-")), key=lambda other: other.step)
            self._tell(events.UploadSkipped(step=one.step, name=one.name, newer=newer.name))
        return wanted

    def _upload(self, one: Waiting) -> None:
        assert self._shelf is not None
        found = self._shelf.publish(one, self.settings, self.run / FOLDER / PACKED)
        waiting.remove(one)
        gone: list[str] = []
        with contextlib.suppress(Exception): # tried again after the next upload
            gone = self._shelf.keep_only(self.settings.keep, self.settings.keep_every)
            self._shelf.clear({one.name for one in all_waiting(self.run)})
        self._tell(events.Uploaded(step=one.step, name=one.name, bytes=found.bytes, stored_bytes=found.stored_bytes,
                                   seconds=found.seconds, packing_s=found.packing_s, deleted=tuple(gone)))

    def _fail(self, name: str, error: Exception) -> None:
        """Tell of a failure, each once, and say when it is tried again: others that wait have their turn meanwhile."""
        why, cure, before = told(error), cure_of(error, self.settings.address), self._failures.get(name)
        tries = before.tries + 1 if before else 1
        self._failures[name] = Failure(why, cure, tries, time.monotonic() + pause_s(tries, blocked=cure is not None))
        if before is None or before.why != why:
            self._tell(events.UploadFailed(name=name, why=why, cure=cure, address=self.settings.address))

    def _tell(self, event: events.Event) -> None:
        self.log.write(event)
        self.log.flush(durable=True)
        self.listener(event)


def pause_s(tries: int, *, blocked: bool) -> float:
    """Return the pause after so many failures: by chance, up to one that doubles each time and has an end."""
    if blocked:
        return BLOCKED_PAUSE_S
    return random.uniform(FIRST_PAUSE_S, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**min(tries, 30)))


def upload_all(run: Path, listener: Listener) -> bool:
    """Upload what waits in a run that has a mirror; return whether all of it is in the store and verified."""
    settings = settings_of(run)
    assert settings is not None
    with alone(run):
        return Uploader(run, settings, Orders(over=True), listener).work()


def main(run: Path, trainer: int) -> int:
    orders = Orders(trainer if hasattr(os, "fork") else None)
    # a system that stops asks all processes to end: this one goes on until the training is gone, whose last upload it makes
    signal.signal(signal.SIGTERM, lambda *_: os._exit(NotDurable.exit_code) if orders.gone else None)
    orders.listen()
    settings = settings_of(run)
    assert settings is not None              # the training writes them first

    def listener(event: events.Event) -> None:
        if isinstance(event, events.MirrorReady):        # until then the training waits for this
            lower_process()

    with alone(run):
        return DONE if Uploader(run, settings, orders, listener).work() else NotDurable.exit_code


@contextlib.contextmanager
def alone(run: Path) -> Iterator[None]:
    """Be the only one that uploads this run. One that a training has left behind, with an upload in hand, is asked to end."""
    with open(run / FOLDER / LOCK, "a+") as file:
        while got_lock(file) is False:
            file.seek(0)
            host, _, number = file.read().partition(" ")
            if host == socket.gethostname() and number.isdigit():
                with contextlib.suppress(OSError):
                    os.kill(int(number), signal.SIGTERM)
            time.sleep(LOOK_EVERY_S / 5)
        file.truncate(0)
        file.write(f"{socket.gethostname()} {os.getpid()}")
        file.flush()
        waiting.clear_leftovers(run)
        yield


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
