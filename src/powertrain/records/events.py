"""The events of a run: one frozen dataclass a kind, as `events.jsonl`, the terminal and every follower get them.

A line is a JSON object: `event` names the kind, `about` the kind of a warning or note, and the other keys are fields of the
class. Fields and kinds of a later version are kept (`more`, `Unknown`); lines of version 1 become today's kinds in
old_events.py. docs/events.schema.json is made from these classes (`make schema`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from powertrain.records import WrongUse, to_plain
from powertrain.records.old_events import upgraded

if TYPE_CHECKING:
    from pydantic import TypeAdapter

VERSION = 2                  # of these classes; `start` and `resume` carry it. Version 1 told warnings as sentences


def _now() -> float:
    return round(time.time(), 3)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run."""

    kind: ClassVar[str] = ""
    time: float = field(default_factory=_now)            # of the day, in seconds since 1970
    step: int = 0                                        # optimizer steps that were done
    more: Mapping[str, Any] = field(default_factory=dict)    # fields of a later version


@dataclass(frozen=True, kw_only=True)
class Unknown(Event):
    """An event of a kind that this version does not know."""

    event: str


@dataclass(frozen=True, kw_only=True)
class Folder(Event):
    """The run's folder was made. Told to listeners; events.jsonl lies in that folder."""

    kind = "folder"
    path: str


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A run began."""

    kind = "start"
    version: int = 1
    name: str = ""
    method: str = ""
    task: str = "causal"
    provider: str = "native"
    opens_in: str | None = "peft"            # the library, beside powertrain, that opens the run's adapters
    total_steps: int = 0
    train_batch_size: int | None = None
    block: int | None = None                 # tokens of an example
    parameters: int | None = None
    device: str = "cpu"
    processes: int = 1
    techniques: tuple[str, ...] = ()
    estimate: Mapping[str, Any] | None = None            # records.Estimate, as plan.json holds it
    load: float | None = None                # of the machine, over the minute before


@dataclass(frozen=True, kw_only=True)
class Resume(Start):
    """A run went on after `step`."""

    kind = "resume"
    rejected: tuple[str, ...] = ()           # checkpoints that did not verify


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One optimizer step; the first is 1."""

    kind = "step"
    loss: float                              # nats, mean over the step's trained tokens
    tokens: int                              # trained
    real_tokens: int                         # not padding
    seconds: float
    learning_rate: float
    grad_norm: float                         # before clipping
    parts: Mapping[str, float] = field(default_factory=dict)     # data, copy, forward, backward, optimizer: sum to `seconds`
    padding_tokens: int | None = None        # None in runs of before steps recorded it
    metrics: Mapping[str, float] = field(default_factory=dict)   # of the objective: cross_entropy and z_loss where they are on


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """The loss on held-out text."""

    kind = "evaluation"
    loss: float                              # nats a token
    tokens: int
    seconds: float = 0.0
    bits_per_byte: float | None = None       # None where the text's bytes are not known
    final: bool = False                      # over all of the text


@dataclass(frozen=True, kw_only=True)
class Sample(Event):
    """Text that the model wrote after the recipe's prompt."""

    kind = "sample"
    text: str
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Adapters(Event):
    """Figures of the trained adapters, by module."""

    kind = "adapters"
    modules: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Memory(Event):
    """The memory that one step really allocated, beside the prediction for its passes."""

    kind = "memory"
    allocated_bytes: int = 0
    predicted: Mapping[str, float] = field(default_factory=dict)     # bytes by component
    reserved_bytes: int = 0                  # by the allocator of a GPU
    fullest_bytes: int = 0                   # predicted for the fullest passes that the run may have


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint is on the disk."""

    kind = "checkpoint"
    path: str = ""
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelSaved(Event):
    """The final model is on the disk."""

    kind = "model"
    path: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """A session ended."""

    kind = "end"
    reason: str                              # "finished", "stopped" or "failed"
    signal: str | None = None                # that stopped it
    seconds: float = 0.0
    clipped_steps: int = 0
    passes: Mapping[str, int] = field(default_factory=dict)      # replayed passes, by how they ran
    peak_memory_bytes: int | None = None     # of the process, or of the GPU's allocator
    not_saved: str | None = None             # why the last checkpoint is not on the disk
    message: str = ""                        # of a failure, for people
    error: Mapping[str, Any] = field(default_factory=dict)       # of a failure: its kind and fields (UserError.fields)

    @property
    def state(self) -> str:
        """Return "finished", "failed" or "stopped (SIGINT)"."""
        return f"{self.reason} ({self.signal})" if self.signal else self.reason


# ------------------------------------------------------------------------------------------------ warnings


@dataclass(frozen=True, kw_only=True)
class RunWarning(Event):
    """A warning. This class itself is one of version 1 that no kind below covers, or one of a later version."""

    kind = "warning"
    about: ClassVar[str] = ""
    message: str = ""

    @property
    def sentence(self) -> str:
        """Return the warning for people."""
        return self.message or f"a warning that this version of powertrain does not know: {dict(self.more)}"


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(RunWarning):
    """A pass of step `step` + 1 ran out of memory; the step is taken again in smaller passes."""

    about = "out_of_memory"
    before_tokens: int                       # of the largest pass
    after_tokens: int
    train_batch_size: int
    said: str                                # by the allocator

    @property
    def sentence(self) -> str:
        return (f"step {self.step + 1:,} ran out of memory ({self.said}). It is repeated in passes of at most "
                f"{self.after_tokens:,} tokens instead of {self.before_tokens:,}, with the same batch of "
                f"{self.train_batch_size} examples. plan.json now holds the smaller passes")


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(RunWarning):
    """The checkpoint of `step` could not be written; training goes on."""

    about = "checkpoint_failed"
    why: str
    folder: str = ""
    last: bool = False                       # no later checkpoint will be tried
    free_bytes: int | None = None            # where the disk is full
    needed_bytes: int | None = None

    @property
    def sentence(self) -> str:
        then = "The final model is still to be written" if self.last else "Training goes on; the next save tries again"
        return f"the checkpoint of step {self.step:,} could not be saved: {self.why}. {then}. " + disk_cure(
            self.folder, self.free_bytes, self.needed_bytes)


def disk_cure(folder: str, free_bytes: int | None, needed_bytes: int | None) -> str:
    """Return what to do where a disk refuses a checkpoint: it is full, or the folder cannot be written."""
    if free_bytes is None or needed_bytes is None:
        return f"Make {folder} writable again"
    return f"Free some disk space: {free_bytes / 2**20:,.0f} MiB are left, a checkpoint takes {needed_bytes / 2**20:,.0f} MiB"


@dataclass(frozen=True, kw_only=True)
class CheckpointNotDeleted(RunWarning):
    """An older checkpoint could not be deleted."""

    about = "checkpoint_not_deleted"
    why: str
    folder: str

    @property
    def sentence(self) -> str:
        return (f"step {self.step:,} is saved, but an older checkpoint could not be deleted: {self.why}. {self.folder} takes "
                "more disk space than planned")


@dataclass(frozen=True, kw_only=True)
class CheckpointRejected(RunWarning):
    """A checkpoint did not verify, so the run went on from an older one."""

    about = "checkpoint_rejected"
    name: str
    why: str

    @property
    def sentence(self) -> str:
        return f"the checkpoint {self.name} was not used: {self.why}"


@dataclass(frozen=True, kw_only=True)
class LittleDisk(RunWarning):
    """The disk has too little room for the checkpoints of the run."""

    about = "little_disk"
    free_bytes: int
    needed_bytes: int
    checkpoints: int                         # that are kept

    @property
    def sentence(self) -> str:
        return (f"the disk has {self.free_bytes / 2**20:,.0f} MiB free, but {self.checkpoints} kept checkpoints, the best one "
                f"and a new one take {self.needed_bytes / 2**20:,.0f} MiB. Free some space, or use save_total_limit=1")


@dataclass(frozen=True, kw_only=True)
class EventsWaiting(RunWarning):
    """events.jsonl cannot be written; events wait in memory."""

    about = "events_waiting"
    why: str

    @property
    def sentence(self) -> str:
        return (f"events.jsonl cannot be written ({self.why}). Training goes on; the events are kept in memory until "
                "the file can be written")


@dataclass(frozen=True, kw_only=True)
class ListenerFailed(RunWarning):
    """Whoever was shown the events raised an error; training goes on."""

    about = "listener_failed"
    why: str

    @property
    def sentence(self) -> str:
        return f"the display of the run failed ({self.why}). Training goes on; events.jsonl has every event"


# ------------------------------------------------------------------------------------------------ notes


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """Something worth knowing that asks for nothing."""

    kind = "note"
    about: ClassVar[str] = ""
    message: str = ""

    @property
    def sentence(self) -> str:
        """Return the note for people."""
        return self.message or f"a note that this version of powertrain does not know: {dict(self.more)}"


@dataclass(frozen=True, kw_only=True)
class TechniqueNote(Note):
    """What a technique found when it was applied to this model."""

    about = "technique"
    technique: str


@dataclass(frozen=True, kw_only=True)
class TimingSteps(Note):
    """A few steps are timed, to turn `train_time_s` into a number of steps."""

    about = "timing_steps"
    seconds: float

    @property
    def sentence(self) -> str:
        return f"timing a few steps, to choose how many fit into {self.seconds:g} s"


KINDS: tuple[type[Event], ...] = (
    Folder, Start, Resume, Step, Evaluated, Sample, Adapters, Memory, Saved, ModelSaved, End,
    RunWarning, OutOfMemory, CheckpointFailed, CheckpointNotDeleted, CheckpointRejected, LittleDisk, EventsWaiting,
    ListenerFailed, Note, TechniqueNote, TimingSteps)


# ------------------------------------------------------------------------------------------------ lines


def to_line(event: Event) -> dict[str, Any]:
    """Return the event as JSON holds it. A field that is None is left out: what is unknown is absent."""
    about = getattr(event, "about", "")
    head = {"event": event.event if isinstance(event, Unknown) else event.kind, **({"about": about} if about else {})}
    fields = {name: value for name, value in to_plain(event).items() if value is not None and name not in ("more", "event")}
    return {**head, **fields, **event.more}


def from_line(line: Mapping[str, Any]) -> Event:
    """Return the event of a line, of any version. Raises WrongUse where a field is missing or of another type."""
    from pydantic import ValidationError

    line = upgraded(line)
    cls = _classes().get((line["event"], line.get("about", ""))) or _classes().get((line["event"], ""), Unknown)
    known = {one.name for one in dataclasses.fields(cls)}
    read = {name: value for name, value in line.items() if name in known}
    more = {name: value for name, value in line.items() if name not in known | {"event"} and (
        name, value) != ("about", getattr(cls, "about", None))}
    try:
        return _adapters()[cls].validate_python({"time": 0.0, **read, "more": more})
    except ValidationError as error:
        wrong = error.errors()[0]
        raise WrongUse(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None


@cache
def _classes() -> dict[tuple[str, str], type[Event]]:
    return {(kind.kind, getattr(kind, "about", "")): kind for kind in KINDS}


@cache
def _adapters() -> dict[type[Event], TypeAdapter[Event]]:
    from pydantic import TypeAdapter

    return {kind: TypeAdapter(kind) for kind in (*KINDS, Unknown)}
