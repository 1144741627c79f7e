"""A loss that fell and then stayed: the steps after that brought nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from powertrain.diagnosis.robust import median_error, windows
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom
from powertrain.records.findings import Cure, Finding, Risk
from powertrain.records.timeline import RISEN_SHARE, held_out_trend

LEAST = 100                  # steps: in fewer, a flat half is a few steps
FLAT_GAIN = 0.01             # of all that was gained: less, in a whole half of the run, is nothing
RESOLVED = 0.1               # of the gain: where noise hides more than that, flat cannot be told from falling
SURE = 3.0                   # standard errors: medians that differ by less may be equal
GROUPS = 12                  # of neighbouring steps, whose medians are compared
HIGH_RATE = 0.3              # of its peak: a learning rate that high at the plateau may be what holds the loss up


class LatePlateau(Symptom):
    """Looked for is half a run or more without gain. A schedule that ends is flat at its end, and no plateau."""

    name = "late_plateau"
    rests_on = "fact: the losses of the run's steps"
    gives_way_to = frozenset({"not_finite", "divergence", "nothing_trained", "uniform_loss", "no_progress", "overfitting",
                              "vanishing_gradients"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        losses = run.losses
        if len(losses) < LEAST or (place := _flat_from(losses)) is None or _learns_held_out(run):
            return
        began, share = run.steps[place], 1 - place / len(losses)
        rate = began["learning_rate"] / run.recipe.learning_rate
        held_up = rate >= HIGH_RATE and run.recipe.lr_scheduler_type == "constant"
        width = len(losses) // GROUPS
        first, then, last = (median(part) for part in (losses[:width], losses[place:place + width], losses[-width:]))
        because = f"the learning rate stayed at {rate:.0%} of its peak, and steps that large may not settle" if held_up else \
            "there was nothing left for this model to learn from this data at this learning rate"
        yield cls.found(
            "low", f"the last {share:.0%} of the steps brought nothing: the loss stayed at {last:.4g}",
            f"it fell until about step {began['step']:,} and stayed there for {len(losses) - place:,} steps; {because}",
            [f"medians of {width} steps: {first:.4g} at the beginning, {then:.4g} from step {began['step']:,}, {last:.4g} at "
             "the end", f"learning rate {began['learning_rate']:.3g} at step {began['step']:,}"],
            Cure("let the learning rate fall", words=("lr_scheduler_type=cosine",)) if held_up else
            Cure("end it there", words=(f"max_steps={began['step']}",)),
            expected="a lower loss at the end" if held_up else f"the same loss in {1 - share:.0%} of the time",
            basis="none" if held_up else "measured: the losses of this run", risk=Risk(accuracy="low"))


def _flat_from(losses: Sequence[float]) -> int | None:
    """The place from which on the loss stays, if that is in the first half; else None."""
    width = len(losses) // GROUPS
    levels = windows(losses, width)[-GROUPS:]
    gain, error = levels[0] - levels[-1], 2**0.5 * median_error(losses[-width:])
    if gain <= 0 or SURE * error > RESOLVED * gain:
        return None
    enough = max(SURE * error, FLAT_GAIN * gain)
    apart = [number for number, level in enumerate(levels) if abs(level - levels[-1]) > enough]
    first = apart[-1] + 1 if apart else 0
    return first * width if first <= GROUPS // 2 else None


def _learns_held_out(run: RunRecord) -> bool:
    """Whether the held-out loss, which no noise of single batches moves, fell in the second half."""
    if (held_out := held_out_trend(run.history)) is None:
        return False
    before = [loss for step, loss in held_out.all if step <= run.last_step / 2]
    return not before or before[-1] - held_out.all[-1][1] > RISEN_SHARE * held_out.best[1]
