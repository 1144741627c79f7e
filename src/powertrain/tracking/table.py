"""The trackers by name: which library each needs, and which file here speaks to it."""

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean
from powertrain.tracking.tracker import Tracker


@dataclass(frozen=True)
class Kind:
    """One tracker: what its library is called for Python, and the extra of powertrain that installs it."""

    library: str
    extra: str
    project_variable: str                    # the variable that names a project for other trainers
    cures: Mapping[str, str] = field(default_factory=dict)       # of errors of the library, by the name of their class
    # for its process, where the user's own do not say otherwise; {folder} is the run's folder for trackers
    variables: Mapping[str, str] = field(default_factory=dict)

    def cure_of(self, error: Exception) -> str | None:
        """Return what a person has to do about an error; None where it may pass by itself."""
        names = [cls.__name__ for cls in type(error).__mro__]
        return next((cure for name, cure in self.cures.items() if name in names), None)


LOG_IN = "run `wandb login`, or set WANDB_MODE=offline to write to the run's folder only"
TRACKERS: Mapping[str, Kind] = {
    "tensorboard": Kind("tensorboard", "tensorboard", ""),
    "wandb": Kind("wandb", "wandb", "WANDB_PROJECT", {"AuthenticationError": LOG_IN, "UsageError": LOG_IN},
                  {"WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": "{folder}/wandb"}),
    "mlflow": Kind("mlflow", "mlflow", "MLFLOW_EXPERIMENT_NAME",
                   {"ModuleNotFoundError": "set MLFLOW_TRACKING_URI to a server, such as http://localhost:5000"},
                   {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
                    "MLFLOW_DISABLE_TELEMETRY": "true"}),
    "trackio": Kind("trackio", "trackio", "TRACKIO_PROJECT"),
}


def check_installed(names: Iterable[str]) -> None:
    """Raise WrongUse for a tracker that nobody knows, or whose library is not installed. Imports none of them."""
    for name in names:
        if name not in TRACKERS:
            raise WrongUse(f"there is no tracker {name[:40]!r}{did_you_mean(name, TRACKERS)}; there are {', '.join(TRACKERS)}")
        kind = TRACKERS[name]
        if importlib.util.find_spec(kind.library) is None:
            raise WrongUse(f"{name} is not installed; `pip install 'powertrain[{kind.extra}]'` installs it")


def class_of(name: str) -> type[Tracker]:
    """Load a tracker's library; return the class that opens the tracker for a run."""
    cls: type[Tracker] = importlib.import_module(f"powertrain.tracking.{name}").Opened
    return cls
