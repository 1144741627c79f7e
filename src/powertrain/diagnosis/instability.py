"""The likely cause of a loss that broke away: gradient norm, clipping, learning rate, warm-up and precision at that step.

A loss jumps after an update that was too large: the learning rate was too high for these gradients, or the gradients were not
clipped. Events do not show with certainty which of them it was; the finding reports the figures, and the cure changes the one
that stands out.
Source: Goodfellow et al. 2016, 8.2.4 (cliffs and clipping); Goyal et al. 2017, 2.2 (warm-up).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from powertrain.diagnosis.run_record import RunRecord, is_finite
from powertrain.recipe.schema import METHOD_DEFAULTS, Recipe
from powertrain.records.findings import Cure

BEFORE_STEPS = 20            # looked at before the break
LAST_STEPS = 3               # of them: the ones that show what came
GROWN = 3.0                  # times: a gradient norm that large against the steps before it has grown
HIGH_RATE = 3.0              # times the method's default: a learning rate from which it is named as a cause
EARLY_SHARE = 0.1            # of the run: a break within it is one that a warm-up can prevent
LOWER = 3.0                  # a learning rate is lowered by so much where its default is no lower


@dataclass(frozen=True)
class Instability:
    because: str                             # the likely cause, as the end of a sentence
    evidence: tuple[str, ...]
    cure: Cure


def usual_rate(method: str) -> float:
    """Return the method's default learning rate."""
    return float(METHOD_DEFAULTS[method].get("learning_rate", Recipe.model_fields["learning_rate"].default))


def lower_rate(recipe: Recipe) -> float:
    """Return the method's default learning rate, or a third of the recipe's where that is no higher."""
    usual = usual_rate(recipe.method)
    return usual if recipe.learning_rate > usual else recipe.learning_rate / LOWER


def around(run: RunRecord, place: int) -> Instability:
    """Return the figures around `place`, the first bad one of `run.steps` (from 0), or their number where none follows."""
    recipe, number = run.recipe, run.steps[place].step if place < len(run.steps) else run.last_step + 1
    usual, last = usual_rate(recipe.method), run.steps[min(place, len(run.steps) - 1)]
    found: list[tuple[str, str, tuple[str, ...]]] = []       # the reason, the cure in words, the recipe words
    if recipe.max_grad_norm == 0:
        found.append(("the gradient was not clipped (max_grad_norm=0)", "clip the gradient's norm", ("max_grad_norm=1",)))
    if number <= max(EARLY_SHARE * run.total_steps, 2 * run.warmup_steps):
        share = max(0.03, 2 * run.warmup_steps / max(1, run.total_steps))
        why = f"it happened early, at step {number:,} of {run.total_steps:,}, " + (
            f"with {run.warmup_steps:,} steps of warm-up" if run.warmup_steps else "and there is no warm-up")
        words = (f"warmup_ratio={share:.2g}", *(["warmup_steps=null"] if recipe.warmup_steps is not None else []))
        # a share longer than that would no longer be a warm-up: then the rate itself is too high
        found.append((why, "add a warm-up of the learning rate", words) if share <= EARLY_SHARE else (why, "", ()))
    if recipe.learning_rate > HIGH_RATE * usual or not any(words for _, _, words in found):
        why = f"is high ({usual:g} is the default of method={recipe.method})" if recipe.learning_rate > usual else \
            "may be too high for this model and data"
        found.append((f"the learning rate of {recipe.learning_rate:g} {why}", "lower the learning rate",
                      (f"learning_rate={lower_rate(recipe):.2g}",)))
    if "fp16" in run.techniques:
        found.append(("fp16 overflows above 65,504", "", ()))
    rate = f"learning rate {last.learning_rate:.3g} at step {last.step:,} (its peak is {recipe.learning_rate:.3g})"
    cure = Cure(", and ".join(says for _, says, _ in found if says), words=tuple(word for *_, words in found for word in words))
    return Instability("; ".join(why for why, _, _ in found), (rate, *_growth(run, place)), cure)


def _growth(run: RunRecord, place: int) -> list[str]:
    """Return how much the gradient's norm had grown at that step."""
    found = [(step.step, float(step.grad_norm)) for step in run.steps[max(0, place - BEFORE_STEPS):place + 1]
             if is_finite(step.grad_norm)]
    if len(found) <= 2 * LAST_STEPS:
        return []
    before = median(norm for _, norm in found[:-LAST_STEPS])
    number, largest = max(found[-LAST_STEPS:], key=lambda one: one[1])
    growth = largest / before if before else 1.0
    if growth < GROWN:
        return [f"the gradient norm had not grown before it: {largest:.3g} at step {number:,}, {before:.3g} before"]
    return [f"the gradient norm grew {growth:.3g} times within {BEFORE_STEPS} steps: {before:.3g}, then {largest:.3g} at step "
            f"{number:,}"]
