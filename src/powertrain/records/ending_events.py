"""The events of a run's end: early by its held-out loss, whose weights the model has, and the end itself."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from powertrain.records import several
from powertrain.records.event import Event, Note

EARLY, LAST_STEP = "early_stopping", "last_step"         # End.because


class End(Event):
    """A session ended."""

    kind = "end"
    reason: str                              # "finished", "stopped" or "failed"
    because: str = ""                        # why it finished: EARLY or LAST_STEP; "" in older runs
    signal: str | None = None                # that stopped it
    seconds: float = 0.0
    clipped_steps: int = 0
    passes: Mapping[str, int] = field(default_factory=dict)      # replayed passes, by how they ran
    peak_memory_bytes: int | None = None     # of the process, or of the GPU's allocator
    not_saved: str | None = None             # why the last checkpoint is not on the disk
    not_mirrored: str | None = None          # what is not in the mirror yet, and why
    message: str = ""                        # of a failure, for people
    error: Mapping[str, Any] = field(default_factory=dict)       # of a failure: its kind and fields (UserError.fields)

    @property
    def state(self) -> str:
        """Return "finished", "failed" or "stopped (SIGINT)"."""
        return f"{self.reason} ({self.signal})" if self.signal else self.reason


class StoppedEarly(Note):
    """The run ends after `step`: its last evaluations have not lowered the held-out loss."""

    about = "stopped_early"
    in_row: int                              # evaluations that did not lower the loss
    threshold: float                         # nats, by more than which a loss has to be lower
    best_step: int
    best_loss: float
    loss: float                              # of this step
    total_steps: int                         # that the run would have had

    @property
    def sentence(self) -> str:
        more = f" by more than {self.threshold:g}" if self.threshold else ""
        return (f"the run ends early, at step {self.step:,} of {self.total_steps:,}: {several(self.in_row, 'evaluation')} in a "
                f"row did not lower the held-out loss{more}. It is {self.loss:.4f}, and was {self.best_loss:.4f} at step "
                f"{self.best_step:,}")


class BestModel(Note):
    """The checkpoint with the lowest held-out loss was looked for, and its weights are the model."""

    about = "best_model"
    best_step: int
    best_loss: float
    loss: float                              # of the last step, over the same examples
    evaluations: int

    @property
    def sentence(self) -> str:
        if self.best_step == self.step:
            return (f"the model has the weights of the last step, {self.step:,}: its held-out loss of {self.best_loss:.4f} is "
                    f"the lowest of {several(self.evaluations, 'evaluation')}")
        return (f"the model has the weights of step {self.best_step:,}: its held-out loss of {self.best_loss:.4f} is the "
                f"lowest of those whose checkpoint is here ({several(self.evaluations, 'evaluation')}). That of the last "
                f"step, {self.step:,}, is {self.loss:.4f}")
