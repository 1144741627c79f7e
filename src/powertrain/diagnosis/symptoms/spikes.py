"""Steps whose loss jumped far above its neighbours': how far, how often, and whether it came back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from powertrain.diagnosis.instability import GROWN, around
from powertrain.diagnosis.robust import noise
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom, several
from powertrain.records.findings import Cure, Finding, Risk

BEFORE_STEPS, LEAST_BEFORE = 128, 16         # of the losses a step is compared with; source: OLMo-core, SkipStepOptimizer
SIGMAS = 6.0                 # standard deviations above their median; source: the same
LEAST_RISE = 0.1             # of that median: a smaller jump changes nothing, however quiet the curve
BACK_SIGMAS = 3.0            # a spike is over when the loss is this near to where it came from
NOISY_SHARE = 0.03           # of the steps: more of them are how this data is, no accidents
SERIOUS_SHARE = 0.01         # of the steps, spent on the way back
NAMED = 4                    # spikes told one by one
MANY_EPOCHS = 3              # in each of so many epochs, a spike is an example that returns


@dataclass(frozen=True)
class Spike:
    place: int                               # of its highest step
    first: int
    until: int                               # the place where the loss is back
    height: float
    usual: float
    back: bool


class Spikes(Symptom):
    """A loss is computed before its step's update. One that is back at the next step was that batch, not the weights."""

    name = "spikes"
    rests_on = "fact: the losses of the run's steps"
    gives_way_to = frozenset({"not_finite", "divergence"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        found = spikes(run.losses)
        if not found:
            return
        worst = max(found, key=lambda spike: spike.height - spike.usual)
        lasting = [spike for spike in found if spike.until - spike.first > 1]
        if sum(spike.until - spike.first for spike in found if spike not in lasting) > NOISY_SHARE * len(run.losses):
            yield _noisy(run, found, worst)
        elif lasting:
            yield _thrown(run, lasting)
        else:
            yield _batches(run, found, worst)


def spikes(losses: Sequence[float]) -> list[Spike]:
    found: list[Spike] = []
    usual_losses: list[float] = []           # those before that are no spike
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


def _told(run: RunRecord, found: Sequence[Spike]) -> list[str]:
    told = []
    for spike in sorted(found, key=lambda one: one.usual - one.height)[:NAMED]:
        step = run.steps[spike.place]
        after = "back at the next step" if spike.until - spike.first == 1 and spike.back else \
            f"back after {several(spike.until - spike.first, 'step')}" if spike.back else "not back when the events end"
        told.append(f"step {step['step']:,}: loss {spike.height:.4g} where {spike.usual:.4g} was usual, gradient norm "
                    f"{step['grad_norm']:.3g}, learning rate {step['learning_rate']:.3g}; {after}")
    return told


def _thrown(run: RunRecord, lasting: Sequence[Spike]) -> Finding:
    """The weights had been moved to a worse place, and several steps were spent on the way back."""
    worst = max(lasting, key=lambda spike: spike.until - spike.first)
    seen, lost = around(run, worst.first), sum(spike.until - spike.first for spike in lasting)
    serious = lost > SERIOUS_SHARE * len(run.losses) or not all(spike.back for spike in lasting)
    return Spikes.found(
        "moderate" if serious else "low", f"{several(len(lasting), 'loss spike')} that lasted, {several(lost, 'step')} in all",
        "an update made the model worse, and the steps until the loss was back trained it again to where it had been. Likely "
        f"because {seen.because}", [*_told(run, lasting), *seen.evidence], seen.cure,
        expected=f"{several(lost, 'step')} of {len(run.losses):,} are not spent on the way back", risk=Risk(accuracy="low"))


def _batches(run: RunRecord, found: Sequence[Spike], worst: Spike) -> Finding:
    """Each was back at once: the batch was unlike the others."""
    every_epoch = _in_every_epoch(run, found)
    norm, usual_norm = run.steps[worst.place]["grad_norm"], median(run.norms)
    unlimited = run.recipe.max_grad_norm == 0 and norm > GROWN * usual_norm
    why = ("each was back at the next step, so it was the batch and not the weights: its examples are unlike the others"
           + (f"; there is one in each of {every_epoch} epochs, so it is an example that returns" if every_epoch else "")
           + (f". Nothing limits the gradient, whose norm was {norm / usual_norm:.3g} times the usual one there"
              if unlimited else ""))
    cure = Cure("limit the gradient, and look at the longest and strangest examples (`powertrain data check`)",
                words=("max_grad_norm=1",)) if unlimited else \
        Cure("look at the longest and strangest examples (`powertrain data check`); the steps themselves did no harm")
    return Spikes.found("moderate" if unlimited and every_epoch else "low",
                        f"{several(len(found), 'step')} whose batch had a loss far above its neighbours'", why,
                        _told(run, found), cure, expected="a smoother curve; the model hardly differs")


def _noisy(run: RunRecord, found: Sequence[Spike], worst: Spike) -> Finding:
    batch = run.recipe.train_batch_size
    return Spikes.found(
        "low", f"the loss is uneven: {several(len(found), 'step')} of {len(run.losses):,} jump above their neighbours",
        f"that many are no accidents: with {several(batch, 'example')} a step, single examples show. The highest has a loss of "
        f"{worst.height:.4g} where {worst.usual:.4g} was usual", _told(run, found),
        Cure("train on more examples a step", words=(f"train_batch_size={2 * batch}",)),
        expected="a quieter curve, and steps that agree more", risk=Risk(accuracy="low"))


def _in_every_epoch(run: RunRecord, found: Sequence[Spike]) -> int:
    """The number of whole epochs, where there are enough of them and each has as many spikes as the others; else 0."""
    if not run.steps_per_epoch:
        return 0
    epochs = int(run.last_step / run.steps_per_epoch)
    places = [int((run.steps[spike.place]["step"] - 1) / run.steps_per_epoch) for spike in found]
    counts = [places.count(epoch) for epoch in range(epochs)]
    return epochs if epochs >= MANY_EPOCHS and min(counts) == max(counts) >= 1 else 0
