"""Symptoms in the loss curve: divergence, a loss of guessing, no progress, a plateau, overfitting, evaluations that lack."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from powertrain.diagnosis.curves import level, median_error, noise, window, windows
from powertrain.diagnosis.instability import around, lower_rate, usual_rate
from powertrain.diagnosis.run_record import LEAST_STEPS, RunRecord, several
from powertrain.records.events import Evaluated
from powertrain.records.findings import Cure, Expected, Finding, Risk, finding, rule
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


@rule("documentation: a loss that rises for long has diverged", gives_way_to=("not_finite",))
def divergence(run: RunRecord) -> Iterator[Finding]:
    """The loss climbed away from its level and did not come back, or came back only after a large part of the run.

    Medians of groups of steps are compared, so that neither a spike nor noise looks like divergence.
    """
    if (found := _diverged(run.losses)) is None:
        yield from _came_back(run)
        return
    lowest, now, onset = found
    seen, first = around(run, onset), median(run.losses[:window(len(run.losses))])
    number = run.steps[onset].step
    gained = f"had fallen from {first:.4g} to {lowest:.4g}" if lowest < first else f"began at {first:.4g}"
    yield finding("critical", f"the loss diverged: from {lowest:.4g} it rose to {now:.4g}",
                  f"it {gained}, left that level about step {number:,}, and was not back {len(run.losses) - onset:,} steps "
                  f"later: those steps made the model worse. Likely because {seen.because}", *seen.evidence, cure=seen.cure,
                  expected=Expected(f"the loss stays below {lowest:.4g}", "none"), risk=Risk(accuracy="low"),
                  numbers={"lowest": lowest, "last": now, "step": number})


def _came_back(run: RunRecord) -> Iterator[Finding]:
    if (found := _away(run.losses)) is None:
        return
    first, until, low, high = found
    seen, share = around(run, first), (until - first) / len(run.losses)
    yield finding("critical" if share > LOST_SHARE else "moderate",
                  f"the loss blew up: from {low:.4g} it rose to {high:.4g}, and {until - first:,} steps passed until it was "
                  "back", f"it left its level about step {run.steps[first].step:,}: {share:.0%} of the run went into "
                  f"learning again what had been lost. Likely because {seen.because}", *seen.evidence, cure=seen.cure,
                  expected=Expected(f"{until - first:,} steps that learn something new", "none"), risk=Risk(accuracy="low"),
                  numbers={"lowest": low, "highest": high, "steps_lost": until - first})


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
    vocabulary = (run.facts.get("model") or {}).get("vocabulary")
    if not vocabulary or run.history.start.task == "span" or \
            len(run.losses) < run.warmup_steps + LEAST_AFTER_WARMUP:
        return
    uniform, now = math.log(vocabulary), median(run.losses[-window(len(run.losses)):])
    if abs(now - uniform) > NEAR_UNIFORM * uniform:
        return
    recipe, usual = run.recipe, usual_rate(run.recipe.method)
    low = recipe.learning_rate < usual
    rate = usual if low else lower_rate(recipe)
    yield finding("critical", f"the loss is that of guessing: {now:.4g}, where ln({vocabulary:,}) = {uniform:.4g}",
                  f"after {len(run.losses):,} steps the model has not learned how often each token occurs, which models learn "
                  "first: " + (f"the learning rate of {recipe.learning_rate:g} hardly moves the weights" if low else
                  f"the learning rate of {recipe.learning_rate:g} may be too high, or inputs and targets do not match"),
                  f"the last {window(len(run.losses))} steps have a median loss of {now:.4g}, the first {run.losses[0]:.4g}",
                  f"learning rate at most {recipe.learning_rate:g} (the default of method={recipe.method} is {usual:g})",
                  f"gradient norm {median(run.norms):.3g} in the median step",
                  cure=f"{'raise' if low else 'lower'} the learning rate; if that changes nothing, look at the examples "
                       "(`powertrain data show`)", words=(f"learning_rate={rate:.2g}",),
                  expected=Expected("the loss falls below that of guessing within some ten steps", "none"),
                  risk=Risk(accuracy="low"), numbers={"loss": now, "uniform_loss": uniform})


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
    because, cure = _why_no_progress(run)
    yield finding("critical" if run.recipe.method == "scratch" else "moderate",
                  f"the loss has not fallen: {levels[0]:.4g} at the beginning, {levels[-1]:.4g} at the end",
                  f"{len(losses):,} steps moved it by {gain:.2g}, and single steps differ more than that. {because}",
                  f"medians of {width} steps each, from {levels[0]:.4g} to {levels[-1]:.4g}; the lowest is {min(levels):.4g}",
                  f"learning rate at most {run.recipe.learning_rate:g} (the default of method={run.recipe.method} is "
                  f"{usual_rate(run.recipe.method):g})",
                  f"gradient norm {median(run.norms):.3g} in the median step, max_grad_norm={run.recipe.max_grad_norm:g}",
                  cure=cure, expected=Expected("the loss falls", "none"), risk=Risk(accuracy="low"),
                  numbers={"first_loss": levels[0], "last_loss": levels[-1]})


def _why_no_progress(run: RunRecord) -> tuple[str, Cure]:
    rate, usual = run.recipe.learning_rate, usual_rate(run.recipe.method)
    if rate <= usual / FAR_RATE:
        return (f"Likely because the learning rate of {rate:g} is {usual / rate:.0f} times below the default",
                Cure("raise the learning rate", words=(f"learning_rate={usual:.2g}",)))
    if rate >= usual * FAR_RATE:
        return (f"Likely because the learning rate of {rate:g} is {rate / usual:.0f} times above the default, so that steps "
                "overshoot", Cure("lower the learning rate", words=(f"learning_rate={usual:.2g}",)))
    if run.recipe.method == "scratch":
        return ("The learning rate is an ordinary one: more likely the data has nothing to learn, or its targets do not follow "
                "from its inputs", Cure("look at the examples (`powertrain data show`)"))
    return ("The learning rate is an ordinary one: the model may know this data already, or need a higher learning rate",
            Cure("raise the learning rate, or look at the examples (`powertrain data show`)",
                 words=(f"learning_rate={rate * RAISED:.2g}",)))


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
    because = f"the learning rate stayed at {rate:.0%} of its peak, and steps that large may not settle" if held_up else \
        "this model had nothing left to learn from this data at this learning rate"
    yield finding("low", f"the last {share:.0%} of the steps brought nothing: the loss stayed at {last:.4g}",
                  f"it fell until about step {began.step:,} and stayed there for {len(losses) - place:,} steps; {because}",
                  f"medians of {width} steps: {first:.4g} at the beginning, {then:.4g} from step {began.step:,}, {last:.4g} "
                  "at the end", f"learning rate {began.learning_rate:.3g} at step {began.step:,}",
                  cure=Cure("let the learning rate fall", words=("lr_scheduler_type=cosine",)) if held_up else
                       Cure("end the run there", words=(f"max_steps={began.step}",)),
                  expected=Expected("a lower loss at the end", "none") if held_up else
                           Expected(f"the same loss in {1 - share:.0%} of the time", "measured: the losses of this run"),
                  risk=Risk(accuracy="low"), numbers={"step": began.step, "flat_share": share})


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
    yield finding("low", f"the {kind} loss was still falling when the run ended",
                  f"it fell by {(before - last) / before:.1%} from step {before_step:,} to {last_step:,}, as the schedule "
                  "ended: the model can learn more than it did in so many steps",
                  f"{kind} loss {before:.4g} at step {before_step:,}, {last:.4g} at step {last_step:,}",
                  cure="train longer; another number of steps has another schedule, so it is a new run",
                  words=(f"max_steps={2 * run.total_steps}",),
                  expected=Expected("a lower loss, in twice the time", "none"), numbers={"before": before, "last": last})


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
    yield finding("moderate" if last > best * (1 + SERIOUS_RISE) else "low",
                  f"overfitting since step {best_step:,}: held-out loss {best:.4g} there, {last:.4g} at step {last_step:,}",
                  f"meanwhile the training loss fell from {then:.4g} to {now:.4g}: after {epochs} the model learned its "
                  "training examples only. The checkpoint with the lowest held-out loss is kept; model/ is the last step's",
                  *(f"held-out loss at step {step:,}: {loss:.4g}" for step, loss in telling),
                  cure="end the run where the held-out loss was lowest, or train on more data",
                  words=(f"max_steps={best_step}",), risk=Risk(accuracy="low"), numbers={"best": best, "last": last},
                  expected=Expected(f"a held-out loss of about {best:.4g} instead of {last:.4g}",
                                    "measured: this run's evaluations"))


@rule("fact: the run's evaluations")
def never_evaluated(run: RunRecord) -> Iterator[Finding]:
    """The run was never evaluated on held-out data, or only at its end."""
    if run.state != "finished" or not run.steps:
        return
    number = len(run.history.of(Evaluated))
    epochs = run.last_step / run.steps_per_epoch if run.steps_per_epoch else 0.0
    if number == 0:
        yield finding("low", "no held-out data was evaluated", "the training loss shows how well the model fits its training "
                      "data, and not how it does on other text",
                      f"no evaluation in {several(run.last_step, 'step')}; data.validation_share="
                      f"{run.recipe.data.validation_share:g}", cure="hold some of the data out",
                      words=("data.validation_share=0.05",), expected=Expected("overfitting becomes visible", "none"))
    elif number == 1 and epochs >= SEEN_AGAIN:
        yield finding("low", f"evaluated only once, after {epochs:.3g} epochs", "every example was seen more than once, so the "
                      "model may have memorised them; one evaluation, at the end, cannot show when that began, and no "
                      "checkpoint is known to be the best",
                      f"one evaluation in {several(run.last_step, 'step')} (eval_steps={run.recipe.eval_steps})",
                      cure="evaluate during the run", words=(f"eval_steps={max(1, run.last_step // EVALUATIONS)}",),
                      expected=Expected("overfitting becomes visible", "none"))
