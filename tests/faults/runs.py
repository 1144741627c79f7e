"""Small runs that faults hit, and what must hold after each: the same bytes, each step once, nothing left behind, words that
agree with the events."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forked import Commands, Ended
from layer import STOPPED

from adapted_models import make_base
from example_folders import chat_folder, json_lines
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.huggingface.folder import save_folder
from powertrain.records.checkpoints import newest_checkpoint
from powertrain.records.event_log import read_all_events, read_events
from powertrain.records.events import CheckpointFailed, End, ModelSaved, Saved, Step

# dropout, accumulation in unequal passes, 3 saves of which the first is deleted, 4 steps an epoch
RUN = ("train", "data=../world/text.txt", "model.family=gpt2", "model.layers=1", "model.width=32", "model.heads=2",
       "model.dropout=0.2", "data.tokenizer=char", "data.block=16", "train_batch_size=14", "techniques.micro_batch.examples=5",
       "max_steps=6", "learning_rate=3e-3", "save_steps=2", "save_total_limit=2", "eval_steps=3", "logging_steps=3",
       "data.max_chars=900", "sample.tokens=2", "sample.prompt=", "techniques.threads=off", "--output", "run")
AGAIN = (*RUN, "--continue")
STEPS = 6
TEXT = ("data", "prepare", *RUN[1:-2])
ROWS = ("data", "prepare", "model.path=../world/chat", "data=../world/rows.jsonl", "data.max_length=64")
MEASURED = ("plan", *RUN[1:-2])
CODES = (0, 1, 2, 3, 75)
TEMPORARY = re.compile(r"\.tmp|\.building-|unfinished|\.draft$")
STOPPED_BETWEEN = {"step-000002", "step-000003"}
DONE_AND_SAVED = {"finished": 0, "stopped": 75}

T = TypeVar("T")
Few = Callable[[Sequence[T], int], list[T]]      # of the fixtures of conftest.py
Count = Callable[[str, int], None]


@dataclass
class World:
    """A folder with what runs read, a process that forks commands, and what an undisturbed run ends with."""

    root: Path
    commands: Commands
    unbroken: dict[str, Any] = field(default_factory=dict)
    calls: int = 0           # that the undisturbed run makes to change files of its folder
    stores: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def folder(self, name: str, like: Path | None = None) -> Path:
        """Return an empty folder, or a copy of another one; an earlier one of that name is gone."""
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        if like is None:
            folder.mkdir(parents=True)
        else:
            shutil.copytree(like, folder, symlinks=True)
        return folder

    def run(self, words: Sequence[str], folder: Path, **more: Any) -> Ended:
        ended = self.commands.run(words, folder, within_s=120, **more)
        assert ended.code is not None, f"it did not end: {ended.said[-2000:]}"
        assert not ended.left_open, f"files left open: {ended.left_open}"
        assert not ended.orphans, f"processes left behind: {ended.orphans}"
        return ended

    def whole(self, words: Sequence[str], folder: Path, **more: Any) -> Ended:
        """Run a command that nothing disturbs."""
        ended = self.run(words, folder, **more)
        assert ended.code == 0, ended.said[-3000:]
        return ended


def make_world(root: Path, commands: Commands) -> World:
    """Make the text, the rows, the tiny model and the undisturbed run."""
    made = World(root, commands)
    inputs = made.folder("world")
    (inputs / "text.txt").write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)))
    json_lines(inputs / "rows.jsonl", [{"messages": [{"role": "user", "content": f"what is {i}"},
                                                     {"role": "assistant", "content": f"it is {i * i}"}]} for i in range(40)])
    tokenizer = open_example_tokenizer(chat_folder(root / "tokenizer"))
    save_folder(make_base("llama", vocabulary=330, context=96), inputs / "chat", tokenizer)
    whole = made.folder("whole") / "run"
    made.calls = calls_of(made, RUN, whole.parent, whole)
    made.unbroken = of_run(whole)
    return made


def calls_of(world: World, words: Sequence[str], folder: Path, root: Path, **more: Any) -> int:
    """Return how many calls an undisturbed operation makes."""
    found = world.whole(words, folder, fault={"roots": [str(root)]}, **more).calls
    assert found > 5
    return found


def stop(world: World, name: str, **more: Any) -> tuple[Path, Ended]:
    """Return a folder with a run that SIGTERM stopped between two saves, and how its command ended.

    The signal comes as the first save begins, and the next step is the last one: there are checkpoints of the steps 2 and 3.
    """
    for call in range(1, 9):                 # the first one makes the folder of the checkpoints, before the run listens
        folder = world.folder(name)
        ended = world.run(RUN, folder, fault=STOPPED.at(call, folder / "run" / "checkpoints"), **more)
        if ended.code == 75 and {path.name for path in (folder / "run" / "checkpoints").iterdir()} == STOPPED_BETWEEN:
            return folder, ended
    raise AssertionError(f"no signal stopped the run between two saves: {ended.code} {ended.said[-2000:]}")


def of_run(run: Path) -> dict[str, Any]:
    """Return what must be the same whatever happened: the model, the newest checkpoint, each step with loss and norm."""
    newest, rejected = newest_checkpoint(run / "checkpoints")
    assert newest is not None
    assert not rejected, rejected
    steps = [event for event in read_events(run / "events.jsonl") if isinstance(event, Step)]
    model = {f"model/{path.name}": path.read_bytes() for path in (run / "model").iterdir()}
    return {**model, **{path.name: path.read_bytes() for path in newest.glob("*.safetensors")},
            "steps": [(step.step, step.loss, step.grad_norm) for step in steps]}


def check_ended(ended: Ended, run: Path, codes: Sequence[int] = CODES, earlier: int = 0) -> None:
    """Check a command that a fault has hit: a documented code, a sentence and no traceback, and events that say the same.

    `earlier` events are of other commands.
    """
    assert ended.code in codes, (ended.code, ended.said[-3000:])
    assert "Traceback" not in ended.said, ended.said[-3000:]
    sentences = [line for line in ended.said.splitlines() if line.startswith(("powertrain: ", "Error: "))]
    if ended.code in (1, 2, 3):
        assert sentences or (ended.code == 3 and "could not be saved" in ended.said), ended.said[-2000:]
    check_checkpoints(run)
    written = read_all_events(run / "events.jsonl")[earlier:]
    last = written[-1] if written else None
    if ended.code == 0:                      # nothing is promised that is not there
        assert isinstance(last, End)
        assert (last.reason, last.not_saved) == ("finished", None)
        assert any(isinstance(event, ModelSaved) for event in written)
    if ended.code == 75:
        assert isinstance(last, End)
        assert last.reason == "stopped"
        newest, _ = newest_checkpoint(run / "checkpoints")
        assert newest is not None
        assert newest.name == f"step-{last.step:06d}"
    if isinstance(last, End) and ended.code == 1:
        assert last.reason == "failed"
    for event in written:
        if isinstance(event, CheckpointFailed):
            assert f"step {event.step} could not be saved" in ended.said or ended.code < 0, ended.said[-2000:]


def check_checkpoints(run: Path) -> None:
    """Check that what is published is whole, and that what the events call saved was published or has been replaced."""
    newest, rejected = newest_checkpoint(run / "checkpoints")
    assert not rejected, rejected
    saved = [event.step for event in read_all_events(run / "events.jsonl") if isinstance(event, Saved)]
    if saved:
        assert newest is not None
        assert newest.name >= f"step-{max(saved):06d}"


def check_recovered(world: World, folder: Path, words: Sequence[str] = AGAIN, at: str = "run", **more: Any) -> None:
    """Check that the same command, given again, ends with the bytes of a run that nothing disturbed."""
    ended = world.whole(words, folder, **more)
    run = folder / at
    found = of_run(run)
    assert [step for step, *_ in found["steps"]] == [*range(1, STEPS + 1)]
    different = [name for name in world.unbroken if found.get(name) != world.unbroken[name]]
    assert found.keys() == world.unbroken.keys()
    assert not different, (different, ended.said[-2000:])
    last = read_all_events(run / "events.jsonl")[-1]
    assert isinstance(last, End)
    assert (last.reason, last.step, last.not_saved) == ("finished", STEPS, None)
    assert "finished at step 6" in ended.said
    check_tidy(folder)


def check_tidy(*folders: Path) -> None:
    left = [str(path) for folder in folders for path in folder.rglob("*") if TEMPORARY.search(path.name)]
    assert not left, f"temporary files left behind: {left}"


def contents(folder: Path, drop: Sequence[str] = ()) -> Mapping[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in drop}
