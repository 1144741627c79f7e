"""How long saving keeps a run from training: real checkpoints, timed, times how often each arm writes one."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

from powertrain.claims.probes.probe import REPEATS, Context, Measured, Rounds, by_turns, seconds_of
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import open_training
from powertrain.evidence.stats import interval
from powertrain.training.checkpoint import save_checkpoint

PER = 1000                                   # steps


def measure(context: Context, *, words: Sequence[str], a: int = 50, b: int = 500, steps: int = 4,
            repeats: int = REPEATS) -> Measured:
    """By what share saving every b steps blocks less than every a steps, with our checkpoints (synced, with sha256).

    Detail: seconds blocked per 1000 steps, and their share of the wall time of both arms.
    """
    rounds = apart(_rounds, words, context.cache, context.deadline, context.folder / "saving", steps, repeats)
    less = [1 - blocked_s(values[1], b) / blocked_s(values[0], a) for values in rounds]
    save_s = statistics.median(seconds for values in rounds for seconds in values[:2])
    step_s = statistics.median(values[2] for values in rounds)
    names = (f"saved every {a} steps", f"saved every {b} steps")
    detail = {"save_s": save_s, "step_s": step_s}
    for name, every in zip(("a", "b"), (a, b), strict=True):
        blocked = blocked_s(save_s, every)
        detail |= {f"blocked_s_{name}": blocked, f"blocked_share_{name}": blocked / (blocked + PER * step_s)}
    return Measured(interval(less), "less time blocked", *names, detail)


def blocked_s(save_s: float, every: int) -> float:
    """Per 1000 steps."""
    return save_s * PER / every


def _rounds(words: Sequence[str], cache: Path, deadline: float, folder: Path, steps: int, repeats: int) -> Rounds:
    """Seconds of a save of each arm, and of a step."""
    training = open_training(words, cache)

    def save_s() -> float:
        training.advance(1)                  # each checkpoint is of a step of its own
        seconds = seconds_of(lambda: save_checkpoint(folder, training.state), training.setup.device)
        shutil.rmtree(folder)
        return seconds

    save_s()
    return by_turns([save_s, save_s, lambda: training.step_s(steps)], deadline, repeats)
