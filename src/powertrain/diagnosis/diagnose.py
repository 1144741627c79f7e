"""A diagnosis: checks of machine, software, data and recipe, a short probe, the cures tried, and the verdict.

Nothing of it is kept: no run folder, no checkpoint, no study.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from powertrain.diagnosis.checks import CHECKS, Situation
from powertrain.diagnosis.probe import Probed, probe
from powertrain.diagnosis.remedies import remedies_of, try_remedies
from powertrain.diagnosis.situation import Machine, read_machine
from powertrain.diagnosis.verdict import Cause, Forecast, causes, forecast
from powertrain.recipe import Resolved
from powertrain.records import NotApplied, RunFailed, WrongUse
from powertrain.records.findings import SEVERITIES, Finding, Severity, worst_first
from powertrain.records.plan import PinError, PinRefused, PinsClash
from powertrain.run.prepare import Prepared, prepare
from powertrain.training.memory import is_out_of_memory, said_by

Say = Callable[[str], None]
PROBE_SHARE = 0.35           # of the time that is given; the rest is for trying cures
CRITICAL, MODERATE = 1.5, 1.1        # times as fast, from which a cure that is passed over is worth such a word


@dataclass(frozen=True)
class Diagnosis:
    environment: Mapping[str, str]
    findings: tuple[Finding, ...]            # of the checks, the worst first
    causes: tuple[Cause, ...] = ()           # of the verdict, the first being what holds the run back; () without a probe
    forecast: Forecast | None = None
    probed: Probed | None = None             # with the remedies in it, as far as they were tried
    failed: str | None = None                # why the probe has nothing to say

    @property
    def severity(self) -> Severity:
        """Return the severity of the worst finding or cause."""
        found = [*(finding.severity for finding in self.findings), *map(severity_of, self.causes)]
        found += ["critical"] if self.failed else []
        return min(found, key=SEVERITIES.index, default="good")


def prepare_for_diagnosis(resolved: Resolved, cache: Path, say: Say) -> tuple[Prepared, dict[str, PinError]]:
    """Return the prepared run without the pins that cannot be used, and the error of each such technique.

    Raises WrongUse for everything else.
    """
    refused: dict[str, PinError] = {}
    while True:
        try:
            return prepare(resolved, cache, say), refused
        except (PinRefused, PinsClash) as error:
            if error.technique in refused:
                raise
            refused[error.technique] = error
            pins = {name: pin for name, pin in resolved.recipe.techniques.items() if name != error.technique}
            resolved = replace(resolved, recipe=resolved.recipe.model_copy(update={"techniques": pins}))


def check(prepared: Prepared, machine: Machine, refused: Mapping[str, PinError],
          probed: Probed | None = None) -> tuple[Finding, ...]:
    """Return the findings of every check, the worst first; equally bad ones in the order of CHECKS."""
    where = Situation(prepared, machine, tuple(refused.values()), None if probed is None else probed.observed)
    return worst_first((found for one in CHECKS for found in one.find(where)), CHECKS)


def diagnose(words: Sequence[str], prepared: Prepared, refused: Mapping[str, PinError], *, cache: Path, budget_s: float,
             say: Say, price_per_hour: float | None = None, preload: Sequence[str] = ()) -> Diagnosis:
    """Return checks, probe, trials and verdict in about `budget_s`; `failed` is the reason of a run that cannot start."""
    began, machine = time.monotonic(), read_machine(prepared)
    environment = environment_of(prepared)
    say("watching the first steps of the run")
    try:
        probed = probe(prepared, PROBE_SHARE * budget_s)
    except Exception as error:
        if (failed := why_it_fails(error)) is None:
            raise
        return Diagnosis(environment, check(prepared, machine, refused), failed=failed)
    observed, start_s = probed.observed, probed.start_s + probed.first_steps_s
    words = (*words, *(f"techniques.{name}=off" for name in refused))
    observed = replace(observed, remedies=remedies_of(prepared.facts, prepared.recipe, prepared.plan, observed))
    observed = replace(observed, remedies=try_remedies(words, observed, observed.remedies, cache=cache, start_s=start_s,
                                                       deadline=began + budget_s, say=say, preload=preload))
    probed = replace(probed, observed=observed)
    expected = forecast(observed, start_s=start_s, last_s=probed.last_s, price_per_hour=price_per_hour, watts=probed.watts)
    return Diagnosis(environment, check(prepared, machine, refused, probed), tuple(causes(observed)), expected, probed)


def why_it_fails(error: Exception) -> str | None:
    """Return why the run cannot start; None for a fault of this program."""
    if isinstance(error, NotApplied):
        return f"{error}; pin the technique off to train without it"
    if isinstance(error, (RunFailed, WrongUse)):
        return str(error)
    return f"out of memory ({said_by(error)})" if is_out_of_memory(error) else None


def severity_of(cause: Cause) -> Severity:
    """Return the severity of a cause, by the predicted gain of its cure."""
    return "critical" if cause.predicted >= CRITICAL else "moderate" if cause.predicted >= MODERATE else "low"


def environment_of(prepared: Prepared) -> Mapping[str, str]:
    facts = prepared.facts
    hardware, software = facts.hardware, facts.software
    named = ("powertrain", "python", "torch", "transformers", "peft", "bitsandbytes")
    peaks = ", ".join(f"{dtype} {peak / 1e12:.3g} TFLOP/s" for dtype, peak in sorted(hardware.peak_flops_per_s.items()))
    return {"machine": f"{hardware.name} ({hardware.device}), {hardware.cores} cores",
            "memory": f"{hardware.free_memory_bytes / 2**30:.3g} of {hardware.memory_bytes / 2**30:.3g} GiB free",
            "measured": f"{peaks}, {hardware.bandwidth_bytes_per_s / 1e9:.3g} GB/s" if hardware.bandwidth_bytes_per_s else
                        "not measured",
            "software": ", ".join(f"{name} {software.versions[name]}" for name in named if name in software.versions),
            "model": f"{facts.model.family}, {facts.model.parameters:,} parameters, {facts.model.method}",
            "data": f"{facts.data.source}: {facts.data.examples:,} examples, {facts.data.train_tokens:,} tokens",
            "techniques": ", ".join(prepared.plan.names) or "none"}
