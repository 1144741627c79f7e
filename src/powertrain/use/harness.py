"""Tasks of lm-eval, the evaluation harness, on a trained model: by name, or from files on this machine.

Nothing is downloaded for a task whose data are files here. A task's file that would have lm-eval run code is refused unless the
user has allowed it: see harness_files.py.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean, first_line
from powertrain.use.harness_files import SUFFIXES, refuse_code, sandboxed_templates, task_files
from powertrain.use.opening import OpenedModel

NO_HARNESS = 'evaluating on tasks needs lm-eval, which is not installed here; pip install "powertrain[lm-eval]"'


@dataclass(frozen=True)
class Result:
    """One metric of one task."""

    task: str
    metric: str                              # "acc", "word_perplexity", ...
    filter: str                              # of the answers, before the metric; "none"
    value: float
    error: float | None                      # standard error; None where lm-eval gives none
    examples: int
    shots: int
    version: str


def check_harness() -> None:
    """Raise WrongUse where lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise WrongUse(NO_HARNESS)


def run_tasks(opened: OpenedModel, names: Sequence[str], *, folder: Path | None = None, limit: int | None = None,
              shots: int | None = None, trusts_code: bool = False, templated: bool = False) -> list[Result]:
    """Return the results of the tasks. `limit`: examples of each; `shots`: examples in front of each question.

    Raises WrongUse for a task that is not there or cannot be read, and for a model that does not continue text.
    """
    check_harness()
    if opened.task != "causal":
        raise WrongUse(f"lm-eval's tasks are for models that continue text, and {opened.found.path} is a {opened.task} model; "
                       "measure it with --metric")
    files = [*task_files(folder), *(Path(name) for name in names if name.endswith(SUFFIXES))]

    from jinja2 import TemplateError
    from lm_eval.api.registry import metric_registry
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from powertrain.use.harness_model import HarnessModel

    if not trusts_code:
        refuse_code(files, metric_registry)
    model = HarnessModel(opened)
    with contextlib.redirect_stdout(sys.stderr), sandboxed_templates():      # what is printed meanwhile is progress
        manager = _manager(TaskManager, names, folder)
        try:
            found = simple_evaluate(model, tasks=[*names], task_manager=manager, limit=limit, num_fewshot=shots,
                                    log_samples=False, apply_chat_template=templated)
        except WrongUse:
            raise
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, TemplateError) as error:   # of a task's file or data
            raise WrongUse(f"the tasks {', '.join(names)} could not be run ({type(error).__name__}: {first_line(error)}); a "
                           "task whose data are not on this machine needs a network, or a file that names local "
                           "data") from error
    return [] if found is None else list(_results(found))


def _manager(kind: Any, names: Sequence[str], folder: Path | None) -> Any:
    """Return lm-eval's index of tasks: of the folder alone where all names are in it, which takes less time."""
    asked = [name for name in names if not name.endswith(SUFFIXES)]
    manager = kind(include_path=None if folder is None else str(folder), include_defaults=False)
    missing = [name for name in asked if name not in manager.all_tasks]
    if missing:
        manager = kind(include_path=None if folder is None else str(folder))
        missing = [name for name in asked if name not in manager.all_tasks]
    if missing:
        where = "" if folder is None else f", and {folder} has none of that name"
        raise WrongUse(f"lm-eval has no task {missing[0]!r}{where}; `lm-eval ls tasks` lists them, and a task's YAML file can "
                       f"be named too{did_you_mean(missing[0], manager.all_tasks, likeness=0.6)}")
    return manager


def _results(found: dict[str, Any]) -> list[Result]:
    results = []
    for task, metrics in found["results"].items():
        counted = found.get("n-samples", {}).get(task, {})
        for key, value in metrics.items():
            metric, _, named = key.partition(",")
            if not named or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{named}")
            results.append(Result(task, metric, named, float(value), float(error) if isinstance(error, int | float) else None,
                                  int(counted.get("effective", 0)), int(found.get("n-shot", {}).get(task, 0)),
                                  str(found.get("versions", {}).get(task, ""))))
    return results
