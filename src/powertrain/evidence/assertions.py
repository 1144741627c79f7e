"""The assertions of a bench: sentences about its settings that hold or fail, with their numbers.

Only what must be true of a correct program is here: memory and losses. Speed is measured and reported, and fails nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.evidence.parity import compare_losses
from powertrain.records.evidence import Parity

MIB = 2**20
PREDICTION = 0.05            # of the measured peak: as exact as the prediction of memory promises to be
SLACK_MIB = 1                # less decides nothing: models so small are mostly what the arithmetic leaves out


@dataclass(frozen=True)
class Tried:
    """One setting, with the results of its first steps in a fresh process."""

    name: str                                # of its arm: "4 examples", "2 passes", "bf16", "2 workers"
    amount: int | str                        # what is varied: examples of the micro-batch, passes, workers; the precision
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    measured_bytes: int | None = None        # allocated peak of a step; None: not counted on this device
    predicted_bytes: int | None = None       # None: another library computes the model
    dtype: str = "fp32"                      # of the matrix products
    error: str | None = None

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


def trains(table: str, tried: Sequence[Tried]) -> Assertion:
    """Assert that every setting runs with finite losses and gradients that are not all zero."""
    wrong = [f"{setting.name}: {why}" for setting in tried if (why := _why_it_does_not(setting)) is not None]
    return Assertion(f"{table}: every setting trains", not wrong,
                     "; ".join(wrong) or f"{', '.join(setting.name for setting in tried)}: losses finite, gradients not zero")


def _why_it_does_not(setting: Tried) -> str | None:
    if setting.error is not None:
        return setting.error
    if not setting.losses or not all(math.isfinite(loss) for loss in setting.losses):
        return f"the losses are not finite ({', '.join(f'{loss:g}' for loss in setting.losses)})"
    return None if any(setting.grad_norms) else "all gradients are zero"


def memory_grows(tried: Sequence[Tried]) -> Assertion | None:
    """Assert that more examples in a pass take more memory. None where fewer than two settings were measured."""
    counted = _measured(tried)
    if len(counted) < 2:
        return None
    wrong = [f"{larger.name} take {larger.mib:,.1f} MiB where {smaller.name} take {smaller.mib:,.1f} MiB"
             for smaller, larger in itertools.pairwise(counted) if larger.mib <= smaller.mib]
    return Assertion("micro-batch: memory grows with it", not wrong, "; ".join(wrong) or _listed(counted, ", "))


def memory_is_as_predicted(table: str, tried: Sequence[Tried]) -> Assertion | None:
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


def accumulation_takes_no_more(tried: Sequence[Tried]) -> Assertion | None:
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


def losses_agree(what: str, exactness: str, reference: Tried, others: Sequence[Tried]
                 ) -> tuple[Assertion, dict[str, Parity]] | None:
    """Assert that `others` learn the same as `reference`, as `exactness` demands. None where none ran."""
    if reference.error is not None or not (ran := [setting for setting in others if setting.error is None]):
        return None
    found = {setting.name: compare_losses(exactness, reference, setting, dtype=setting.dtype) for setting in ran}
    wrong = [f"{name}: {parity.because}" for name, parity in found.items() if not parity.holds]
    widest = max(found.values(), key=lambda parity: (parity.loss_difference, parity.grad_norm_difference))
    return Assertion(what, not wrong, "; ".join(wrong) or f"{', '.join(found)}: {widest.because}"), found


def _measured(tried: Sequence[Tried]) -> list[Tried]:
    """Return the settings whose peak was measured, by their amount."""
    return sorted((setting for setting in tried if setting.error is None and setting.measured_bytes is not None),
                  key=lambda setting: setting.amount)


def _listed(settings: Sequence[Tried], separator: str) -> str:
    return separator.join(f"{setting.name} {setting.mib:,.1f} MiB" for setting in settings)
