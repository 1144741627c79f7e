"""The record of a run, read from its folder: recipe, facts, plan, events, and its state."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from powertrain.recipe import Recipe
from powertrain.recipe.schema import COMPARING, COMPARING_RATES, METHOD_DEFAULTS
from powertrain.records import WrongUse
from powertrain.records.event_log import counted, read_all_events
from powertrain.records.events import End, Step
from powertrain.records.json_files import read_json
from powertrain.records.timeline import History, estimate_of, is_finite, read, steady
from powertrain.run.folder import existing, is_being_written, recipe_of

IDLE_LOAD = 0.75             # of a machine when a session began: above it, another process was at work
LEAST_STEPS = 20             # of a run: a curve of fewer has no shape that could be judged


@dataclass(frozen=True)
class RunRecord:
    folder: Path
    recipe: Recipe
    facts: Mapping[str, Any]                 # as facts.json has them; empty where the file is not there
    plan: Mapping[str, Any]
    history: History
    being_written: bool | None               # a process holds the run's lock; None where that cannot be told
    now: float                               # the time of day at which the folder was read

    @property
    def state(self) -> str:
        """Return "finished", "stopped", "failed", "running", "killed", or "unknown": no end, and no locks on this system."""
        return self.end.reason or {True: "running", False: "killed", None: "unknown"}[self.being_written]

    @property
    def end(self) -> End:
        """Return the end of the last session; where none was written, one without reason, message and error."""
        return self.history.ends or End(reason="")

    @cached_property
    def steps(self) -> list[Step]:
        """Return the steps whose loss is finite, in order."""
        return [step for step in self.history.steps if is_finite(step.loss)]

    @cached_property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @cached_property
    def norms(self) -> list[float]:
        """Return the finite gradient norms, before clipping."""
        return [step.grad_norm for step in self.steps if is_finite(step.grad_norm)]

    @cached_property
    def steady_steps(self) -> list[Step]:
        """Return the steps that have a time and are no warm-up of the machine."""
        return [self.history.steps[place] for place in steady(self.history)]

    @property
    def step_s(self) -> float | None:
        """Return the seconds of the median step; None where no step has a time."""
        return median(step.seconds for step in self.steady_steps) if self.steady_steps else None

    @property
    def estimate(self) -> Mapping[str, Any] | None:
        """Return the plan's estimate when the last session began."""
        return estimate_of(self.history, self.plan)

    @property
    def predicted_bytes(self) -> float:
        """Return the peak memory of a step as the plan predicted it; 0 where it is unknown."""
        return float(sum((self.estimate or {}).get("memory_bytes", {}).values()))

    @property
    def free_bytes(self) -> float:
        """Return the memory that was free before the run; 0 where it is unknown."""
        return float((self.facts.get("hardware") or {}).get("free_memory_bytes") or 0)

    @property
    def memory_share(self) -> float:
        """Return the share of the machine's memory that the process held at its peak; 0 where it is unknown."""
        machine_bytes = (self.facts.get("hardware") or {}).get("memory_bytes") or 0
        return float((self.end.peak_memory_bytes or 0) / machine_bytes) if machine_bytes else 0.0

    @property
    def total_steps(self) -> int:
        return self.history.start.total_steps

    @property
    def last_step(self) -> int:
        return self.history.steps[-1].step if self.history.steps else 0

    @property
    def steps_per_epoch(self) -> float | None:
        examples = (self.facts.get("data") or {}).get("examples")
        return examples / self.recipe.train_batch_size if examples else None

    @property
    def techniques(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the techniques in force, with their settings."""
        return {step["technique"]: step.get("settings") or {} for step in self.plan.get("steps") or []}

    @property
    def numbers(self) -> Mapping[str, Mapping[str, float]]:
        """Return the techniques in force, with the numbers that the planner's reasons rest on."""
        return {step["technique"]: step.get("numbers") or {} for step in self.plan.get("steps") or []}

    @property
    def warmup_steps(self) -> int:
        """Return the steps over which the learning rate rises."""
        recipe = self.recipe
        return round(recipe.warmup_ratio * self.total_steps) if recipe.warmup_steps is None else recipe.warmup_steps


def read_run(folder: Path, now: float | None = None) -> RunRecord:
    """Return the record of a run's folder.

    Raises WrongUse where the folder holds no run, a run that has not begun, or files that no run writes.
    """
    files = existing(folder)
    being_written = is_being_written(files)
    written = read_all_events(files.events)
    history = read(counted(written), written)
    if not history.sessions:
        cure = "it may write its first one soon" if being_written else f"`powertrain train --resume {folder}` goes on with it"
        raise WrongUse(f"{folder} holds a run without a single event, so there is nothing to diagnose; {cure}")
    facts, plan = (read_json(file) if file.is_file() else {} for file in (files.facts, files.plan))
    return RunRecord(folder, recipe_of(files), facts, plan, history, being_written,
                     time.time() if now is None else now)


def usual_rate(recipe: Recipe) -> float:
    """Return the default learning rate of the recipe's method, and of an objective that compares answers."""
    method = recipe.method
    if recipe.objective.name in COMPARING and method in COMPARING_RATES:
        return COMPARING_RATES[method]
    return float(METHOD_DEFAULTS[method].get("learning_rate", Recipe.model_fields["learning_rate"].default))
