"""Commands that the page starts: each a process group of its own, whose output is a file, and which outlives the page.

    jobs/ID.json    what was asked, and which process does it            jobs/ID.out    what it prints

A job is told from another process with the same number by the time at which it started. What one job costs the device is
the device's business: of those that use it, one runs at a time and the others wait in their order.
"""

import contextlib
import datetime
import hmac
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from powertrain.records import WrongUse
from powertrain.records.json_files import read_json, write_json
from powertrain.records.locks import got_lock
from powertrain.records.redaction import redacted
from powertrain.web.places import NotThere, opened

PROGRAM = (sys.executable, "-m", "powertrain")
COLUMNS = "110"              # of the terminal that a command believes to write to
LOOK_S = 1.0                 # between two looks at what runs and what waits
MOST_KEPT = 500              # jobs that have ended
MOST_WAITING = 100
HEAVY = ("train", "tune", "ablate", "bench", "diagnose", "claims")           # commands that use the device


@dataclass(frozen=True)
class Job:
    id: str
    title: str
    words: tuple[str, ...]                   # behind `powertrain`
    run: str = ""                            # the folder in runs/ that it trains in
    state: str = "waiting"                   # "waiting", "running" or "ended"
    order: float = 0.0                       # among those that wait
    asked: float = 0.0                       # seconds since 1970
    began: float = 0.0
    ended: float = 0.0
    pid: int = 0
    process_began: float = 0.0               # as the system says, with the number of the process its name
    code: int | None = None                  # None: it has not ended, or ended while no page looked
    mark: str = ""                           # that a page of this user has asked for it, and not whoever wrote the folder

    @property
    def is_heavy(self) -> bool:
        return self.words[0] in HEAVY

    @property
    def command(self) -> str:
        """Return the command, to be copied into a terminal."""
        return shlex.join(("powertrain", *self.words))

    @property
    def when(self) -> str:
        return datetime.datetime.fromtimestamp(self.began or self.asked).strftime("%Y-%m-%d %H:%M")


class Jobs:
    """The jobs of a folder. One server at a time looks after them."""

    def __init__(self, folder: Path, root: Path, environment: Mapping[str, str], program: Sequence[str] = PROGRAM,
                 sign: Callable[[str], str] = lambda text: ""):
        self.folder, self.root, self.environment, self.program, self._sign = folder, root, environment, program, sign
        folder.mkdir(parents=True, exist_ok=True)
        self._alone = open(folder / ".lock", "a+", encoding="utf-8")     # noqa: SIM115  # held as long as the server lives
        if got_lock(self._alone) is False:
            self._alone.seek(0)
            address = self._alone.read().strip()
            self._alone.close()
            raise WrongUse(f"a page already runs for {root}: {address or 'in another process'}; use that one, or end it first")
        self._lock = threading.RLock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._jobs = {job.id: job for job in self._read()}

    def close(self) -> None:
        """Let another server look after the jobs."""
        self._alone.close()

    def name_address(self, address: str) -> None:
        """Write into the lock where the page is, for whoever starts a second one."""
        self._alone.truncate(0)
        self._alone.write(address)
        self._alone.flush()

    def _read(self) -> list[Job]:
        found = []
        for path in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(WrongUse, ValueError, TypeError, LookupError, OSError):     # a damaged file is no job
                values = read_json(path, open_file=opened)
                job = Job(**{**values, "id": path.stem, "words": tuple(values["words"])})
                is_ours = hmac.compare_digest(job.mark.encode(), self._mark(job.id, job.words).encode())
                found.append(job if is_ours or job.state != "waiting" else replace(job, state="ended"))
        return found

    def _mark(self, job_id: str, words: Sequence[str]) -> str:
        return self._sign(json.dumps(["job", job_id, *words]))

    # -------------------------------------------------------------------------------------------- looking

    def all(self) -> list[Job]:
        """Return the jobs: those that run, those that wait in their order, then the others, the newest first."""
        with self._lock:
            jobs = list(self._jobs.values())
        places = {"running": 0, "waiting": 1, "ended": 2}
        return sorted(jobs, key=lambda job: (places[job.state], job.order if job.state == "waiting" else -job.asked))

    def get(self, job_id: str) -> Job:
        """Raises NotThere."""
        with self._lock:
            if job_id not in self._jobs:
                raise NotThere(f"there is no job {job_id[:60]!r}; the list of jobs shows what is there")
            return self._jobs[job_id]

    def of_run(self, run: str) -> Job | None:
        """Return the newest job that trains in this run."""
        return max((job for job in self.all() if job.run == run), key=lambda job: job.asked, default=None)

    def output(self, job: Job, most_bytes: int = 200_000) -> str:
        """Return the end of what a job has printed."""
        try:
            with opened(self.folder / f"{job.id}.out") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - most_bytes))
                return redacted(file.read().decode(errors="replace"))
        except OSError:
            return ""

    # -------------------------------------------------------------------------------------------- changing

    def ask(self, title: str, words: Sequence[str], run: str = "") -> Job:
        """Return a new job that waits, or the one that was asked for with the same words and has not ended."""
        with self._lock:
            for job in self._jobs.values():
                if job.state != "ended" and _same(job.words, words):
                    return job
            if sum(job.state == "waiting" for job in self._jobs.values()) >= MOST_WAITING:
                raise WrongUse(f"{MOST_WAITING} jobs wait already; take some out of the queue first")
            now = time.time()
            job_id = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
            job = Job(job_id, title, tuple(words), run, order=now, asked=now, mark=self._mark(job_id, words))
            self._keep(job)
            self._forget_old()
            self.look()
            return self._jobs[job.id]

    def move(self, job_id: str, *, up: bool) -> None:
        """Let a waiting job change places with its neighbour."""
        with self._lock:
            waiting = [job for job in self.all() if job.state == "waiting"]
            place = next((number for number, job in enumerate(waiting) if job.id == job_id), None)
            other = None if place is None else place - 1 if up else place + 1
            if place is not None and other is not None and 0 <= other < len(waiting):
                one, two = waiting[place], waiting[other]
                self._keep(replace(one, order=two.order))
                self._keep(replace(two, order=one.order))

    def stop(self, job_id: str, *, now: bool) -> None:
        """Ask a job to end as it would at Ctrl-C (a run takes its step to the end and saves), or end its processes `now`."""
        with self._lock:
            job = self.get(job_id)
            if job.state == "waiting":
                self._keep(replace(job, state="ended", ended=time.time()))
            elif job.state == "running" and _is_alive(job):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL) if now else os.kill(job.pid, signal.SIGTERM)

    def look(self) -> None:
        """Take note of what has ended, and start what may run."""
        with self._lock:
            for job in [job for job in self._jobs.values() if job.state == "running"]:
                child = self._children.get(job.id)
                code = child.poll() if child else None
                if code is not None or (child is None and not _is_alive(job)):
                    self._children.pop(job.id, None)
                    self._keep(replace(job, state="ended", ended=time.time(), code=code))
            running = [job for job in self._jobs.values() if job.state == "running"]
            busy = any(job.is_heavy for job in running)
            for job in [job for job in self.all() if job.state == "waiting"]:
                if not (job.is_heavy and busy):
                    busy = busy or job.is_heavy
                    self._start(job)

    def _start(self, job: Job) -> None:
        job = replace(job, state="running", began=time.time())
        self._keep(job)                      # first: a server that dies here must not start it twice
        with open(self.folder / f"{job.id}.out", "ab") as output:
            child = subprocess.Popen([*self.program, *job.words], cwd=self.root, stdin=subprocess.DEVNULL, stdout=output,
                                     stderr=subprocess.STDOUT, start_new_session=True,
                                     env={**self.environment, "COLUMNS": COLUMNS, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"})
        self._children[job.id] = child
        try:
            process_began = psutil.Process(child.pid).create_time()
        except psutil.Error:                 # it has ended already
            process_began = 0.0
        self._keep(replace(job, pid=child.pid, process_began=process_began))

    def _keep(self, job: Job) -> None:
        self._jobs[job.id] = job
        values: dict[str, Any] = asdict(job)
        write_json(self.folder / f"{job.id}.json", values)

    def _forget_old(self) -> None:
        ended = [job for job in self.all() if job.state == "ended"]
        for job in ended[MOST_KEPT:]:
            del self._jobs[job.id]
            for ending in ("json", "out"):
                (self.folder / f"{job.id}.{ending}").unlink(missing_ok=True)


def _same(one: Sequence[str], two: Sequence[str]) -> bool:
    """Return whether two commands are one: the folder of a new run is named anew each time that somebody asks."""
    return _without_output(one) == _without_output(two)


def _without_output(words: Sequence[str]) -> list[str]:
    at = words.index("--output") if "--output" in words else len(words)
    return [*words[:at], *words[at + 2:]] if words[0] == "train" else [*words]


def _is_alive(job: Job) -> bool:
    try:
        process = psutil.Process(job.pid)
        return abs(process.create_time() - job.process_began) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
