"""The events of a run: one frozen dataclass a kind, as `events.jsonl`, the terminal and every follower get them.

event.py has the classes that they share, mirror_events.py those of a mirror, ending_events.py those of a run's end.
event_log.py writes and reads them.
docs/events.schema.json is made from these classes (`make schema`).
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from powertrain.records.ending_events import BestModel as BestModel
from powertrain.records.ending_events import End as End
from powertrain.records.ending_events import StoppedEarly as StoppedEarly
from powertrain.records.errors import named
from powertrain.records.event import Event as Event
from powertrain.records.event import Note as Note
from powertrain.records.event import RunWarning as RunWarning
from powertrain.records.event import Told as Told
from powertrain.records.event import Unknown as Unknown
from powertrain.records.mirror_events import MirrorReady as MirrorReady
from powertrain.records.mirror_events import MirrorWaited as MirrorWaited
from powertrain.records.mirror_events import Uploaded as Uploaded
from powertrain.records.mirror_events import UploaderGone as UploaderGone
from powertrain.records.mirror_events import UploadFailed as UploadFailed
from powertrain.records.mirror_events import UploadSkipped as UploadSkipped
from powertrain.records.mirror_events import WaitingRebuilt as WaitingRebuilt
from powertrain.records.phases import Building as Building
from powertrain.records.phases import Compiling as Compiling
from powertrain.records.phases import LookingAtMachine as LookingAtMachine
from powertrain.records.phases import Phase as Phase
from powertrain.records.phases import ReadingData as ReadingData
from powertrain.records.phases import ReadingModel as ReadingModel
from powertrain.records.phases import TimingSteps as TimingSteps
from powertrain.records.phases import Tokenising as Tokenising
from powertrain.records.phases import TokenisingAlone as TokenisingAlone
from powertrain.records.sizes import memory
from powertrain.records.tracking_events import TrackerFailed as TrackerFailed
from powertrain.records.tracking_events import TrackerReady as TrackerReady

VERSION = 2                  # of these classes; `start` and `resume` carry it. Version 1 told warnings as sentences


def continuing(folder: object, processes: int) -> str:
    """Return the command that continues the run in `folder` with so many processes."""
    return f"powertrain train --resume {folder}" + f" --processes {processes}" * (processes > 1)


class Folder(Event):
    """The run's folder was made. Told to listeners; events.jsonl lies in that folder."""

    kind = "folder"
    path: str
    processes: int = 1                       # that train in it


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

    def command(self, folder: str) -> str:
        """Return the command that continues the run in `folder`, with as many processes."""
        return continuing(folder, self.processes)


class Resume(Start):
    """A run went on after `step`."""

    kind = "resume"
    rejected: tuple[str, ...] = ()           # checkpoints that did not verify


class Step(Event):
    """One optimizer step; the first is 1."""

    kind = "step"
    loss: float                              # nats, mean over the step's trained tokens
    tokens: int                              # trained
    real_tokens: int                         # not padding
    seconds: float
    learning_rate: float
    grad_norm: float                         # before clipping
    # of the first process: data, copy, forward, backward, optimizer, and communication with other processes. They sum to
    # `seconds`
    parts: Mapping[str, float] = field(default_factory=dict)
    padding_tokens: int | None = None        # None in runs of before steps recorded it
    metrics: Mapping[str, float] = field(default_factory=dict)   # of the objective: cross_entropy and z_loss where they are on
    # of several processes; None where one process took the step
    communication_share: float | None = None     # of `seconds`, that the exchange took
    waiting_share: float | None = None       # of `seconds`, that a process waited for the slowest one, on average
    token_imbalance: float | None = None     # computed tokens of the process with the most, over the mean of all processes


class Evaluated(Event):
    """The loss on held-out text, or of held-out pairs."""

    kind = "evaluation"
    loss: float                              # nats a token; of objectives that compare answers, a pair
    tokens: int                              # or pairs
    seconds: float = 0.0
    bits_per_byte: float | None = None       # None where the text's bytes are not known
    final: bool = False                      # over all of the text
    weights_step: int | None = None          # after which the model had its weights; None: after `step`
    metrics: Mapping[str, float] = field(default_factory=dict)   # of objectives that compare answers: rewards, accuracies


class Sample(Event):
    """Text that the model wrote after the recipe's prompt."""

    kind = "sample"
    text: str
    seconds: float = 0.0


class Adapters(Event):
    """Figures of the trained adapters, by module."""

    kind = "adapters"
    modules: Mapping[str, Mapping[str, float]]


class Memory(Event):
    """The memory that one step really allocated, beside the prediction for its passes."""

    kind = "memory"
    allocated_bytes: int = 0
    predicted: Mapping[str, float] = field(default_factory=dict)     # bytes by component
    reserved_bytes: int = 0                  # by the allocator of a GPU
    fullest_bytes: int = 0                   # predicted for the fullest passes that the run may have


class Saved(Event):
    """The checkpoint of `step` is on the disk. Later steps may have been written before it."""

    kind = "checkpoint"
    path: str = ""
    bytes: int = 0
    seconds: float = 0.0                     # that the training waited for it: for the copy, and what it did not write beside
    written_s: float | None = None           # from the beginning of the save until it was on the disk; None in older runs
    beside: bool = False                     # a copy was written beside the training; else the training waited for the disk


class ModelSaved(Event):
    """The final model is on the disk."""

    kind = "model"
    path: str = ""
    seconds: float = 0.0
    weights_step: int | None = None          # as in Evaluated


# ------------------------------------------------------------------------------------------------ warnings and notes


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


class UpdateSkipped(RunWarning):
    """The update of `step` was not made: its loss or gradient norm is not finite, or a spike. Data and schedule went on."""

    about = "update_skipped"
    loss: float
    grad_norm: float
    spike: bool = False                      # both are finite, and far above those of the steps before
    examples: tuple[int, ...] = ()           # numbers (from 0) of the training examples, of bad passes where some are not bad
    in_row: int = 1                          # updates that were not made, with this one
    most: int = 0                            # of them in a row, that the recipe allows

    @property
    def sentence(self) -> str:
        why = "is far above that of the steps before it" if self.spike else "is not finite"
        return (f"step {self.step:,} changed no weight: its loss or gradient norm {why} (loss {self.loss:.4g}, norm "
                f"{self.grad_norm:.4g}; training examples {named(self.examples)}). It is number {self.in_row} in a row, and "
                f"max_skipped_steps={self.most}")


class Rewound(RunWarning):
    """After too many bad steps, the run went back to the checkpoint of `step`, and goes on with the data after them."""

    about = "rewound"
    says = ("the updates of {in_row} steps in a row, up to step {bad_step:,}, were not made, so the run went back to its "
            "checkpoint of step {step:,} (rewind {rewinds} of {most}). It goes on with the examples after those of step "
            "{bad_step:,}")
    bad_step: int                            # the last one
    in_row: int = 1                          # of bad steps
    examples: tuple[int, ...] = ()           # of the last bad step
    passed_over: int = 0                     # batches between a step's number and that of its batch, from now on
    rewinds: int = 1
    most: int = 1


class CheckpointFailed(RunWarning):
    """The checkpoint of `step` could not be written; training goes on."""

    about = "checkpoint_failed"
    why: str
    folder: str = ""
    last: bool = False                       # no later checkpoint will be tried
    code: str = ""                           # of the system's error: "ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "EACCES"
    free_bytes: int | None = None            # where the disk is full
    needed_bytes: int | None = None

    @property
    def cure(self) -> str:
        """Return what to do about this error of the disk."""
        needed = f"a checkpoint takes {memory(self.needed_bytes)}" if self.needed_bytes is not None else ""
        if self.code in CURES:
            return CURES[self.code].format(folder=self.folder, needed=needed)
        if self.free_bytes is None or self.needed_bytes is None:
            return f"Make {self.folder} writable again"
        return f"Free some disk space: {memory(self.free_bytes)} are left, {needed}"

    @property
    def sentence(self) -> str:
        then = "The final model is still to be written" if self.last else "Training goes on; the next save tries again"
        return f"the checkpoint of step {self.step:,} could not be saved: {self.why}. {then}. {self.cure}"


# what to do about errors that free space on the disk does not end, with the folder and what a checkpoint takes
CURES = {
    "EDQUOT": "Your disk quota is used up: delete files of yours on the disk of {folder}, or ask for a larger quota; {needed}",
    "EFBIG": "The system limits the size of a file: raise the limit (`ulimit -f unlimited`), then continue the run; {needed}",
    "EIO": "The disk of {folder} reports an input or output error: look at `dmesg`, and copy the run to another disk",
    "EROFS": "The file system of {folder} is read-only now: mount it for writing again (after an error, look at `dmesg` first)",
    "EACCES": "This user may not write in {folder} any more: give the permission back (chmod or chown)",
    "EPERM": "This user may not write in {folder} any more: give the permission back (chmod or chown)",
}


class CheckpointNotDeleted(RunWarning):
    """An older checkpoint could not be deleted."""

    about = "checkpoint_not_deleted"
    says = ("step {step:,} is saved, but an older checkpoint could not be deleted: {why}. {folder} takes more disk space than "
            "planned")
    why: str
    folder: str


class CheckpointRejected(RunWarning):
    """A checkpoint did not verify, so the run went on from an older one."""

    about = "checkpoint_rejected"
    says = "the checkpoint {name} was not used: {why}"
    name: str
    why: str


class LittleDisk(RunWarning):
    """The disk has too little room for the checkpoints of the run and its final model."""

    about = "little_disk"
    free_bytes: int
    needed_bytes: int
    checkpoints: int                         # that are kept
    frees: Mapping[str, int] = field(default_factory=dict)   # bytes of what might be deleted, by path

    @property
    def sentence(self) -> str:
        return (f"the disk has {memory(self.free_bytes)} free, but {self.checkpoints} kept checkpoints, the best one, a new "
                f"one and the final model take {memory(self.needed_bytes)}. Free some space, or use save_total_limit=1"
                + _might_go(self.frees))


class SaveWaits(RunWarning):
    """The disk has no room for the checkpoint of `step`: training goes on, and a checkpoint is saved once there is room."""

    about = "save_waits"
    free_bytes: int
    needed_bytes: int
    frees: Mapping[str, int] = field(default_factory=dict)   # bytes of what might be deleted, by path

    @property
    def sentence(self) -> str:
        return (f"the checkpoint of step {self.step:,} waits for disk space: {memory(self.free_bytes)} are free, and it takes "
                f"{memory(self.needed_bytes)}. Training goes on, and saves as soon as there is room" + _might_go(self.frees))


def _might_go(frees: Mapping[str, int]) -> str:
    named = ", ".join(f"{path} ({memory(size_bytes)})" for path, size_bytes in frees.items())
    return f". What might be deleted: {named}" if named else ""


class Straggler(RunWarning):
    """One process takes longer for its passes than the others, and not because it computes more tokens."""

    about = "straggler"
    rank: int
    host: str = ""                           # name of its machine
    part: str = ""                           # data, copy, forward or backward: where most of the difference lies
    own_s: float = 0.0                       # of its own part of a step, before the first sum
    usual_s: float = 0.0                     # of the median process

    @property
    def sentence(self) -> str:
        return (f"process {self.rank} on {self.host} holds the others up: its own part of a step takes {self.own_s * 1e3:,.0f} "
                f"ms, and that of the median process {self.usual_s * 1e3:,.0f} ms; it does not have more tokens to compute. "
                f"Most of the difference lies in {self.part}")


class EventsWaiting(RunWarning):
    """events.jsonl cannot be written; events wait in memory."""

    about = "events_waiting"
    says = ("events.jsonl cannot be written ({why}). Training goes on; the events are kept in memory until the file can be "
            "written")
    why: str


class ListenerFailed(RunWarning):
    """Whoever was shown the events raised an error; training goes on."""

    about = "listener_failed"
    says = "the display of the run failed ({why}). Training goes on; events.jsonl has every event"
    why: str


class TechniqueNote(Note):
    """What a technique found when it was applied to this model."""

    about = "technique"
    technique: str


class SavedAtOnce(Note):
    """There is no memory for a copy of what a checkpoint holds, so the training waits while checkpoints are written."""

    about = "saved_at_once"
    free_bytes: int
    needed_bytes: int

    @property
    def sentence(self) -> str:
        return (f"checkpoints are written while the training waits: a copy of what they hold takes "
                f"{memory(self.needed_bytes)} of memory, and {memory(self.free_bytes)} are free beside what a step takes")


class SaveInterval(Note):
    """The interval of save_steps=auto, chosen when the checkpoint of `step` was on the disk."""

    about = "save_interval"
    steps: int                               # optimizer steps from one save to the next
    step_s: float                            # of the median step
    saving_s: float                          # that the training waited for the first save
    save_every_s: float                      # of the recipe

    @property
    def sentence(self) -> str:
        return (f"save_steps=auto saves every {self.steps:,} steps: the training waited {self.saving_s:.2g} s for the first "
                f"checkpoint, and about {self.steps * self.step_s:,.0f} s of training lie between two")


# every class above that is a kind of its own, in the order of this file
KINDS: tuple[type[Event], ...] = tuple(found for found in list(globals().values())
                                       if isinstance(found, type) and issubclass(found, Event) and found.kind)
