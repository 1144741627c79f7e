"""Symptoms in the gradients and in single steps: not finite, zero, vanishing, overflowing, always clipped; loss spikes.

A loss jumps after an update that was too large: the learning rate was too high for these gradients, or the gradients were not
clipped. Events do not show with certainty which of them it was; `around` reports the figures, and its cure changes the one
that stands out.
Source: Goodfellow et al. 2016, 8.2.4 (cliffs and clipping); Goyal et al. 2017, 2.2 (warm-up).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from powertrain.diagnosis.curves import noise, window
from powertrain.diagnosis.run_record import LEAST_STEPS, RunRecord, usual_rate
from powertrain.diagnosis.wording import told
from powertrain.recipe import Recipe
from powertrain.records import several
from powertrain.records.errors import named
from powertrain.records.events import Rewound, UpdateSkipped
from powertrain.records.findings import Cure, Finding, rule
from powertrain.records.timeline import is_finite, quantile

ZERO_NORM = 1e-12            # of all gradients together: a smaller norm is zero, or the rounding of zero
LEAST_ZERO_STEPS = 5         # adapters that start at zero may have one or two steps without a gradient
SHRUNK = 1e-3                # of the first gradients' norm
LEFT_SHARE = 0.1             # of the first loss: below it, small gradients are normal
SKIPPED_SHARE = 0.05         # of the steps: a scale that is found and then doubled every 2,000 steps skips far fewer
CLIPPED_SHARE = 0.9          # of the steps after the warm-up
FAR_ABOVE = 10.0             # times max_grad_norm: gradients of that size are unusual
# of a loss that broke away
LOOKED_BACK = 20             # steps looked at before the break
LAST_STEPS = 3               # of them: the ones that show what came
GROWN = 3.0                  # times: a gradient norm that large against the steps before it has grown
HIGH_RATE = 3.0              # times the method's default: a learning rate from which it is named as a cause
EARLY_SHARE = 0.1            # of the run: a break within it is one that a warm-up can prevent
LOWER = 3.0                  # a learning rate is lowered by so much where its default is no lower
# of spikes
BEFORE_STEPS, LEAST_BEFORE = 128, 16         # the losses that a step is compared with; source: OLMo-core, SkipStepOptimizer
SIGMAS = 6.0                 # standard deviations above their median; source: the same
LEAST_RISE = 0.1             # of that median: a smaller jump changes nothing, however quiet the curve
BACK_SIGMAS = 3.0            # a spike is over when the loss is this near to its usual value
NOISY_SHARE = 0.03           # of the steps: more spikes than that are the nature of the data
SERIOUS_SHARE = 0.01         # of the steps, spent until the loss is back
NAMED_SPIKES = 4
NAMED_STEPS = 3              # whose updates were not made, and ways back
MANY_EPOCHS = 3              # a spike in each of so many epochs is an example that returns


@rule("fact: NaN comes from too high a learning rate or from half precision")
def not_finite(run: RunRecord) -> Iterator[Finding]:
    """The loss or a gradient became NaN or infinite.

    Arithmetic cannot come back from NaN: every weight that NaN reaches is lost. A run stops at the first loss that is not
    finite. Gradients that are not finite come before it; under fp16 they are ordinary, and the step is skipped.
    """
    first, subject = _first_not_finite(run)
    if not first:
        return
    said = [f"the run ended: {run.end.message}"] if run.end.message else []
    place = next((number for number, step in enumerate(run.steps) if step.step >= first), len(run.steps))
    if not place:
        yield told("not_finite.from_the_start", *said, subject=subject, step=first)
        return
    seen = around(run, place)
    yield told("not_finite.later", *said, *seen.evidence, *_before(run, place), cure=seen.cure, subject=subject, step=first,
               before=first - 1, because=seen.because)


def _first_not_finite(run: RunRecord) -> tuple[int, str]:
    """Return the first such step (from 1) and what was not finite there; 0 where everything is finite."""
    fp16, passed_over = "fp16" in run.techniques, {one.event.step for one in run.history.of(UpdateSkipped)}
    for step in run.history.steps:
        if step.step in passed_over:
            continue
        if not is_finite(step.loss):
            return step.step, f"the loss is {step.loss}"
        if not is_finite(step.grad_norm) and not fp16:
            return step.step, f"the gradient is not finite ({step.grad_norm})"
    error = run.end.error
    if error.get("kind") == "loss_not_finite":
        return error["step"], f"the loss is {error['loss']}"
    if error.get("kind") == "gradient_not_finite":
        return error["step"], f"the gradient is not finite ({error['norm']})"
    if error.get("kind") == "too_many_bad_steps":
        return error["step"] - error["in_row"] + 1, "the loss or gradient is not finite or a spike, step after step"
    if error.get("kind") == "weights_not_finite":
        return error["step"], f"{several(error['weights'], 'weight')} are not finite"
    return 0, ""


def _before(run: RunRecord, place: int) -> Iterator[str]:
    last = run.steps[place - 1]
    yield f"loss {last.loss:.4g} at step {last.step:,}, the last that is known"
    if "fp16" in run.techniques and (skipped := [step.step for step in run.steps[:place] if not is_finite(step.grad_norm)]):
        yield f"fp16's loss scaling skipped {several(len(skipped), 'step')} before it, first step {skipped[0]:,}"


@rule("fact: the run's warnings", gives_way_to=("not_finite",))
def bad_steps(run: RunRecord) -> Iterator[Finding]:
    """Updates were not made, because a loss or gradient was not finite or a spike, or the run went back to a checkpoint.

    The weights did not change in these steps, so nothing is lost but their time.
    """
    skipped, rewound = run.history.of(UpdateSkipped), run.history.of(Rewound)
    if skipped or rewound:
        seen = [f"back to step {one.event.step:,} after step {one.event.bad_step:,}" for one in rewound[:NAMED_STEPS]]
        seen += [f"step {one.event.step:,}: loss {one.event.loss:.4g}, gradient norm {one.event.grad_norm:.3g}, training "
                 f"examples {named(one.event.examples)}" for one in skipped[:NAMED_STEPS]]
        yield told("bad_steps.passed_over", *seen, skipped=len(skipped), rewinds=len(rewound), lower=lower_rate(run.recipe))


@rule("fact: the gradient norms of the run's steps", gives_way_to=("not_finite",))
def nothing_trained(run: RunRecord) -> Iterator[Finding]:
    """Every gradient is zero: the run computes, and no weight changes."""
    norms = run.norms
    if len(norms) < LEAST_ZERO_STEPS or max(norms) > ZERO_NORM:
        return
    adapts = run.recipe.method in ("lora", "qlora")
    yield told("nothing_trained.adapters" if adapts else "nothing_trained.weights",
               tokens=sum(step.tokens for step in run.steps), run=run, norm=max(norms), steps=len(norms),
               last_loss=run.losses[-1])


@rule("fact: the losses of the run's steps", gives_way_to=("not_finite", "divergence"))
def spikes(run: RunRecord) -> Iterator[Finding]:
    """The loss of single steps jumped far above its neighbours.

    A loss is computed before its step's update. A loss that is back at the next step was caused by the batch, not by the
    weights.
    """
    found = find_spikes(run.losses)
    if not found:
        return
    lasting = [spike for spike in found if spike.lasted > 1]
    if sum(spike.lasted for spike in found if spike not in lasting) > NOISY_SHARE * len(run.losses):
        yield _uneven(run, found)
    else:
        yield _thrown(run, lasting) if lasting else _of_a_batch(run, found)


@dataclass(frozen=True)
class Spike:
    place: int                               # of its highest step
    first: int
    until: int                               # the place where the loss is back
    height: float
    usual: float
    back: bool

    @property
    def lasted(self) -> int:
        """Return the steps until the loss was back."""
        return self.until - self.first


def find_spikes(losses: Sequence[float]) -> list[Spike]:
    """Return the spikes of a loss curve, in order."""
    found: list[Spike] = []
    usual_losses: list[float] = []           # the earlier losses outside of spikes
    at = 0
    while at < len(losses):
        before = usual_losses[-BEFORE_STEPS:]
        if len(before) >= LEAST_BEFORE:
            usual = median(before[-LEAST_BEFORE:])
            sigma = noise(before)
            if losses[at] - usual > max(SIGMAS * sigma, LEAST_RISE * abs(usual)):
                limit = usual + max(BACK_SIGMAS * sigma, LEAST_RISE * abs(usual) / 2)
                until = next((later for later in range(at + 1, len(losses)) if losses[later] <= limit), len(losses))
                highest = max(range(at, until), key=lambda place: losses[place])
                found.append(Spike(highest, at, until, losses[highest], usual, until < len(losses)))
                at = until
                continue
        usual_losses.append(losses[at])
        at += 1
    return found


def _each_spike(run: RunRecord, found: Sequence[Spike]) -> Iterator[str]:
    for spike in sorted(found, key=lambda one: one.usual - one.height)[:NAMED_SPIKES]:
        step = run.steps[spike.place]
        after = "not back when the events end" if not spike.back else "back at the next step" if spike.lasted == 1 else \
            f"back after {several(spike.lasted, 'step')}"
        yield (f"step {step.step:,}: loss {spike.height:.4g} where {spike.usual:.4g} was usual, gradient norm "
               f"{step.grad_norm:.3g}, learning rate {step.learning_rate:.3g}; {after}")


def _thrown(run: RunRecord, lasting: Sequence[Spike]) -> Finding:
    """Return the finding for spikes whose update moved the weights to a worse place."""
    seen, lost = around(run, max(lasting, key=lambda spike: spike.lasted).first), sum(spike.lasted for spike in lasting)
    serious = lost > SERIOUS_SHARE * len(run.losses) or not all(spike.back for spike in lasting)
    return told("spikes.lasting", *_each_spike(run, lasting), *seen.evidence, severity="moderate" if serious else "low",
                cure=seen.cure, spikes=len(lasting), steps_lost=lost, steps=len(run.losses), because=seen.because)


def _of_a_batch(run: RunRecord, found: Sequence[Spike]) -> Finding:
    """Return the finding for spikes that were back at the next step."""
    worst, every_epoch = max(found, key=lambda spike: spike.height - spike.usual), _in_every_epoch(run, found)
    norm_times = run.steps[worst.place].grad_norm / (median(run.norms or [0.0]) or math.inf)
    unclipped = run.recipe.max_grad_norm == 0 and norm_times > GROWN
    return told("spikes.of_a_batch_unclipped" if unclipped else "spikes.of_a_batch", *_each_spike(run, found),
                severity="moderate" if unclipped and every_epoch else "low", spikes=len(found), norm_times=norm_times,
                returning=f"; each of {every_epoch} epochs has one, so an example returns" if every_epoch else "")


def _uneven(run: RunRecord, found: Sequence[Spike]) -> Finding:
    """Return the finding for spikes so many that they are the nature of the data."""
    worst, size = max(found, key=lambda spike: spike.height - spike.usual), run.recipe.train_batch_size
    return told("spikes.uneven", *_each_spike(run, found), spikes=len(found), steps=len(run.losses), train_batch_size=size,
                larger=2 * size, highest=worst.height, usual=worst.usual)


def _in_every_epoch(run: RunRecord, found: Sequence[Spike]) -> int:
    """Return the number of whole epochs if there are enough and each has equally many spikes; else 0."""
    if not run.steps_per_epoch:
        return 0
    epochs = int(run.last_step / run.steps_per_epoch)
    places = [int((run.steps[spike.place].step - 1) / run.steps_per_epoch) for spike in found]
    counts = [places.count(epoch) for epoch in range(epochs)]
    return epochs if epochs >= MANY_EPOCHS and min(counts) == max(counts) >= 1 else 0


@rule("technique: fp16", gives_way_to=("not_finite",))
def skipped_steps(run: RunRecord) -> Iterator[Finding]:
    """fp16 skipped many steps because their gradients overflowed.

    The loss scale starts at 65,536 and is halved at each overflow, so the first steps are often skipped, rightly.
    """
    if "fp16" not in run.techniques or len(run.steps) < 2 * LEAST_STEPS:
        return
    skipped = [step.step for step in run.steps[LEAST_STEPS:] if not is_finite(step.grad_norm)]
    if len(skipped) <= SKIPPED_SHARE * (len(run.steps) - LEAST_STEPS):
        return
    yield told("skipped_steps.overflowed", skipped_steps=len(skipped), share=len(skipped) / len(run.steps),
               places=", ".join(f"{step:,}" for step in skipped[:5])
               + (f" and {len(skipped) - 5:,} more" if len(skipped) > 5 else ""))


@rule("fact: the gradient norms of the run's steps", gives_way_to=("not_finite", "divergence", "nothing_trained"))
def vanishing_gradients(run: RunRecord) -> Iterator[Finding]:
    """The gradients shrank to almost nothing while the loss was still high."""
    norms, losses = run.norms, run.losses
    if len(norms) < 2 * LEAST_STEPS:
        return
    quarter, width = len(norms) // 4, window(len(losses))
    first, last = median(norms[:quarter]), median(norms[-quarter:])
    if last >= SHRUNK * first or median(losses[-width:]) < LEFT_SHARE * median(losses[:width]):
        return
    place = next(at for at, norm in enumerate(norms) if norm < SHRUNK * first)
    yield told("vanishing_gradients.shrunk", first_norm=first, last_norm=last, last_loss=median(losses[-width:]),
               first_loss=losses[0], small_norm=norms[place], step=run.steps[place].step,
               learning_rate=run.recipe.learning_rate, lower_rate=lower_rate(run.recipe))


@rule("fact: the gradient norms of the run's steps", gives_way_to=("not_finite", "divergence", "uniform_loss", "no_progress"))
def clipped_always(run: RunRecord) -> Iterator[Finding]:
    """Nearly every step had its gradient clipped, so max_grad_norm sets the size of every step.

    Adam divides by the gradients' own size, so one constant factor changes nothing; a factor of each step's own does: every
    gradient has the same norm, and batches that teach much count as little as those that teach nothing.
    """
    limit, norms = run.recipe.max_grad_norm, run.norms[run.warmup_steps:]
    if limit <= 0 or len(norms) < LEAST_STEPS:
        return
    clipped = sum(norm > limit for norm in norms)
    if clipped < CLIPPED_SHARE * len(norms):
        return
    middle, high = median(norms), quantile(norms, 0.9)
    yield told("clipped_always.clipped", severity="moderate" if middle > FAR_ABOVE * limit else "low", limit=limit,
               clipped_share=clipped / len(norms), median_norm=middle, times=middle / limit, clipped=clipped, steps=len(norms),
               high=high, new_limit=float(f"{high:.2g}"))


# ------------------------------------------------------------------------------------------------ why a loss broke away


@dataclass(frozen=True)
class Instability:
    because: str                             # the likely cause, as the end of a sentence
    evidence: tuple[str, ...]
    cure: Cure


def lower_rate(recipe: Recipe) -> float:
    """Return the method's default learning rate, or a third of the recipe's where that is no higher."""
    usual = usual_rate(recipe)
    return usual if recipe.learning_rate > usual else recipe.learning_rate / LOWER


def around(run: RunRecord, place: int) -> Instability:
    """Return the figures around `place`, the first bad one of `run.steps` (from 0), or their number where none follows."""
    recipe, number = run.recipe, run.steps[place].step if place < len(run.steps) else run.last_step + 1
    usual, last = usual_rate(recipe), run.steps[min(place, len(run.steps) - 1)]
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
    found = [(step.step, float(step.grad_norm)) for step in run.steps[max(0, place - LOOKED_BACK):place + 1]
             if is_finite(step.grad_norm)]
    if len(found) <= 2 * LAST_STEPS:
        return []
    before = median(norm for _, norm in found[:-LAST_STEPS])
    number, largest = max(found[-LAST_STEPS:], key=lambda one: one[1])
    growth = largest / before if before else 1.0
    if growth < GROWN:
        return [f"the gradient norm had not grown before it: {largest:.3g} at step {number:,}, {before:.3g} before"]
    return [f"the gradient norm grew {growth:.3g} times within {LOOKED_BACK} steps: {before:.3g}, then {largest:.3g} at step "
            f"{number:,}"]
