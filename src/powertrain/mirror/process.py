"""The process that uploads: `python -m powertrain.mirror.process RUN`, started by the training, which it never slows or ends.

It has the lowest priority, and takes only what lies in mirror/waiting. On its standard input "end" says that nothing more will
come; the end of that input, that the training is gone: it finishes the upload in hand and ends.
Exit code: 0 everything uploaded and verified, 3 something still waits.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from powertrain.mirror.shelf import Shelf
from powertrain.mirror.store import Store, cure_of, told
from powertrain.mirror.waiting import EVENTS, FOLDER, Settings, Waiting, all_waiting, remove, settings_of
from powertrain.records import NotDurable, events
from powertrain.records.errors import DONE
from powertrain.records.event_log import EventLog

Listener = Callable[[events.Event], None]

LOOK_EVERY_S = 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0  # between two tries: twice as long each time, by chance up to that
BLOCKED_PAUSE_S = 300.0                      # where a person has to do something first
LAST_TRIES = 6                               # of one set, after the training is over


class Orders:
    """What the training says: whether more will come, and whether it is gone."""

    def __init__(self, *, over: bool = False) -> None:
        self._changed = threading.Event()
        self.over, self.gone = over, False   # over: nothing more will come

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.over = self.over or line.strip() == "end"
            self._changed.set()
        self.gone = not self.over
        self._changed.set()

    def wait(self, seconds: float) -> None:
        """Wait so long, or until the training says something."""
        self._changed.wait(seconds)
        self._changed.clear()


class Uploader:
    """Uploads what waits, one set after the other, and tells what happened in a log of its own."""

    def __init__(self, run: Path, settings: Settings, orders: Orders, listener: Listener = lambda event: None) -> None:
        self.run, self.settings, self.orders, self.listener = run, settings, orders, listener
        self.log = EventLog(run / FOLDER / EVENTS)
        self._shelf: Shelf | None = None
        self._said: tuple[str, str] | None = None        # the last failure: each is told once

    def work(self) -> bool:
        """Upload until nothing more will come; return whether everything is uploaded."""
        tries, ready = 0, False
        while True:
            one = self._next()
            if ready and one is None and (self.orders.over or self.orders.gone):
                return True
            if ready and one is None:
                self.orders.wait(LOOK_EVERY_S)
                continue
            try:
                if not ready:
                    self._open()
                    ready = True
                elif one is not None:
                    self._upload(one)
                tries = 0
            except Exception as error:
                tries += 1
                cure = cure_of(error, self.settings.address)
                self._fail(one.name if ready and one else "", error, cure)
                if self.orders.gone or (self.orders.over and (cure is not None or tries >= LAST_TRIES)):
                    return False
                self.orders.wait(BLOCKED_PAUSE_S if cure else random.uniform(
                    FIRST_PAUSE_S, max(FIRST_PAUSE_S, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**tries))))
            if self.orders.gone:
                return not all_waiting(self.run)

    def _open(self) -> None:
        """Look whether the store can be written, read and cleared, and whether no other run lies there."""
        began_s = time.perf_counter()
        store = Store(self.settings.address)
        store.probe()
        self._shelf = Shelf(store)
        self._shelf.check_run(self.settings.run)
        with contextlib.suppress(Exception): # who may not list them leaves them to the bucket's own rules
            store.drop_unfinished()
        self._tell(events.MirrorReady(address=self.settings.address, seconds=time.perf_counter() - began_s))

    def _next(self) -> Waiting | None:
        """Return the set to upload now. A checkpoint whose place a newer one has taken waits no longer."""
        sets = all_waiting(self.run)
        for one in sets:
            if not one.is_wanted(sets, self.settings.keep_every):
                remove(one)
                newer = max((other for other in sets if other.name.startswith("step-")), key=lambda other: other.step)
                self._tell(events.UploadSkipped(step=one.step, name=one.name, newer=newer.name))
        return next((one for one in sets if one.path.exists()), None)

    def _upload(self, one: Waiting) -> None:
        assert self._shelf is not None
        found = self._shelf.publish(one, self.settings, self.run / FOLDER / "packed")
        remove(one)
        self._said = None
        gone: list[str] = []
        with contextlib.suppress(Exception): # tried again after the next upload
            gone = self._shelf.keep_only(self.settings.keep, self.settings.keep_every)
        self._tell(events.Uploaded(step=one.step, name=one.name, bytes=found.bytes, stored_bytes=found.stored_bytes,
                                   seconds=found.seconds, packing_s=found.packing_s, deleted=tuple(gone)))

    def _fail(self, name: str, error: Exception, cure: str | None) -> None:
        if (said := (name, told(error))) != self._said:
            self._said = said
            self._tell(events.UploadFailed(name=name, why=said[1], cure=cure, address=self.settings.address))

    def _tell(self, event: events.Event) -> None:
        self.log.write(event)
        self.log.flush(durable=True)
        self.listener(event)


def upload_all(run: Path, listener: Listener) -> bool:
    """Upload what waits in a run that has a mirror; return whether all of it is in the store and verified."""
    settings = settings_of(run)
    assert settings is not None
    return Uploader(run, settings, Orders(over=True), listener).work()


def main(run: Path) -> int:
    _take_what_is_left()
    settings = settings_of(run)
    assert settings is not None              # the training writes them first
    orders = Orders()
    orders.listen()
    return DONE if Uploader(run, settings, orders).work() else NotDurable.exit_code


def _take_what_is_left() -> None:
    """Run only while a core has nothing else to do, where the system knows that; else at the lowest priority."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        with contextlib.suppress(AttributeError, OSError):
            os.nice(19)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
