"""What the files of lm-eval's tasks could run, found before lm-eval reads them: a task from elsewhere is data, not code.

lm-eval itself runs Python that a task's file names (`!function`, also in a file that the task includes), scripts of the
evaluate library for a metric of another name than its own, and templates that reach any object of Python.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from powertrain.records import WrongUse
from powertrain.records.errors import first_line

SUFFIXES = (".yaml", ".yml")
CURE = "read that code, then allow it with --trust-task-code"


def task_files(folder: Path | None) -> list[Path]:
    """Return the YAML files in a folder of tasks. Raises WrongUse where there are none."""
    if folder is None:
        return []
    if not folder.is_dir():
        raise WrongUse(f"--tasks-folder {folder} is no folder; name the one with the tasks' YAML files")
    found = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    if not found:
        raise WrongUse(f"--tasks-folder {folder} holds no YAML file of a task")
    return found


def refuse_code(files: Iterable[Path], metrics: Iterable[str]) -> None:
    """Raise WrongUse where a task's file, or a file that it includes, would have lm-eval run code. `metrics`: lm-eval's own."""
    waiting, seen, known = [*files], set[Path](), set(metrics)
    while waiting:
        path = waiting.pop()
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        spec = _read(path)
        for name in _metrics_in(spec):
            if name not in known:
                raise WrongUse(f"the task {path} has the metric {name!r}, which lm-eval does not have itself: it would run a "
                               f"script of that name; {CURE}")
        waiting += [file for name in _files_in(spec) if (file := path.parent / name).is_file()]


def _read(path: Path) -> Any:
    if not path.is_file():
        raise WrongUse(f"there is no task file {path}")
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.constructor.ConstructorError as error:       # a tag that is not YAML's own, such as !function
        raise WrongUse(f"the task {path} has lm-eval run Python that lies beside it ({first_line(error)}); "
                       f"{CURE}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise WrongUse(f"the task {path} cannot be read ({first_line(error)}); mend or remove the file") from error


def _metrics_in(spec: Any) -> Iterator[str]:
    """Yield the metrics that a file names; one that is asked of the evaluate library by that library's name."""
    for value in _values(spec, "metric_list"):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and "metric" in one:
                yield f"evaluate/{one['metric']}" if one.get("hf_evaluate") else str(one["metric"])


def _files_in(spec: Any) -> Iterator[str]:
    """Yield what may be the name of a further file: what is included, and every text that ends as such a file does."""
    for value in _values(spec, "include"):
        yield from (str(one) for one in (value if isinstance(value, list) else [value]))
    yield from (text for text in _texts(spec) if text.endswith(SUFFIXES))


def _values(spec: Any, key: str) -> Iterator[Any]:
    """Yield what stands under a key, however deep."""
    if isinstance(spec, dict):
        yield from (value for name, value in spec.items() if name == key)
    for value in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from _values(value, key)


def _texts(spec: Any) -> Iterator[str]:
    if isinstance(spec, str):
        yield spec
    for value in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from _texts(value)


@contextlib.contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Let lm-eval render tasks' templates where they reach data only; in its own environment they could run anything."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    before = utils.env
    sandbox = SandboxedEnvironment(undefined=before.undefined, keep_trailing_newline=before.keep_trailing_newline)
    sandbox.filters |= before.filters
    utils.env = sandbox
    try:
        yield
    finally:
        utils.env = before
