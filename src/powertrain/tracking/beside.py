"""The followers of a run, as whoever starts them sees them: one process for each tracker, and what these have to say.

Nothing here waits for a tracker except `finish`, which has an end.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.records import WrongUse
from powertrain.records.errors import DONE
from powertrain.records.event import Event
from powertrain.records.event_log import EventReader
from powertrain.records.events import TrackerFailed
from powertrain.records.json_files import read_json
from powertrain.tracking.table import TRACKERS
from powertrain.tracking.tracker import PROJECT, Followed

LOOK_EVERY_S = 1.0
AGAIN_S, MOST_STARTS = 60.0, 5               # between two starts of a process that has ended by itself, and how many
LAST_S = 15.0                                # that a run which is over waits for its trackers


@dataclass
class OneFollower:
    """The process that follows for one tracker."""

    name: str
    asked: Mapping[str, Any]
    env: Mapping[str, str]
    reader: EventReader                      # of what the process says
    process: subprocess.Popen[str] | None = None
    starts: int = 0
    ended_s: float | None = None             # when the process ended by itself
    failed: TrackerFailed | None = None      # the last failure that nothing has mended

    def start(self) -> None:
        self.say_over()                      # closes the pipe of one that has ended
        self.starts, self.ended_s = self.starts + 1, None
        try:
            self.process = subprocess.Popen([sys.executable, "-m", "powertrain.tracking.process"], stdin=subprocess.PIPE,
                                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
                                            env=self.env, start_new_session=True)
            self.say(json.dumps(self.asked))
        except OSError as error:             # no process can be started: which harms no run
            self.failed = TrackerFailed(tracker=self.name, why=error.strerror or str(error))

    def say(self, line: str) -> None:
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):           # where the process has ended
                print(line, file=self.process.stdin, flush=True)

    def say_over(self) -> None:
        """Close the pipe, which says that nothing more will be written."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def told(self) -> list[Event]:
        """Return what the process has said since; a failure is kept until the tracker is open again."""
        found = self.reader.read_whole()[0]
        for event in found:
            self.failed = event if isinstance(event, TrackerFailed) else None
        return found

    @property
    def code(self) -> int | None:
        return None if self.process is None else self.process.poll()


class Followers:
    """The followers of one run."""

    def __init__(self, run: Followed, names: Sequence[str], env: Mapping[str, str], *, most_starts: int = MOST_STARTS,
                 **more: Any) -> None:
        """Start a process for each name. `env`: the variables of this process, by which trackers find their servers."""
        self.run, self._looked_s, self._most_starts, self._all = run, 0.0, most_starts, list[OneFollower]()
        run.folder.mkdir(exist_ok=True)
        for name in names:
            variable = TRACKERS[name].project_variable
            asked = {"path": str(run.path.resolve()), "id": run.id, "kind": run.kind, "settings": run.settings, "tracker": name,
                     "project": run.project or env.get(variable) or PROJECT, "asker": os.getpid(), **more}
            log = run.folder / f"{name}.jsonl"
            variables = {key: value.format(folder=run.folder.resolve()) for key, value in TRACKERS[name].variables.items()}
            one = OneFollower(name, asked, {**variables, **env}, EventReader(log, log.stat().st_size if log.is_file() else 0))
            one.start()
            self._all.append(one)

    def look(self) -> list[Event]:
        """Return what the processes have said since, once a second at most, and start again those that have ended."""
        if (now_s := time.monotonic()) - self._looked_s < LOOK_EVERY_S:
            return []
        self._looked_s, found = now_s, list[Event]()
        for one in self._all:
            found += one.told()
            if one.code is None or one.starts >= self._most_starts:
                continue
            if one.ended_s is None:
                one.ended_s = now_s
                if one.code != DONE and one.failed is None:
                    one.failed = TrackerFailed(tracker=one.name, why=f"its process ended with code {one.code}")
                    found.append(one.failed)
            elif now_s - one.ended_s > AGAIN_S:
                one.start()
        return found

    def is_over(self) -> bool:
        """Return whether every process has ended."""
        return all(one.process is None or one.code is not None for one in self._all)

    def say_over(self) -> None:
        """Say that the run is over: nothing more will be written."""
        for one in self._all:
            one.say_over()

    def finish(self, patience_s: float = LAST_S) -> dict[str, str]:
        """Wait a little until the trackers have everything; return why one has not, by name. The rest goes on without us."""
        self.say_over()
        until_s = time.monotonic() + patience_s
        while not self.is_over() and time.monotonic() < until_s:
            time.sleep(0.05)
        return self.missing()

    def missing(self) -> dict[str, str]:
        """Return why a tracker has not everything yet, by name."""
        found = {}
        for one in self._all:
            one.told()
            if one.code != DONE:
                found[one.name] = one.failed.why if one.failed else "it is not done yet, and goes on by itself" \
                    if one.code is None else f"its process ended with code {one.code}"
        return found

    def places(self) -> dict[str, str]:
        """Return where the run is to be seen, by tracker, as far as that is noted."""
        found = {}
        for one in self._all:
            with contextlib.suppress(WrongUse):
                found[one.name] = str(read_json(self.run.folder / f"{one.name}.json").get("place", ""))
        return found
