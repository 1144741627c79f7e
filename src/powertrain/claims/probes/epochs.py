"""Whether an epoch lasts as long as its examples divided by examples a second, as documents add it up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powertrain.claims.probes.probe import REPEATS, Context, Measured, Rounds, by_turns, medians, seconds_of
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import Training, open_training
from powertrain.evidence.stats import interval
from powertrain.training.evaluation import evaluate, spread

TENTH = 10


def measure(context: Context, *, words: Sequence[str], steps: int = 20, probe_steps: int = 10,
            repeats: int = REPEATS) -> Measured:
    """The wall time of an epoch of `steps` steps and an evaluation, over its examples at the examples a second of
    `probe_steps` steps. The evaluation reads a tenth as many examples as the epoch.
    """
    rounds, examples = apart(_rounds, words, context.cache, context.deadline, steps, probe_steps, repeats)
    names = ("examples over examples a second", "an epoch's wall time")
    value = interval([epoch_s / added_up_s for added_up_s, epoch_s in rounds])
    found = medians(rounds, names)
    return Measured(value, "of the time that was added up", *names,
                    {"seconds": found, "examples_per_s": steps * examples / found[names[0]]})


def _rounds(words: Sequence[str], cache: Path, deadline: float, steps: int, probe_steps: int,
            repeats: int) -> tuple[Rounds, int]:
    """(seconds added up, seconds of an epoch) and the examples of a step."""
    training = open_training(words, cache)
    rounds = by_turns([lambda: steps * training.step_s(probe_steps),
                       lambda: seconds_of(lambda: _epoch(training, steps), training.setup.device)], deadline, repeats)
    return rounds, training.examples_per_step


def _epoch(training: Training, steps: int) -> None:
    training.advance(steps)
    held_out = spread(training.prepared.material.held_out, max(1, steps * training.examples_per_step // TENTH))
    if len(held_out):
        evaluate(training.setup, held_out, tokens_per_byte=None)
