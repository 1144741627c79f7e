"""A loss or gradient that is no number any more: where it began, and what came before it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from powertrain.diagnosis.instability import around
from powertrain.diagnosis.run_record import RunRecord, is_finite
from powertrain.diagnosis.symptoms.base import Symptom, several
from powertrain.records.findings import Cure, Finding, Risk

# how a run says that it ended for this (run/session.py, training/checkpoint.py)
LOSS = re.compile(r"the loss of step (\d+) is not finite \((\S+)\)")
WEIGHTS = re.compile(r"after step (\d+) (\d+ weights) are not finite")
OVERFLOW = 65_504.0          # the largest number of fp16


class NotFinite(Symptom):
    """Arithmetic cannot come back from NaN: every weight that it reaches is lost.

    A run stops at the first loss that is not finite. Gradients that are not finite come before it; under fp16 they are
    ordinary, the step is skipped (skipped_steps.py).
    """

    name = "not_finite"
    rests_on = "documentation: document 001, troubleshooting: loss becomes NaN"

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        first, what = _first(run)
        if not first:
            return
        place = next((number for number, step in enumerate(run.steps) if step["step"] >= first), len(run.steps))
        if not place:
            yield cls.found(
                "critical", f"{what} from the start, in step {first:,}",
                "no step had been taken, so no update has thrown the weights: the model, its weights or the data were "
                "broken before", _said(run), Cure("check the data and the weights that the run starts from"),
                expected="the run trains", risk=Risk(difficulty="medium"))
            return
        seen = around(run, place)
        yield cls.found(
            "critical", f"{what} at step {first:,}, and nothing is learned from there on",
            f"{several(first - 1, 'step')} went before it. Likely because {seen.because}",
            [*_said(run), *seen.evidence, *_before(run, place)], seen.cure, expected="the run gets past that step",
            risk=Risk(accuracy="low"))


def _first(run: RunRecord) -> tuple[int, str]:
    """The step (from 1) at which it began, and what was not finite there; 0 where all is."""
    fp16 = "fp16" in run.techniques
    for step in run.history.steps:
        if not is_finite(step["loss"]):
            return int(step["step"]), f"the loss is {step['loss']}"
        if not is_finite(step["grad_norm"]) and not fp16:
            return int(step["step"]), f"the gradient is not finite ({step['grad_norm']})"
    if found := LOSS.search(run.said_at_end):
        return int(found[1]), f"the loss is {found[2]}"
    if found := WEIGHTS.search(run.said_at_end):
        return int(found[1]), f"{found[2]} are not finite"
    return 0, ""


def _said(run: RunRecord) -> list[str]:
    return [f"the run ended: {run.said_at_end.partition(';')[0]}"] if run.said_at_end else []


def _before(run: RunRecord, place: int) -> Iterator[str]:
    last = run.steps[place - 1]
    yield f"loss {last['loss']:.4g} at step {last['step']:,}, the last that is known"
    skipped = [step["step"] for step in run.steps[:place] if not is_finite(step["grad_norm"])]
    if skipped:
        yield f"{several(len(skipped), 'step')} before it were skipped by fp16's loss scaling, first step {skipped[0]:,}"
