"""The assertions of a bench: sentences about its settings that hold or fail, with their numbers.

Only what must be true of a correct program is here: memory and losses. Speed is measured and reported, and fails nothing.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.evidence.parity import compare_losses
from powertrain.evidence.worker import Probe
from powertrain.records import Plan
from powertrain.records.evidence import Arm, Parity
from powertrain.run.prepare import Prepared

MIB = 2**20
PREDICTION = 0.05            # of the measured peak: as exact as the prediction of memory promises to be
SLACK_MIB = 1                # less decides nothing: models so small are mostly what the arithmetic leaves out


@dataclass
class Setting:
    """One row of a table: a recipe with a complete plan, and its results so far."""

    amount: int | str                        # what is varied: examples of the micro-batch, passes, workers; the precision
    arm: Arm                                 # "4 examples", "2 passes", "bf16", "2 workers"
    prepared: Prepared                       # of its batch
    plan: Plan
    dtype: str                               # of the matrix products
    predicted_bytes: int | None = None       # None: another library computes the model
    probe: Probe | None = None               # its first steps in a fresh process; None: not reached within the budget
    parity: Parity | None = None             # with the first setting of its table
    rates: Sequence[float] = ()              # batches a second of its loader without training, by turns
    comparison: int | None = None            # index of its comparison with the first setting
    why: str = ""                            # it has no speed

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def runs(self) -> bool:
        return self.probe is not None and self.probe.error is None

    @property
    def measured_bytes(self) -> int | None:
        """Return the allocated peak of a step; None where it was not counted."""
        return self.probe.allocated_bytes if self.probe else None

    @property
    def error_share(self) -> float | None:
        """Return predicted over measured memory, less 1."""
        if not self.measured_bytes or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def mib(self) -> float:
        """Return the measured peak in MiB; 0 where it was not counted."""
        return (self.measured_bytes or 0) / MIB


@dataclass(frozen=True)
class Assertion:
    what: str                                # has to be so
    holds: bool
    because: str                             # the numbers


def trains(table: str, tried: Sequence[Setting]) -> Assertion:
    """Assert that every setting runs with finite losses and gradients that are not all zero."""
    wrong = [f"{setting.name}: {why}" for setting in tried if (why := _why_it_does_not(setting)) is not None]
    return Assertion(f"{table}: every setting trains", not wrong,
                     "; ".join(wrong) or f"{', '.join(setting.name for setting in tried)}: losses finite, gradients not zero")


def _why_it_does_not(setting: Setting) -> str | None:
    assert setting.probe is not None
    losses = setting.probe.losses
    if setting.probe.error is not None:
        return setting.probe.error
    if not losses or not all(math.isfinite(loss) for loss in losses):
        return f"the losses are not finite ({', '.join(f'{loss:g}' for loss in losses)})"
    return None if any(setting.probe.grad_norms) else "all gradients are zero"


def memory_grows(tried: Sequence[Setting]) -> Assertion | None:
    """Assert that more examples in a pass take more memory. None where fewer than two settings were measured."""
    counted = _measured(tried)
    if len(counted) < 2:
        return None
    wrong = [f"{larger.name} take {larger.mib:,.1f} MiB where {smaller.name} take {smaller.mib:,.1f} MiB"
             for smaller, larger in itertools.pairwise(counted) if larger.mib <= smaller.mib]
    return Assertion("micro-batch: memory grows with it", not wrong, "; ".join(wrong) or _listed(counted, ", "))


def memory_is_as_predicted(table: str, tried: Sequence[Setting]) -> Assertion | None:
    """Assert that measured peaks match the predicted ones within 5 % or 1 MiB. None where nothing can be compared."""
    known = sorted(((setting, share) for setting in tried if (share := setting.error_share) is not None),
                   key=lambda found: -abs(found[1]))
    if not known:
        return None
    wrong = [(one, share) for one, share in known if abs(share) * one.mib > max(SLACK_MIB, PREDICTION * one.mib)]
    told = "; ".join(f"{one.name} {one.mib:,.1f} MiB, predicted {(one.predicted_bytes or 0) / MIB:,.1f} ({share:+.1%})"
                     for one, share in wrong or known[:1])
    return Assertion(f"{table}: peak memory is what was predicted, within {PREDICTION:.0%}", not wrong,
                     f"{len(wrong)} of {len(known)} are further apart: {told}" if wrong else
                     f"at most {abs(known[0][1]):.1%} apart: {told}")


def accumulation_takes_no_more(tried: Sequence[Setting]) -> Assertion | None:
    """Assert that more passes for the same batch take no more memory than one, unless more was predicted.

    Where weights outweigh activations it does: from the second pass on all gradients stand beside the activations.
    """
    counted = _measured(tried)
    if len(counted) < 2:
        return None
    one = counted[0]
    more = [setting for setting in counted[1:] if setting.mib > one.mib]
    expected = [setting for setting in more if 0 < (one.predicted_bytes or 0) < (setting.predicted_bytes or 0)]
    because = f"{_listed([one], '')}; {_listed(counted[1:], ', ')}"
    if expected:
        because += (f"; {', '.join(setting.name for setting in expected)} take more, as predicted: from the second pass on all "
                    "gradients stand beside the activations")
    return Assertion(f"accumulation: more passes take no more memory than {one.name}", len(more) == len(expected), because)


def losses_agree(what: str, exactness: str, settings: Sequence[Setting], in_fp32: Sequence[Probe] = ()) -> Assertion | None:
    """Assert that all settings learn the same as the first, as `exactness` demands, and set their parity.

    `in_fp32`: the first steps of all settings in fp32, which are compared instead of their own. None where too few ran.
    """
    probes: Sequence[Probe | None] = in_fp32 or [setting.probe for setting in settings]
    ran = [(setting, probe) for setting, probe in zip(settings, probes, strict=True) if setting.runs and probe is not None]
    if len(ran) < 2 or not settings[0].runs:
        return None
    found = {}
    for setting, probe in ran[1:]:
        parity = compare_losses(exactness, ran[0][1], probe, dtype="fp32" if in_fp32 else setting.dtype)
        setting.parity = found[setting.name] = parity
    wrong = [f"{name}: {parity.because}" for name, parity in found.items() if not parity.holds]
    widest = max(found.values(), key=lambda parity: (parity.loss_difference, parity.grad_norm_difference))
    return Assertion(what, not wrong, "; ".join(wrong) or f"{', '.join(found)}: {widest.because}")


def _measured(tried: Sequence[Setting]) -> list[Setting]:
    """Return the settings whose peak was measured, by their amount."""
    return sorted((setting for setting in tried if setting.runs and setting.measured_bytes is not None),
                  key=lambda setting: setting.amount)


def _listed(settings: Sequence[Setting], separator: str) -> str:
    return separator.join(f"{setting.name} {setting.mib:,.1f} MiB" for setting in settings)
