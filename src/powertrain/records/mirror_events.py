"""The events of a run's mirror."""

from powertrain.records.event import Event, RunWarning


class MirrorReady(Event):
    """The run's mirror was written, read and cleared by a small object, before the first step."""

    kind = "mirror"
    address: str                             # of the run in the store
    seconds: float = 0.0


class Uploaded(Event):
    """A set of files is in the mirror, each object verified: the checkpoint of `step`, or the final model."""

    kind = "uploaded"
    name: str                                # "step-000120", "model" or "material"
    bytes: int = 0                           # of the files
    stored_bytes: int = 0                    # of the objects: fewer where files are compressed
    seconds: float = 0.0
    packing_s: float = 0.0                   # of these for compressing
    deleted: tuple[str, ...] = ()            # older checkpoints that the mirror no longer keeps


class UploadSkipped(Event):
    """A checkpoint was not uploaded, because a newer one waited before its turn came."""

    kind = "upload_skipped"
    name: str
    newer: str


class MirrorWaited(Event):
    """The training is over, and uploads are waited for."""

    kind = "mirror_waited"
    waiting: tuple[str, ...] = ()
    address: str = ""


class UploadFailed(RunWarning):
    """An upload failed. It is tried again: soon, or every few minutes where there is a `cure` that somebody has to apply."""

    about = "upload_failed"
    name: str = ""                           # of the set; "" for the mirror as a whole
    why: str
    cure: str | None = None
    address: str = ""
    first_step_waits_s: float | None = None  # for the mirror, before the training begins

    @property
    def sentence(self) -> str:
        what = (f"{self.name} could not be uploaded to {self.address}" if self.name else
                f"the mirror {self.address} cannot be used")
        if self.first_step_waits_s is not None:
            return f"{what}: {self.why}. It is tried again; the first step waits for it, up to {self.first_step_waits_s:.0f} s"
        then = (f"{self.cure[0].upper()}{self.cure[1:]}; it is tried again every few minutes" if self.cure else
                "It is tried again")
        return f"{what}: {self.why}. {then}. Training is not touched"


class WaitingRebuilt(RunWarning):
    """The waiting.json of a set that waits for its upload is damaged, and the files beside it tell what it said."""

    about = "waiting_rebuilt"
    name: str                                # of the set
    path: str                                # of the damaged file

    @property
    def sentence(self) -> str:
        return (f"{self.path} is damaged; what it said was found again in the files beside it, and {self.name} waits for its "
                "upload as before")


class UploaderGone(RunWarning):
    """The process that uploads has ended by itself."""

    about = "uploader_gone"
    code: int                                # its exit code; negative for a signal
    again: bool = True                       # it was started again

    @property
    def sentence(self) -> str:
        ended = f"was ended by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        then = "it was started again" if self.again else ("it is not started again; what waits stays on this disk, and "
                                                          "`powertrain checkpoints upload RUN` uploads it")
        return f"the process that uploads {ended}; {then}"
