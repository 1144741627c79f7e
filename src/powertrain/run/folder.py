"""A run on disk: what lies where, who may write it, and what it says of itself.

    recipe.yaml   resolved, each value with its origin          facts.json, plan.json
    events.jsonl  everything that happened                      checkpoints/step-000120/
    model/        the final model, a Hugging Face folder
"""

import contextlib
import datetime
import hashlib
import math
import random
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.machine import not_through_a_link
from powertrain.recipe import Recipe, Resolved, find_recipe, flat, read_yaml, resolve
from powertrain.records import WrongUse, origins
from powertrain.records.checkpoints import ABOUT, checkpoints_in, set_aside_after, what_is_wrong
from powertrain.records.errors import NAMED
from powertrain.records.event_log import read_events
from powertrain.records.events import End, Evaluated, Event, Start, Step
from powertrain.records.json_files import clear_abandoned, read_json, replace_file, sync, write_json
from powertrain.records.locks import got_lock
from powertrain.records.origins import Origin
from powertrain.records.timeline import last_of

RUNS = Path("runs")
NEWEST = "recipe:"           # model.path=recipe:NAME: the newest finished run of that recipe
# what may change between a run and its continuation: it decides when something is written, or what follows from bad numbers,
# and not what is learned from good ones
FREE_ON_RESUME = ("name", "description", "output_dir", "logging_steps", "save_steps", "save_every_s",
                  "save_total_limit", "on_disk_full", "mirror", "mirror_keep", "mirror_keep_every", "mirror_material",
                  "mirror_compress", "mirror_frees_disk", "eval_steps", "max_eval_samples", "sample", "memory_check",
                  "on_nan", "max_skipped_steps", "max_rewinds", "report_to", "project")
PATIENCE_S = 1.0             # others hold a lock for an instant when they look who has it: so long it is asked for again
BEGINNINGS = {".lock", "stacks", "checkpoints", "facts.json", "plan.json", "origins.json"}       # all before the recipe


@dataclass(frozen=True)
class _Inside:
    """The path of something in a run's folder."""

    name: str

    def __get__(self, folder: "RunFolder", _: "type[RunFolder]") -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    path: Path

    recipe = _Inside("recipe.yaml")
    origins = _Inside("origins.json")
    plan = _Inside("plan.json")
    facts = _Inside("facts.json")
    events = _Inside("events.jsonl")
    checkpoints = _Inside("checkpoints")
    model = _Inside("model")
    lock = _Inside(".lock")


@dataclass(frozen=True)
class RunSummary:
    """One line of `powertrain runs list`."""

    folder: Path
    name: str
    state: str                               # "finished", "stopped (SIGINT)", "failed", "running", "killed", "damaged"
    step: int = 0
    total_steps: int = 0
    loss: float | None = None                # of the last evaluation, else of the last step
    bits_per_byte: float | None = None
    tokens_per_s: float | None = None
    started: str = ""                        # local time
    began: float = 0.0                       # the same in seconds since 1970; 0 where it never began


# ------------------------------------------------------------------------------------------------ a new run


def create(recipe: Recipe) -> RunFolder:
    """Make the folder of a new run. Raises WrongUse if it cannot be written or holds another run."""
    path = Path(recipe.output_dir or RUNS)
    try:
        if recipe.output_dir:
            check_free(path)
        else:
            path = _new_folder(recipe.name)
        folder = RunFolder(path)
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        folder.lock.touch()
        with contextlib.suppress(PermissionError):       # a folder that may not be listed
            sync(path.parent)                # or a power failure might take the run with all its checkpoints
    except OSError as error:
        raise WrongUse(f"the output folder {path} cannot be written ({error.strerror}); name another one with "
                       "--output") from None
    return folder


def check_free(path: Path) -> None:
    """Raise WrongUse where a new run would find a file, another run or something else."""
    folder = RunFolder(path)
    if path.exists() and not path.is_dir():
        raise WrongUse(f"the output folder {path} is a file; name another folder with --output")
    # an empty folder is free, and what a run left that ended before its recipe was written; looked at first, for one may begin
    left = [entry.name for entry in path.iterdir() if not entry.name.endswith((".tmp", ".draft"))] if path.is_dir() else []
    if folder.recipe.exists() or folder.events.exists():
        raise WrongUse(f"{path} already holds a run; continue that run with `powertrain train --resume {path}`, or choose "
                       "another folder with --output")
    refuse_links(folder)
    if not BEGINNINGS.issuperset(left) or ("checkpoints" in left and any(folder.checkpoints.iterdir())):
        raise WrongUse(f"{path} is not empty and holds no run; name another folder with --output")


def _new_folder(name: str) -> Path:
    """Make a folder in `runs`. A run that begins in the same second gets another one."""
    stem, count = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}", 1
    RUNS.mkdir(parents=True, exist_ok=True)
    while True:
        path = RUNS / (stem if count == 1 else f"{stem}-{count}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            count += 1


def existing(path: Path) -> RunFolder:
    folder = RunFolder(path)
    if not folder.recipe.is_file():
        there = ("holds no run: recipe.yaml is missing" if path.is_dir() else
                 "is a file, and a run is a folder" if path.exists() else
                 "is an address, and this wants a run's folder" if ":" in path.parts[0] else "does not exist")
        raise WrongUse(f"{path} {there}; `powertrain runs list` shows the runs in {RUNS}/")
    return folder


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock inside: nobody else writes this run. The lock ends with the process, however the process ends."""
    with open(folder.lock, "a", opener=not_through_a_link) as file:    # what stands in it stays, for a monitor
        until_s = time.monotonic() + PATIENCE_S
        while (got := got_lock(file)) is False and time.monotonic() < until_s:
            time.sleep(random.uniform(0, 0.01))          # by chance, so as not to meet one who looks in steps
        if got is False:
            raise WrongUse(f"another process is training in {folder.path}; wait for it or stop it first")
        clear_abandoned(folder.path, ".*.tmp", after_s=-math.inf)        # whoever was writing them holds no lock any more
        yield


def is_being_written(folder: RunFolder) -> bool | None:
    """Return whether a process trains in it now; None on a system that cannot tell."""
    try:
        with open(folder.lock, opener=not_through_a_link) as file:
            got = got_lock(file, alone=False)           # let go at once: two may look at a time
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return None if got is None else not got


def trainer_here(folder: RunFolder) -> int | None:
    """Return the process of this machine that trains in it, or did last, by its lock; None where that is not known."""
    with contextlib.suppress(OSError, ValueError):
        pid, host, _ = folder.lock.read_text(errors="replace").split()
        return int(pid) if host == socket.gethostname() else None
    return None


# ------------------------------------------------------------------------------------------------ recipe and plan on disk


def write_beginning(folder: RunFolder, facts: Mapping[str, Any], plan: Mapping[str, Any], resolved: Resolved) -> None:
    """Write what a run is made of, each file whole or not at all, the recipe last: with recipe.yaml there is a run."""
    write_json(folder.facts, facts)
    write_json(folder.plan, plan)
    write_json(folder.origins, {key: origin.to_json() for key, origin in resolved.origins.items()})
    replace_file(folder.recipe, resolved.to_yaml().encode())


def stored_recipe(folder: RunFolder) -> dict[str, tuple[Any, Origin]]:
    """Return (value, origin) of each dotted key of a run's recipe, of this version or another. Raises WrongUse."""
    text, _ = find_recipe(str(folder.recipe))
    values = dict(flat(read_yaml(text, str(folder.recipe))))
    if not values:
        raise WrongUse(f"{folder.recipe} is empty; it was cut off or changed by hand")
    found = origins.from_json(read_json(folder.origins), str(folder.origins)) if folder.origins.is_file() else \
        origins.from_old_comments(text)
    if lacking := [key for key in found if key not in values]:       # a recipe that is cut off is one with fewer keys
        raise WrongUse(f"{folder.recipe} has no {', '.join(lacking[:NAMED])}, and origins.json beside it says where each came "
                       "from; the recipe was cut off or changed by hand: restore a copy of it")
    return {key: (value, found.get(key, Origin("unknown"))) for key, value in values.items()}


def recipe_of(folder: RunFolder) -> Recipe:
    """Return a run's recipe. Raises WrongUse as `stored_recipe` does: what a damaged one lacks would get the defaults."""
    stored_recipe(folder)
    return resolve(str(folder.recipe)).recipe


def continued(folder: RunFolder, overrides: list[str]) -> Resolved:
    """Return the run's own recipe with the values of `key=value` words that a continuation may change.

    These decide when something is written, and how processes share the run. Raises WrongUse that lists every other difference.
    """
    from powertrain.planner import says_shares
    from powertrain.run.belongings import found_again

    here = [*found_again(folder.path), *([] if "data.order" in stored_recipe(folder) else ["data.order=sorted"])]
    old = resolve(str(folder.recipe), here)
    new = resolve(str(folder.recipe), [*here, *overrides])
    before, after = (dict(flat(resolved.recipe.model_dump())) for resolved in (old, new))
    different = [f"{key}={after.get(key)} (the run has {before.get(key)})" for key in dict.fromkeys((*before, *after))
                 if before.get(key) != after.get(key) and key.partition(".")[0] not in FREE_ON_RESUME
                 and not says_shares(key.removeprefix("techniques."))]
    if different:
        raise WrongUse(f"{folder.path} cannot continue with another recipe: {', '.join(different)}. Leave these values out, or "
                       "start a new run with --output")
    return new


def check_whole(folder: RunFolder) -> None:
    """Raise WrongUse where a file that every run has from its beginning is missing or damaged, or one is a link."""
    refuse_links(folder)
    missing = [path.name for path in (folder.facts, folder.plan) if not path.exists()]
    if missing:
        raise WrongUse(f"{folder.path} has no {' and no '.join(missing)}, which a run writes before its first step; it cannot "
                       "be continued: copy the missing files back, or start a new run with another --output")
    read_json(folder.facts)
    read_json(folder.plan)
    stored_recipe(folder)
    _check_recipe(folder)


def check_step(folder: RunFolder, step: int) -> None:
    """Raise WrongUse where the run cannot go on from this step: it has no such checkpoint, or its model is written."""
    steps = checkpoints_in(folder.checkpoints)
    if step and step not in steps:
        there = f"it has those of the steps {', '.join(map(str, steps))}, and 0 is the beginning" if steps else "it has none"
        raise WrongUse(f"{folder.path} has no checkpoint of step {step}; {there}")
    if folder.model.exists():
        raise WrongUse(f"{folder.path} has its final model, which going back to step {step} would write again; move "
                       f"{folder.model} away first, or start a new run from this recipe: `powertrain train {folder.recipe}`")


def go_back(folder: RunFolder, step: int) -> list[int]:
    """Set the checkpoints of later steps aside, so that the run goes on from this one; return them. Raises WrongUse."""
    with locked(folder):
        check_step(folder, step)
        path = checkpoints_in(folder.checkpoints).get(step)
        if path is not None and (why := what_is_wrong(path)) is not None:
            raise WrongUse(f"{path} is not whole: {why}; `powertrain checkpoints verify {folder.path}` says which are")
        return set_aside_after(folder.checkpoints, step)


def _check_recipe(folder: RunFolder) -> None:
    """Raise WrongUse where the newest checkpoint was saved beside another recipe.yaml."""
    newest = max(checkpoints_in(folder.checkpoints).items(), default=None)
    if newest is None:
        return
    step, checkpoint = newest
    try:
        saved_beside = read_json(checkpoint / ABOUT).get("recipe_sha256")
    except (WrongUse, OSError):              # earlier versions wrote no such file; a damaged one tells nothing
        return
    if saved_beside not in (None, hashlib.sha256(folder.recipe.read_bytes()).hexdigest()):
        raise WrongUse(f"{folder.recipe} is not the recipe of step {step}: it was changed by hand or by a bad disk; restore a "
                       f"copy of it. What may change on the way is given as KEY=VALUE after `--resume {folder.path}`")


def refuse_links(folder: RunFolder) -> None:
    """Raise WrongUse where something in a run's folder is a link: continuing or pruning would write and delete elsewhere."""
    if links := sorted(path.name for path in folder.path.glob("*") if path.is_symlink()):
        raise WrongUse(f"{folder.path} has links for {', '.join(links[:NAMED])}, and a run writes and deletes in its own "
                       "folder; put in place of each link what it leads to")


def check_same(folder: RunFolder, resolved: Resolved) -> None:
    """Raise WrongUse where the run in `folder` was begun with other values than those given now. Open ones may be planned."""
    old = recipe_of(folder)
    stored, before = stored_recipe(folder), dict(flat(old.model_dump()))
    different = [f"{key}={value} (the run has {before.get(key)})" for key, value in flat(resolved.recipe.model_dump())
                 if value != before.get(key) and key != "output_dir" and stored[key][1].kind != "planner"]
    if different:
        raise WrongUse(f"{folder.path} was begun with another recipe: {', '.join(different)}. Give the same values, or name "
                       "another folder with --output")


def check_same_material(folder: RunFolder, data: str, base: str) -> None:
    """Raise WrongUse where the run was begun on other data, or beside another base, than are there now. Both are digests."""
    facts = read_json(folder.facts)
    for what, key, place, digest in (("on other data", "data", "source", data), ("beside another base", "model", "path", base)):
        found = facts.get(key)
        if isinstance(found, dict) and found.get("digest") not in (None, "", digest):
            raise WrongUse(f"{folder.path} was begun {what}: {found.get(place)} has changed since; restore it, or start a new "
                           "run with --output")


def is_complete(folder: RunFolder, events: Sequence[Event]) -> bool:
    """Return whether the run is finished, by its events, and its checkpoint and model are on the disk."""
    end = events[-1] if events else None
    return isinstance(end, End) and end.reason == "finished" and end.not_saved is None and folder.model.is_dir()


# ------------------------------------------------------------------------------------------------ runs that are there


def state_of(events: Sequence[Event], *, written: bool | None) -> str:
    """Return the state of a run with these events. `written`: a process trains in it now; None where nobody can tell."""
    ended = last_of(End, events)
    return ended.state if ended else "running or killed" if written is None else "running" if written else "killed"


def summarise(folder: RunFolder) -> RunSummary:
    """Return what the run's own events say of it. A folder without events was killed before its first step."""
    events = read_events(folder.events) if folder.events.is_file() else []
    steps = [event for event in events if isinstance(event, Step)]
    seconds = sum(step.seconds for step in steps)
    evaluation = last_of(Evaluated, events)
    start = next((event for event in events if isinstance(event, Start)), None) or Start(time=0.0)
    return RunSummary(
        folder=folder.path, name=start.name or folder.path.name,
        state=state_of(events, written=is_being_written(folder)),
        step=steps[-1].step if steps else 0, total_steps=start.total_steps,
        loss=evaluation.loss if evaluation else steps[-1].loss if steps else None,
        bits_per_byte=evaluation.bits_per_byte if evaluation else None,
        tokens_per_s=sum(step.real_tokens for step in steps) / seconds if seconds else None,
        started=datetime.datetime.fromtimestamp(start.time).strftime("%Y-%m-%d %H:%M") if start.time else "",
        began=start.time)


def list_runs(root: Path) -> list[RunSummary]:
    """Return the runs in a folder, the oldest first, those of the same instant by name. Damaged runs come before them."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        if (path / "recipe.yaml").is_file():
            try:
                found.append(summarise(RunFolder(path)))
            except WrongUse:
                found.append(RunSummary(path, path.name, "damaged"))
    return sorted(found, key=lambda run: (run.began, run.folder.name))


def newest_run(recipe_name: str) -> Path:
    """Return the folder of the newest finished run of a recipe. Raises WrongUse if there is none."""
    if not (finished := _finished_runs(recipe_name)):
        raise WrongUse(f"there is no finished run of the recipe {recipe_name} in {RUNS}/; "
                       f"`powertrain train {recipe_name}` makes one")
    return finished[-1]


def missing_base(recipe: Recipe) -> str | None:
    """Return the name of the recipe that has to be run before this one, or None."""
    path = recipe.model.path or ""
    name = path.removeprefix(NEWEST)
    return name if path.startswith(NEWEST) and not _finished_runs(name) else None


def _finished_runs(recipe_name: str) -> list[Path]:
    """Return the finished runs of the recipe's own model and data, the oldest first. A run with other words does not count."""
    asked = {key: value for key, value in flat(resolve(recipe_name).recipe.model_dump())
             if key.startswith(("model.", "data.")) and value is not None}

    def is_of_recipe(path: Path) -> bool:
        found = dict(flat(resolve(str(RunFolder(path).recipe)).recipe.model_dump()))
        return all(found[key] == value for key, value in asked.items())

    return [run.folder for run in list_runs(RUNS) if run.name == recipe_name and run.state == "finished"
            and (run.folder / "model" / "config.json").is_file() and is_of_recipe(run.folder)]
