"""The events of a run's trackers."""

from powertrain.records.event import Event, RunWarning


class TrackerReady(Event):
    """A tracker takes the run's events, in a process beside the training."""

    kind = "tracker"
    tracker: str
    place: str = ""                          # where the run is to be seen there: a folder or an address


class TrackerFailed(RunWarning):
    """A tracker does not take the run's events. They are in events.jsonl, and it is tried again."""

    about = "tracker_failed"
    tracker: str
    why: str
    cure: str | None = None                  # what a person has to do

    @property
    def sentence(self) -> str:
        cure = f". {self.cure[0].upper()}{self.cure[1:]}" if self.cure else ""
        return (f"{self.tracker} does not take the run's events: {self.why}{cure}. It is tried again; training is not touched, "
                f"and `powertrain track RUN --to {self.tracker}` sends later what is missing")
