"""A run's mirror, as the training sees it: what is handed over, and what the process that uploads has to say.

The training starts that process, gives it the names of files, and reads its log once a second. It waits for it twice: for the
probe before the first step, and for what is promised after the last one.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from powertrain.mirror import waiting
from powertrain.mirror.waiting import EVENTS, FOLDER, MATERIAL, MATERIAL_LIST, Settings, settings_of
from powertrain.recipe import Recipe
from powertrain.records import NotDurable, RunFailed, events
from powertrain.records.checkpoints import by_loss, checkpoints_in, delete_checkpoint, newest_checkpoint
from powertrain.records.errors import DONE
from powertrain.records.event_log import EventLog, EventReader
from powertrain.records.json_files import read_json, write_json
from powertrain.run.belongings import belongings
from powertrain.run.folder import RunFolder
from powertrain.run.part import Part

LOOK_EVERY_S = 1.0
PROBE_S = 120.0              # after which a store that does not answer is not waited for
PASSING_S = 30.0             # that the first step waits for a fault to pass
GRACE_S = 25.0               # that a run which was asked to stop waits for its last upload
MOST_STARTS = 4              # of the process that uploads


@contextlib.contextmanager
def mirrored(part: Part) -> "Iterator[Mirror | None]":
    """Hold the run's mirror, where it has one, in the process that writes. Raises RunFailed where it cannot be used."""
    mirror, refused = None, None
    if part.prepared.recipe.mirror is not None and part.ranks.is_writer:
        mirror = Mirror(part, _settings(part))
        try:
            mirror.begin()
        except RunFailed as error:
            refused = str(error)
    try:
        if (why := part.ranks.agree(refused)) is not None:
            raise RunFailed(why)
        yield mirror
    finally:
        if mirror is not None:
            mirror.let_go()


def _settings(part: Part) -> Settings:
    """Return where the run is mirrored, written down for the process; a run that was fetched keeps its place in the store."""
    recipe, run = part.prepared.recipe, part.folder.path.resolve()
    before = settings_of(run)
    stays = before is not None and before.address.rpartition("/")[0] == recipe.mirror
    settings = Settings(before.address if before and stays else f"{recipe.mirror}/{run.name}",
                        before.run if before else waiting.new_id(), recipe.mirror_keep, recipe.mirror_keep_every,
                        recipe.mirror_compress, paced=part.setup.device.type == "cpu")
    settings.write(run)
    return settings


@dataclass
class Mirror:
    """What the training holds of its mirror."""

    part: Part
    settings: Settings
    not_added: str | None = None             # why the last set could not be handed over
    _process: subprocess.Popen[str] | None = None
    _tail: EventReader | None = None
    _looked_s: float = 0.0
    _starts: int = 0
    _ready: bool = False
    _failed: events.UploadFailed | None = None           # the last failure that nothing has mended
    _uploaded: set[str] = field(default_factory=set)     # names of sets that this mirror got

    @property
    def run(self) -> Path:
        return self.part.folder.path

    def begin(self) -> None:
        """Start the process and wait until the store was written, read and cleared. Raises RunFailed with what is wrong."""
        log = self.run / FOLDER / EVENTS
        EventLog(log).flush(durable=True)    # makes the file, and cuts a torn line
        self._tail = EventReader(log)
        waiting.clear_drafts(self.run)
        self._uploaded = waiting.uploaded_to(self.settings.address, self._tail.read_whole()[0])
        uploaded = set(self._uploaded)
        self._start()
        self._wait_for_it()
        if self.part.prepared.recipe.mirror_material and MATERIAL not in uploaded:
            try:
                add_material(self.run, self.part.prepared.recipe)
            except OSError as error:
                raise RunFailed(f"data and base model cannot be handed to the mirror: {error.strerror or error}; free some "
                                "disk space, or leave them out with mirror_material=off") from None
        newest, _ = newest_checkpoint(self.part.folder.checkpoints)
        if newest is not None and newest.name not in uploaded:           # of a session that was killed before it was added
            self.add(newest.name, newest, int(newest.name.partition("-")[2]))

    def _wait_for_it(self) -> None:
        """Wait until the store was written, read and cleared; a fault that may pass has PASSING_S for that.

        A signal ends the wait: the step after it is the last. Raises RunFailed.
        """
        ends_s, told = time.perf_counter() + PROBE_S, False
        while not (self._ready or (self._failed and self._failed.cure) or self.part.interrupt.requested) and (
                self._alive() and time.perf_counter() < ends_s):
            time.sleep(0.05)
            self._relay(quiet=True)
            if self._failed is not None and self._failed.cure is None and not told:
                ends_s, told = min(ends_s, time.perf_counter() + PASSING_S), True
                self.part.emit(replace(self._failed, step=self.part.state.step, first_step_waits_s=PASSING_S))
        if not self._ready and not self.part.interrupt.requested:
            self.let_go()
            why, cure = (self._failed.why, self._failed.cure) if self._failed else ("it does not answer", None)
            raise RunFailed(f"the mirror {self.settings.address} cannot be used: {why}. "
                            f"{_sentence(cure or 'look whether it can be reached')}, or leave mirror out")

    def _start(self) -> None:
        self._starts += 1
        with contextlib.suppress(OSError):   # one of its pipes is broken where it was killed
            self.let_go()
        self._process = subprocess.Popen([sys.executable, "-m", "powertrain.mirror.process", str(self.run), str(os.getpid())],
                                         stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                         text=True, start_new_session=True)

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def add(self, name: str, folder: Path, step: int) -> None:
        """Hand over the files of a folder; with a checkpoint go those that the run needs to go on from it."""
        try:
            hand_over(self.part.folder, name, folder, step, self.part.state.evaluations.get(step))
            self.not_added = None
        except OSError as error:
            self.not_added = f"{name}: {error.strerror or error}"
            self.part.emit(events.UploadFailed(step=step, name=name, why=error.strerror or str(error),
                                               address=self.settings.address))

    def look(self) -> None:
        """Tell what the process has said, and start it again where it has ended. Called after every step."""
        if (now_s := time.perf_counter()) - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        self._relay()
        if self._process is not None and (code := self._process.poll()) is not None:
            self._start_again(code)

    def _start_again(self, code: int) -> None:
        """Tell that the process has ended, and start it again if that did not happen often."""
        self._relay()
        again = self._starts < MOST_STARTS
        self.part.emit(events.UploaderGone(step=self.part.state.step, code=code, again=again))
        self._process = None
        if again:
            self._start()

    def _relay(self, *, quiet: bool = False) -> None:
        assert self._tail is not None
        for event in self._tail.read_whole()[0]:         # a damaged line is passed over: it ends no training
            if isinstance(event, events.MirrorReady):
                self._ready, self._failed = True, None
            elif isinstance(event, events.UploadFailed):
                self._failed = event
            elif isinstance(event, events.Uploaded):
                self._failed = None
                self._uploaded.add(event.name)
                if self.part.prepared.recipe.mirror_frees_disk:
                    self._free_disk()
            if not (quiet and isinstance(event, events.UploadFailed)):
                self.part.emit(event if event.step else replace(event, step=self.part.state.step))

    def _free_disk(self) -> None:
        """Delete the checkpoints here that are verified there, all but the newest and the one that the model may be made of."""
        published = checkpoints_in(self.part.folder.checkpoints)
        best = by_loss(published, self.part.state.evaluations)[:self.part.prepared.recipe.load_best_model_at_end]
        for step, path in list(published.items())[:-1]:
            if path.name in self._uploaded and step not in best:
                with contextlib.suppress(OSError):
                    delete_checkpoint(path)

    def finish(self) -> str | None:
        """Wait for what waits, until a signal comes or the process gives up; return what is not in the mirror, and why.

        A run that was asked to stop waits for GRACE_S.
        """
        if self.part.stopped_by is None:
            self.add("model", self.part.folder.model, self.part.state.step)
        self._say_end()
        left, began_s = waiting.all_waiting(self.run), time.perf_counter()
        if left and self._alive():
            self.part.emit(events.MirrorWaited(step=self.part.state.step, waiting=tuple(one.name for one in left),
                                               address=self.settings.address))
        asked = self.part.interrupt.requested
        while self._alive() and self.part.interrupt.requested == asked and (
                self.part.stopped_by is None or time.perf_counter() - began_s < GRACE_S):
            time.sleep(0.05)
            self._relay()
            if self._process is not None and (code := self._process.poll()) not in (None, DONE, NotDurable.exit_code):
                self._start_again(code)
                self._say_end()
        self._relay()
        left = waiting.all_waiting(self.run)
        if not left and self.not_added is None:
            return None
        why = self._failed.why if self._failed else self.not_added or "the time was too short"
        names = ", ".join(one.name for one in left) or "the last checkpoint"
        return (f"{names}: not in the mirror {self.settings.address} ({why}). It stays on this disk; "
                f"`powertrain checkpoints upload {self.run}` uploads it")

    def _say_end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                print("end", file=self._process.stdin, flush=True)

    def let_go(self) -> None:
        """Tell the process that the training is gone: it finishes the upload in hand and ends."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def hand_over(run: RunFolder, name: str, folder: Path, step: int, held_out_loss: float | None) -> None:
    """Let the files of a folder wait for their upload; with a checkpoint those that the run goes on from. Raises OSError."""
    beginning = (run.recipe, run.origins, run.facts, run.plan, run.events) if folder != run.model else ()
    files = {file.name: file for file in (*folder.iterdir(), *beginning) if file.is_file()}
    waiting.add(run.path, name, files, step=step, held_out_loss=held_out_loss)


def add_material(run: Path, recipe: Recipe) -> None:
    """Hand over data and base model, where they are files of this machine. They are read where they lie. Raises OSError.

    A run that was fetched hands over what came with it, under the paths that its recipe names.
    """
    listed, below = run / MATERIAL / MATERIAL_LIST, str(run.resolve() / MATERIAL)
    if not listed.is_file():
        listed, below = run / FOLDER / MATERIAL_LIST, ""
        places, files = belongings(recipe)
        if files:
            write_json(listed, {"places": places, "files": {
                f"{number:06d}{file.suffix}": (str(file), file.stat().st_mtime_ns) for number, file in enumerate(files)}})
    if listed.is_file():
        named = {name: Path(file) for name, file in waiting.listed_files(read_json(listed), below).items()}
        waiting.add(run, MATERIAL, {MATERIAL_LIST: listed}, elsewhere=named)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
