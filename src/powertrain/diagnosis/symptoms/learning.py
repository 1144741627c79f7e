"""Symptoms in the loss curve: divergence, a loss of guessing, no progress, a plateau, overfitting, evaluations that lack."""

import math
from collections.abc import Iterator, Sequence
from statistics import median

from powertrain.diagnosis.curves import level, median_error, noise, window, windows
from powertrain.diagnosis.run_record import LEAST_STEPS, RunRecord, usual_rate
from powertrain.diagnosis.symptoms.gradients import around, lower_rate
from powertrain.diagnosis.wording import told
from powertrain.records.events import Evaluated
from powertrain.records.findings import Finding, rule
from powertrain.records.timeline import FALLING_SHARE, RISEN_SHARE, held_out_trend

# of divergence
LOST_SHARE = 0.25            # of what had been learned: less may be an unlucky stretch of the data ...
LEAST_RISE = 0.05            # ... and so may be less than this share of the lowest loss
AWAY_SHARE, AWAY_WINDOWS = 0.1, 2            # so far above the lowest level, for so many groups of steps: longer than a spike
SIGNIFICANT = 6.0            # standard errors of the two medians: one chance in a billion, of normal noise
# of learning rates and progress
NEAR_UNIFORM = 0.02          # of ln V: learning how often tokens occur, the first thing learned, already lowers it by more
LEAST_AFTER_WARMUP = 50      # steps: before that, a model from scratch may rightly still guess
LEAST_GAIN = 0.01            # of the first loss: less is no progress
FAR_RATE = 10.0              # times the method's default, up or down: such a learning rate is the likely cause
LEARNED = 0.1                # nats: a loss that begins below it leaves little to learn
RAISED = 3.0                 # factor by which an ordinary learning rate is raised
# of plateaus
PLATEAU_STEPS = 100          # in a shorter run, a flat half is a few steps
FLAT_GAIN = 0.01             # of the whole gain: a smaller gain in half of the run is none
RESOLVED = 0.1               # of the gain: where noise hides more than that, flat cannot be told from falling
SURE = 3.0                   # standard errors: medians that differ by less may be equal
GROUPS = 12                  # of neighbouring steps, whose medians are compared
HIGH_SHARE = 0.3             # of its peak: a learning rate that high at the plateau may hold the loss up
LAST_SHARE = 0.2             # of the steps, over which the training loss is compared where evaluations cannot be
# of evaluations
SERIOUS_RISE = 0.02          # of the lowest held-out loss: a larger rise makes the final model plainly the worse one
SEEN_AGAIN = 2.0             # epochs: from here on, memorising is possible, and only evaluations show it
EVALUATIONS = 10             # per run, enough to show when overfitting began


@rule("fact: a loss that rises for long has diverged", gives_way_to=("not_finite",))
def divergence(run: RunRecord) -> Iterator[Finding]:
    """The loss climbed away from its level and did not come back, or came back only after a large part of the run.

    Medians of groups of steps are compared, so that neither a spike nor noise looks like divergence.
    """
    if (found := _diverged(run.losses)) is None:
        yield from _came_back(run)
        return
    lowest, now, onset = found
    seen, first = around(run, onset), median(run.losses[:window(len(run.losses))])
    yield told("divergence.lasting", *seen.evidence, cure=seen.cure, lowest=lowest, last=now, step=run.steps[onset].step,
               gained=f"had fallen from {first:.4g} to {lowest:.4g}" if lowest < first else f"began at {first:.4g}",
               steps_after=len(run.losses) - onset, because=seen.because)


def _came_back(run: RunRecord) -> Iterator[Finding]:
    if (found := _away(run.losses)) is None:
        return
    first, until, low, high = found
    seen, share = around(run, first), (until - first) / len(run.losses)
    yield told("divergence.came_back", *seen.evidence, severity="critical" if share > LOST_SHARE else "moderate",
               cure=seen.cure, lowest=low, highest=high, steps_lost=until - first, step=run.steps[first].step, share=share,
               because=seen.because)


def _away(losses: Sequence[float]) -> tuple[int, int, float, float] | None:
    """Return the longest time away that ended: its first place, the place behind it, the level before, the highest level."""
    if len(losses) < LEAST_STEPS:
        return None
    width = window(len(losses))
    error, lowest = SIGNIFICANT * median_error(losses[-width:]), min(losses[:3])
    found, first = [], -1
    for number, now in enumerate([*windows(losses, width), losses[-1]]):
        if now > lowest + max(error, AWAY_SHARE * abs(lowest)):
            first = number if first < 0 else first
            continue
        if first >= 0 and number - first >= AWAY_WINDOWS:
            found.append((first * width, number * width, lowest, max(losses[first * width:number * width])))
        lowest, first = min(lowest, now), -1
    return max(found, key=lambda one: one[1] - one[0], default=None)


def _diverged(losses: Sequence[float]) -> tuple[float, float, int] | None:
    """Return the lowest level, the last level and the place where the loss left the lowest; None where it did not."""
    if len(losses) < LEAST_STEPS:
        return None
    width = window(len(losses))
    levels = windows(losses, width)
    lowest, last = min(levels), losses[-width:]
    now = median(last)
    place = (levels.index(lowest) + 1) * width
    enough = max(SIGNIFICANT * 2**0.5 * median_error(last), LOST_SHARE * (levels[0] - lowest), LEAST_RISE * abs(lowest))
    if now - lowest <= enough:
        return None
    limit = lowest + max(3 * noise(losses[:place]), 0.1 * (now - lowest))
    # the first of the steps from which on the level stays above what its noise explains
    onset = next((at for at in range(place, len(losses)) if median(losses[at:at + width]) > limit), len(losses) - 1)
    return lowest, now, onset


@rule("formula: ln V is the cross-entropy of V equally likely tokens",
      gives_way_to=("not_finite", "divergence", "nothing_trained"))
def uniform_loss(run: RunRecord) -> Iterator[Finding]:
    """The loss is ln V: the model holds every token of its vocabulary equally likely."""
    vocabulary, width = (run.facts.get("model") or {}).get("vocabulary"), window(len(run.losses))
    if not vocabulary or run.history.start.task == "span" or len(run.losses) < run.warmup_steps + LEAST_AFTER_WARMUP:
        return
    uniform, now = math.log(vocabulary), median(run.losses[-width:])
    if abs(now - uniform) > NEAR_UNIFORM * uniform:
        return
    recipe, usual = run.recipe, usual_rate(run.recipe)
    low = recipe.learning_rate < usual
    yield told("uniform_loss.low_rate" if low else "uniform_loss.high_rate", loss=now, uniform_loss=uniform, width=width,
               vocabulary=vocabulary, steps=len(run.losses), run=run, usual=usual, norm=median(run.norms),
               new_rate=usual if low else lower_rate(recipe))


@rule("fact: the losses of the run's steps", gives_way_to=("not_finite", "divergence", "nothing_trained", "uniform_loss"))
def no_progress(run: RunRecord) -> Iterator[Finding]:
    """The loss at the end of the run is where it was at the beginning."""
    losses, width = run.losses, window(len(run.losses))
    if len(losses) < run.warmup_steps + LEAST_AFTER_WARMUP:
        return
    levels = windows(losses, width)
    gain = levels[0] - levels[-1]
    if levels[0] < LEARNED or gain > max(LEAST_GAIN * levels[0], 3 * median_error(losses[:width])):
        return
    recipe, usual = run.recipe, usual_rate(run.recipe)
    rate = recipe.learning_rate
    case = "low_rate" if rate <= usual / FAR_RATE else "high_rate" if rate >= usual * FAR_RATE else \
        "data" if recipe.method == "scratch" else "known_data"
    yield told(f"no_progress.{case}", severity="critical" if recipe.method == "scratch" else "moderate", first_loss=levels[0],
               last_loss=levels[-1], lowest=min(levels), steps=len(losses), gain=gain, width=width, run=run, usual=usual,
               below=usual / rate if rate else math.inf, above=rate / usual, raised=rate * RAISED, norm=median(run.norms))


@rule("fact: the losses of the run's steps", gives_way_to=("not_finite", "divergence", "nothing_trained", "uniform_loss",
                                                          "no_progress", "overfitting", "vanishing_gradients"))
def late_plateau(run: RunRecord) -> Iterator[Finding]:
    """The loss fell and then stayed for half of the run or more.

    A schedule that ends is flat at its end, and is no plateau.
    """
    losses = run.losses
    if len(losses) < PLATEAU_STEPS or (place := _flat_from(losses)) is None or _learns_held_out(run):
        return
    began, share = run.steps[place], 1 - place / len(losses)
    rate = began.learning_rate / run.recipe.learning_rate
    held_up = rate >= HIGH_SHARE and run.recipe.lr_scheduler_type == "constant"
    width = len(losses) // GROUPS
    first, then, last = (median(part) for part in (losses[:width], losses[place:place + width], losses[-width:]))
    yield told("late_plateau.held_up" if held_up else "late_plateau.learned", step=began.step, flat_share=share, rate=rate,
               first=first, then=then, last=last, width=width, steps_after=len(losses) - place, kept_share=1 - share,
               began=began)


def _flat_from(losses: Sequence[float]) -> int | None:
    """Return the place from which on the loss stays, if that is in the first half; else None."""
    width = len(losses) // GROUPS
    levels = windows(losses, width)[-GROUPS:]
    gain, error = levels[0] - levels[-1], 2**0.5 * median_error(losses[-width:])
    if gain <= 0 or SURE * error > RESOLVED * gain:
        return None
    enough = max(SURE * error, FLAT_GAIN * gain)
    apart = [number for number, one in enumerate(levels) if abs(one - levels[-1]) > enough]
    first = apart[-1] + 1 if apart else 0
    return first * width if first <= GROUPS // 2 else None


def _learns_held_out(run: RunRecord) -> bool:
    """Return whether the held-out loss, which no noise of single batches moves, fell in the second half."""
    if (held_out := held_out_trend(run.history)) is None:
        return False
    before = [loss for step, loss in held_out.all if step <= run.last_step / 2]
    return not before or before[-1] - held_out.all[-1][1] > RISEN_SHARE * held_out.best[1]


@rule("fact: the run's last losses, held-out losses where there are enough",
      gives_way_to=("not_finite", "divergence", "nothing_trained", "uniform_loss", "no_progress", "late_plateau",
                    "overfitting"))
def still_falling(run: RunRecord) -> Iterator[Finding]:
    """The run ended while its loss was still falling: it had too few steps."""
    if run.state != "finished" or len(run.losses) < LEAST_STEPS or (fall := _fall(run)) is None:
        return
    kind, (before_step, before), (last_step, last) = fall
    yield told("still_falling.at_the_end", kind=kind, before=before, last=last, before_step=before_step, last_step=last_step,
               share=(before - last) / before, longer=2 * run.total_steps)


def _fall(run: RunRecord) -> tuple[str, tuple[int, float], tuple[int, float]] | None:
    if (held_out := held_out_trend(run.history)) is not None:
        return ("held-out", held_out.all[-2], held_out.all[-1]) if held_out.trend == "falling" else None
    losses, width = run.losses, window(len(run.losses))
    place = round(len(losses) * (1 - LAST_SHARE))
    before, last = level(losses, place, width), level(losses, len(losses), width)
    if before - last <= max(FALLING_SHARE * last, 3 * 2**0.5 * median_error(losses[-width:])):
        return None
    return "training", (run.steps[place - 1].step, before), (run.last_step, last)


@rule("fact: the losses of the run's evaluations, over the same text", gives_way_to=("not_finite", "divergence"))
def overfitting(run: RunRecord) -> Iterator[Finding]:
    """The held-out loss rises while the training loss falls: the model memorises its examples."""
    held_out, losses = held_out_trend(run.history), run.losses
    if held_out is None or held_out.trend != "risen" or len(losses) < LEAST_STEPS:
        return
    (best_step, best), (last_step, last) = held_out.best, held_out.all[-1]
    width = window(len(losses))
    place = next((at for at, step in enumerate(run.steps) if step.step > best_step), len(losses))
    then, now = level(losses, place, width), level(losses, len(losses), width)
    if then - now <= 2 * median_error(losses[-width:]):      # the training loss did not fall: that is no overfitting
        return
    epochs = f"{best_step / run.steps_per_epoch:.2g} epochs" if run.steps_per_epoch else f"step {best_step:,}"
    telling = sorted({held_out.all[0], *(one for one in held_out.all if one[0] == best_step), held_out.all[-1]})
    yield told("overfitting.risen", *(f"held-out loss at step {step:,}: {loss:.4g}" for step, loss in telling), best=best,
               last=last, severity="moderate" if last > best * (1 + SERIOUS_RISE) else "low", best_step=best_step,
               last_step=last_step, then=then, now=now, after=epochs)


@rule("fact: the run's evaluations")
def never_evaluated(run: RunRecord) -> Iterator[Finding]:
    """The run was never evaluated on held-out data, or only at its end."""
    if run.state != "finished" or not run.steps:
        return
    number = len(run.history.of(Evaluated))
    epochs = run.last_step / run.steps_per_epoch if run.steps_per_epoch else 0.0
    if number == 0:
        yield told("never_evaluated.never", run=run)
    elif number == 1 and epochs >= SEEN_AGAIN:
        yield told("never_evaluated.once", run=run, epochs=epochs, every=max(1, run.last_step // EVALUATIONS))
