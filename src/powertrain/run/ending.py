"""Which step is a run's last, and whose weights its model has, where the losses on held-out text decide it.

Both rest on the evaluations during the run, which are of the same examples and in every checkpoint, and on nothing else: a run
that was killed and goes on decides the same. The last evaluation, of all held-out text, is not compared with them.
The rules are those of transformers' EarlyStoppingCallback and of its load_best_model_at_end.
"""

import math
from collections.abc import Mapping

from powertrain.recipe import Recipe, in_steps
from powertrain.records import WrongUse, events
from powertrain.records.checkpoints import by_loss


def check(recipe: Recipe, held_out: int, steps_per_epoch: float, total_steps: int) -> None:
    """Raise WrongUse where no evaluation could decide it. `held_out`: examples that are held out."""
    asked = next((f"{key}={value}" for key, value in (
        ("early_stopping_patience", recipe.early_stopping_patience), ("load_best_model_at_end", recipe.load_best_model_at_end or
                                                                      None)) if value is not None), None)
    if asked is None:
        if recipe.early_stopping_threshold:
            raise WrongUse(f"early_stopping_threshold={recipe.early_stopping_threshold:g} says which losses count as lower, "
                           "and nothing waits for one; set early_stopping_patience=3 too", keys=("early_stopping_threshold",),
                           cure=("early_stopping_patience=3",))
        return
    key = asked.partition("=")[0]
    if not held_out:
        raise WrongUse(f"{asked} compares losses on held-out text, and no example is held out; set data.validation_share=0.1, "
                       "or name held-out data with data.validation_source", keys=(key, "data.validation_share"))
    every = in_steps(recipe.eval_steps, steps_per_epoch)
    if not every or every >= total_steps:
        found = "asks for no evaluation" if not every else f"evaluates every {every:,} steps, and the run has {total_steps:,}"
        fitting = max(1, total_steps // 10)
        raise WrongUse(f"{asked} compares losses of evaluations during the run, and eval_steps={recipe.eval_steps} {found}; "
                       f"set eval_steps={fitting}", keys=(key, "eval_steps"), cure=(f"eval_steps={fitting}",))


def without_improvement(evaluations: Mapping[int, float], threshold: float) -> int:
    """Return how many of the last evaluations in a row did not lower the loss by more than `threshold`."""
    lowest, in_row = math.inf, 0
    for _, loss in sorted(evaluations.items()):
        in_row = 0 if lowest - loss > threshold else in_row + 1
        lowest = min(lowest, loss)
    return in_row


def early_stop(recipe: Recipe, evaluations: Mapping[int, float], total_steps: int) -> events.StoppedEarly | None:
    """Return the end of the run after its last evaluation, where patience is at its end; else None."""
    patience, threshold = recipe.early_stopping_patience, recipe.early_stopping_threshold
    if patience is None or (in_row := without_improvement(evaluations, threshold)) < patience:
        return None
    step = max(evaluations)
    best = next(iter(by_loss(evaluations, evaluations)), step)
    return events.StoppedEarly(step=step, in_row=in_row, threshold=threshold, best_step=best, best_loss=evaluations[best],
                               loss=evaluations[step], total_steps=total_steps)
