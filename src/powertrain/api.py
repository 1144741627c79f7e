"""The Python API: train, plan and open models from notebooks and other programs. Loads no torch until a model is opened.

Training and planning happen in a process of their own, `powertrain ... --json`: what a plan sets for a whole process (threads,
precision, allocator) does not touch the program that asks, and its memory is free again afterwards. Errors are exceptions.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.records.errors import DONE, STOPPED_AND_SAVED, NotDurable, RunFailed, UserError, WrongUse, told_elsewhere
from powertrain.records.event import Event
from powertrain.records.event_log import from_line, read_events
from powertrain.records.json_files import read_json

if TYPE_CHECKING:
    from powertrain.use.opening import OpenedModel

Recipe = str | Path | Mapping[str, Any] | None           # a name or a file; or the values themselves, over the default recipe
OnEvent = Callable[[Event], None]
LAST_WORDS = 400             # characters of what a process printed before it died


@dataclass(frozen=True)
class Run:
    """A run on the disk. `Run("runs/first")` raises WrongUse where there is none."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        from powertrain.run.folder import existing

        object.__setattr__(self, "path", existing(Path(path)).path.resolve())

    def events(self) -> list[Event]:
        """Return everything that happened and counts, in order: see `powertrain.events` for the kinds."""
        return read_events(self.path / "events.jsonl")

    @property
    def state(self) -> str:
        """Return "finished", "running", "killed", "failed" or "stopped (SIGINT)"."""
        from powertrain.run.folder import RunFolder, summarise

        return summarise(RunFolder(self.path)).state

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe's values by dotted key, with those that were derived."""
        from powertrain.run.folder import RunFolder, stored_recipe

        return {key: value for key, (value, _) in stored_recipe(RunFolder(self.path)).items()}

    @property
    def plan(self) -> Mapping[str, Any]:
        """Return plan.json."""
        return read_json(self.path / "plan.json")

    @property
    def model(self) -> Path | None:
        """Return the folder of the final model or adapter; None where the run has none yet."""
        folder = self.path / "model"
        return folder if folder.is_dir() else None

    def resume(self, values: Mapping[str, Any] | None = None, *, processes: int = 1, on_event: OnEvent | None = None) -> "Run":
        """Continue the run; return it when it has ended. `values` may change when something is saved or shown."""
        return _trained(["--resume", str(self.path), *_words(values or {})], processes, on_event)


@dataclass(frozen=True)
class Planned:
    """What `powertrain.plan` found: nothing was trained."""

    recipe: Mapping[str, Any]                # whole, with what was derived
    on: Mapping[str, str]                    # techniques in force -> reason
    off: Mapping[str, str]                   # the others -> reason
    total_steps: int | None                  # None where the recipe gives a time
    step_s: tuple[float, float] | None       # expected seconds of a step, from and to
    needed_bytes: int                        # predicted memory at the peak
    room_bytes: int                          # memory that is free
    facts: Mapping[str, Any]                 # of machine, software, model and data, with their sources
    notes: Sequence[str]

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.room_bytes


class Model:
    """An open model. `opened` is what the rest of powertrain works with."""

    def __init__(self, opened: "OpenedModel") -> None:
        self.opened = opened

    def generate(self, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int | None = None,
                 top_p: float | None = None, seed: int = 0) -> str:
        """Return the text that the model writes after the prompt; temperature 0 always takes the most likely token."""
        from powertrain.use.conversation import continuation
        from powertrain.use.generation import Sampling

        return "".join(continuation(self.opened, prompt, Sampling(tokens, temperature, top_k, top_p, seed)))

    def answer(self, message: str, *, system: str | None = None, tokens: int = 512, temperature: float = 0.7,
               top_k: int | None = None, top_p: float | None = None, seed: int = 0) -> str:
        """Return the answer to one message, through the model's chat template."""
        from powertrain.use.conversation import Conversation
        from powertrain.use.generation import Sampling

        _, pieces = Conversation(self.opened, Sampling(tokens, temperature, top_k, top_p, seed), system).ask(message)
        return "".join(pieces).strip()


def train(recipe: Recipe = None, values: Mapping[str, Any] | None = None, *, output: str | Path | None = None,
          processes: int = 1, on_event: OnEvent | None = None) -> Run:
    """Train a model; return the run when it has ended.

    `recipe` is the name of one that ships, a YAML file, or its values; `values` replace values of it, by the recipe's keys:
    {"data": "rows.jsonl", "lora": {"r": 32}}. `on_event` gets each event as it happens. An interrupt (Ctrl-C) stops and saves:
    the run is returned, and its state is "stopped (SIGINT)".

    Raises WrongUse for a recipe that cannot be used, RunFailed where the run had begun, NotDurable where the model is trained
    and not wholly on the disk; all are UserError.
    """
    words = [*_recipe_words(recipe), *_words(values or {})]
    return _trained([*words, *(["--output", str(output)] if output is not None else [])], processes, on_event)


def plan(recipe: Recipe = None, values: Mapping[str, Any] | None = None, *, processes: int = 1, machine: str | None = None
         ) -> Planned:
    """Return what training would do, and why: techniques, memory and time. `machine` is one that is not here, "8xh100"."""
    words = [*_recipe_words(recipe), *_words(values or {}), *(["--machine", machine] if machine else [])]
    with _command(["plan", *words, *_processes(processes)]) as lines:
        (found,) = (line for line in lines if line["event"] == "plan")
    decided, memory = found["plan"], found["memory"]
    estimate = decided.get("estimate") or {}
    return Planned(found["recipe"], {step["technique"]: step["because"] for step in decided["steps"]},
                   {one["technique"]: one["because"] for one in decided["refused"]}, found["total_steps"],
                   tuple(estimate["step_s"]) if estimate else None, memory["needed_bytes"], memory["room_bytes"],
                   found["facts"], found["notes"])


def open_model(path: str | Path | Run, *, base: str | None = None, provider: str | None = None) -> Model:
    """Open the model of a run, of a folder, of an adapter or of the hub, on the GPU if there is one, frozen. Loads torch."""
    from powertrain.use.opening import open_model as opened

    return Model(opened(str(path.path if isinstance(path, Run) else path), base=base, provider=provider, writes=True))


# ------------------------------------------------------------------------------------------------ the command


def _recipe_words(recipe: Recipe) -> list[str]:
    return _words(recipe) if isinstance(recipe, Mapping) else [] if recipe is None else [str(recipe)]


def _words(values: Mapping[str, Any]) -> list[str]:
    """Return values as the command line takes them: KEY=JSON."""
    from powertrain.recipe import flat, quoted

    plain = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    try:
        return [f"{key}={quoted(value)}" for key, value in flat(plain)]
    except TypeError as error:
        raise WrongUse(f"a value of a recipe is text, a number, true or false, a list or a table of these: {error}") from None


def _processes(processes: int) -> list[str]:
    return ["--processes", str(processes)] if processes != 1 else []


def _trained(words: Sequence[str], processes: int, on_event: OnEvent | None) -> Run:
    folder: str | None = None
    with _command(["train", *words, *_processes(processes)], passes_interrupts=True) as lines:
        for line in lines:
            folder = {"folder": line.get("path"), "result": line.get("folder")}.get(line["event"], folder)
            if on_event is not None and line["event"] not in ("result", "tracker_missing"):
                on_event(from_line(line))
    assert folder is not None                # of a run that has ended without an error
    return Run(folder)


@contextlib.contextmanager
def _command(words: Sequence[str], *, passes_interrupts: bool = False) -> Iterator[Iterator[Mapping[str, Any]]]:
    """Run a command of powertrain; give the objects that it prints. Raises the error that the command tells."""
    with tempfile.TemporaryFile() as said, subprocess.Popen(
            [sys.executable, "-m", "powertrain", *words, "--json"], stdout=subprocess.PIPE, stderr=said,
            stdin=subprocess.DEVNULL, text=True) as process, contextlib.ExitStack() as passing:
        if passes_interrupts:
            passing.enter_context(_interrupts_passed_to(process))
        errors: list[UserError] = []
        lines = _lines(process, errors)
        try:
            yield lines
        except BaseException:                # of the caller: the run stops and saves
            process.send_signal(signal.SIGINT)
            raise
        for _ in lines:                      # what nobody has read
            pass
        code = process.wait()
        if errors:
            raise errors[-1]
        if code not in (DONE, NotDurable.exit_code, STOPPED_AND_SAVED):
            said.seek(0)
            last = said.read().decode(errors="replace").strip()[-LAST_WORDS:]
            raise RunFailed(f"powertrain {words[0]} ended with code {code}: {last}")


@contextlib.contextmanager
def _interrupts_passed_to(process: subprocess.Popen[str]) -> Iterator[None]:
    """Pass interrupts to a command that stops and saves, whatever this process does at that moment, also within `on_event`.

    Other threads than the main one get no interrupts, and a caller who handles them in another way keeps that.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    # the command may have it from the terminal already: both count as one
    signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(process: subprocess.Popen[str], errors: list[UserError]) -> Iterator[Mapping[str, Any]]:
    """Yield what a command prints; errors go into a list."""
    assert process.stdout is not None
    for text in process.stdout:
        line = json.loads(text)
        if line["event"] == "error":
            errors.append(told_elsewhere(line))
        else:
            yield line
