"""What happens before the first step, and how far it is: events for listeners; most come before a run has a folder."""

from collections.abc import Callable

from powertrain.records.event import Told


class Phase(Told):
    """Something that takes a while begins, or is so far."""

    kind = "phase"


class LookingAtMachine(Phase):
    """Devices, memory and speeds are read; what was measured before comes from the cache."""

    about = "machine"
    says = "looking at the machine (measured once, then cached)"


class ReadingData(Phase):
    """Text is read and tokenised."""

    about = "reading"
    says = "reading {source}"
    source: str


class ReadingModel(Phase):
    """A pretrained model was found."""

    about = "model"
    says = "{path}: {because}"
    path: str
    because: str                             # how it is trained, and why so


class Tokenising(Phase):
    """Rows are tokenised; a second such event comes after some seconds, with what is done."""

    about = "tokenising"
    says = "tokenising {source}"
    source: str
    rows: int = 0                            # done
    rows_per_s: float | None = None          # None at the beginning

    @property
    def sentence(self) -> str:
        """Return the progress for people."""
        if self.rows_per_s is None:
            return super().sentence
        return f"{self.source}: {self.rows:,} rows tokenised, {self.rows_per_s:,.0f} rows/s"


class TokenisingAlone(Phase):
    """One of the processes that tokenise has failed."""

    about = "tokenising_alone"
    says = "one of the processes that tokenise has failed ({why}); the others do its rows"
    why: str


class Building(Phase):
    """The model is built, and the plan applied to it."""

    about = "building"
    says = "building the model ({parameters:,} parameters)"
    parameters: int


class ScoringReference(Phase):
    """The frozen reference scores the answers of all examples, once for these examples and this model."""

    about = "reference"
    says = "scoring {examples:,} examples with the reference"
    examples: int


class Compiling(Phase):
    """Code is compiled, or comes from the cache: as the plan is applied, or in the first step."""

    about = "compiling"
    techniques: tuple[str, ...]              # that need it

    @property
    def sentence(self) -> str:
        """Return what is compiled, for people."""
        return f"compiling code for {', '.join(self.techniques)}, or taking it from the cache"


class TimingSteps(Phase):
    """A few steps are timed, to turn `train_time_s` into a number of steps."""

    about = "timing_steps"
    says = "timing a few steps, to choose how many fit into {seconds:g} s"
    seconds: float


Tell = Callable[[Phase], None]


def in_words(say: Callable[[str], None]) -> Tell:
    """Return who tells each phase as a sentence to `say`."""
    return lambda phase: say(phase.sentence)


def nobody(phase: Phase) -> None:
    """Hear of a phase and tell nobody."""
