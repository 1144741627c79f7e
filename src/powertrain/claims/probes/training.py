"""A recipe's training inside a probe: its own plan in force, and steps taken when the probe wants some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from powertrain.claims.probes.probe import seconds_of
from powertrain.recipe import resolve_words
from powertrain.run.prepare import Prepared, build_setup, prepare
from powertrain.training.loop import State, StepResult, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

WARM_UP = 4                                  # steps before anything is timed


@dataclass
class Training:
    prepared: Prepared
    setup: Setup
    state: State

    def steps(self, count: int, max_grad_norm: float | None = None) -> Iterator[StepResult]:
        """The next `count` optimizer steps, at a constant learning rate."""
        recipe = self.prepared.recipe
        schedule = Schedule("constant", recipe.learning_rate, self.state.step + count)
        return train(self.setup, self.state, schedule, recipe.max_grad_norm if max_grad_norm is None else max_grad_norm)

    def advance(self, count: int) -> None:
        """Take `count` steps and look at nothing."""
        for _ in self.steps(count):
            pass

    def step_s(self, count: int) -> float:
        """Seconds of one of the next `count` steps."""
        return seconds_of(lambda: self.advance(count), self.setup.device) / count

    @property
    def examples_per_step(self) -> int:
        return self.setup.train_batch_size


def open_training(words: Sequence[str], cache: Path, *, warm_up: int = WARM_UP) -> Training:
    """The recipe of `words` with its plan in force, a few steps done. Raises WrongUse for what cannot be trained."""
    prepared = prepare(resolve_words(words), cache, quiet)
    setup = build_setup(prepared)
    training = Training(prepared, setup, new_state(setup, prepared.recipe.weight_decay))
    training.advance(warm_up)
    return training


def quiet(text: str) -> None:
    """What prepare would say is not the probe's to repeat."""
