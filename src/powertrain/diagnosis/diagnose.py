"""A diagnosis: checks of machine, software, data and recipe, a short probe, the cures tried, and the verdict.

Nothing of it is kept: no run folder, no checkpoint, no study. A run in the past is diagnosed from its stored events. They hold
the time of each part of a step, and nothing about other processes on the machine. So other processes and heat are not found
there; where steps became slower, the symptoms say when.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from powertrain import planner
from powertrain.diagnosis.checks import CHECKS
from powertrain.diagnosis.checks.machine import OF_THIS_MACHINE, UNKNOWN, Machine, Situation, read_machine
from powertrain.diagnosis.observed import Between, Observed, passes_of, step_work
from powertrain.diagnosis.probe import Probed, probe
from powertrain.diagnosis.remedies import Say, remedies_of, try_remedies
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.verdict import Cause, Forecast, causes, forecast
from powertrain.facts.model import facts_from_json
from powertrain.recipe import Resolved, in_steps
from powertrain.records import Facts, NotApplied, Plan, RunFailed, UnknownFact, WrongUse
from powertrain.records.events import Evaluated, Sample, Saved, Step
from powertrain.records.findings import SEVERITIES, Finding, Severity, worst_first
from powertrain.records.phases import in_words
from powertrain.records.plan import PinError, PinRefused, PinsClash
from powertrain.records.sizes import digits
from powertrain.records.timeline import Sharing, sharing
from powertrain.run.folder import continued, existing
from powertrain.run.prepare import Prepared, prepare
from powertrain.training.memory import is_out_of_memory, said_by

PROBE_SHARE = 0.35           # of the time that is given; the rest is for trying cures
BY_MACHINE = ("memory", "precision", "quantisation", "run_length", "pins", "software")       # checks that a machine decides
CRITICAL, MODERATE = 1.5, 1.1        # times as fast, from which a cure that is passed over is worth such a word

LEAST_STEPS = 5              # timed: the parts of fewer are those of a warm-up
COMPILED = 5.0               # times the median step: where blocks are compiled, a step that long compiled again


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


def prepare_for_diagnosis(resolved: Resolved, cache: Path, say: Say,
                          machine: str | None = None) -> tuple[Prepared, dict[str, PinError]]:
    """Return the prepared run without the pins that cannot be used, and the error of each such technique.

    `machine` names one that is not here. Raises WrongUse for everything else.
    """
    refused: dict[str, PinError] = {}
    while True:
        try:
            return prepare(resolved, cache, in_words(say), machine=machine, warn=say), refused
        except (PinRefused, PinsClash) as error:
            if error.technique in refused:
                raise
            refused[error.technique] = error
            pins = {name: pin for name, pin in resolved.recipe.techniques.items() if name != error.technique}
            resolved = replace(resolved, recipe=resolved.recipe.model_copy(update={"techniques": pins}))


def check(prepared: Prepared, machine: Machine | None, refused: Mapping[str, PinError],
          probed: Probed | None = None) -> tuple[Finding, ...]:
    """Return the findings of every check, the worst first; without `machine`, of those that do not read its state."""
    where = Situation(prepared, machine or UNKNOWN, tuple(refused.values()), None if probed is None else probed.observed)
    asked = [one for one in CHECKS if machine is not None or one.name not in OF_THIS_MACHINE]
    return worst_first((found for one in asked for found in one.find(where)), CHECKS)


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
    peaks = [f"{dtype} {peak / 1e12:.3g} TFLOP/s" for dtype, peak in sorted(hardware.peak_flops_per_s.items())]
    bandwidth = [f"{digits(hardware.bandwidth_bytes_per_s / 1e9)} GB/s"] if hardware.bandwidth_bytes_per_s else []
    unknown = " and ".join(["rates of products"] * (not peaks) + ["bandwidth"] * (not bandwidth))
    rates = [", ".join(peaks + bandwidth), f"{unknown}: not {hardware.basis}" if unknown else ""]
    return {"machine": _machine(hardware.name, hardware.device, hardware.cores, hardware.processes),
            "memory": f"{hardware.free_memory_bytes / 2**30:.3g} of {hardware.memory_bytes / 2**30:.3g} GiB free",
            hardware.basis: "; ".join(filter(None, rates)),
            "software" if hardware.basis == "measured" else "installed here":         # there, it is not known
                ", ".join(f"{name} {software.versions[name]}" for name in named if name in software.versions),
            "model": f"{facts.model.family}, {facts.model.parameters:,} parameters, {facts.model.method}",
            "data": f"{facts.data.source}: {facts.data.examples:,} examples, {facts.data.train_tokens:,} tokens",
            "techniques": ", ".join(prepared.plan.names) or "none"}


def _machine(name: str, device: str, cores: int, processes: int) -> str:
    known = f", {cores} core{'s' * (cores > 1)}" * (cores > 0)
    return f"{name} ({device}){known}{f' for each of {processes} processes' * (processes > 1)}"


# ------------------------------------------------------------------------------------------------ of a run in the past


def checked_for(machine: str, found: Diagnosis, folder: Path, cache: Path, say: Say) -> Diagnosis:
    """Return the diagnosis of a run and the checks that another machine decides, made for that machine."""
    resolved = continued(existing(folder), [])
    resolved = replace(resolved, recipe=planner.without_shares(resolved.recipe))
    prepared, refused = prepare_for_diagnosis(resolved, cache, say, machine)
    hardware, shown = prepared.facts.hardware, environment_of(prepared)
    environment = {**found.environment, "checked for": f"{shown['machine']}; {hardware.basis} {shown[hardware.basis]}"}
    checks = [replace(one, title=f"on {hardware.name}: {one.title}") for one in check(prepared, None, refused)
              if one.rule in BY_MACHINE]
    return replace(found, environment=environment, findings=worst_first((*found.findings, *checks)))


def causes_of(run: RunRecord) -> list[Cause]:
    """Return the causes; none where too few steps were timed. Gains are predicted by formulas: no cure was tried."""
    observed, planned = observe(run), _planned(run)
    if observed is None:
        return []
    if planned is not None:
        observed = replace(observed, remedies=remedies_of(planned[0], run.recipe, planned[1], observed))
    return causes(observed)


def description_of(run: RunRecord) -> Mapping[str, str]:
    """Return a short description of the run."""
    hardware, model, data = (run.facts.get(key) or {} for key in ("hardware", "model", "data"))
    found = {"run": f"{run.folder}, {run.state}, {run.last_step:,} of {run.total_steps:,} steps",
             "sessions": f"{len(run.history.sessions)}" if len(run.history.sessions) > 1 else "",
             "machine": _machine(hardware["name"], hardware["device"], hardware["cores"], hardware.get("processes", 1))
                        if "name" in hardware else "",
             "model": f"{model['family']}, {model['parameters']:,} parameters" if "family" in model else "",
             "method": run.recipe.method,
             "data": f"{data['source']}: {data['examples']:,} examples" if "source" in data else "",
             "techniques": ", ".join(run.techniques) or "none"}
    return {name: text for name, text in found.items() if text}


def observe(run: RunRecord) -> Observed | None:
    """Return the figures of the run's steps; None where too few were timed."""
    steps, recompile_s, recompilations = _without_compilations(run)
    if len(steps) < LEAST_STEPS:
        return None
    real, padding = mean(step.real_tokens for step in steps), mean(step.padding_tokens or 0 for step in steps)
    done, total = len(run.history.steps), max(run.total_steps, len(run.history.steps))
    processes, shared = run.history.start.processes, sharing(steps) or Sharing(0.0, 0.0, 1.0)
    step_s = mean(step.seconds for step in steps)
    found = Observed(
        step_s=(step_s,),                    # how the time changed is reported by the symptom slow_down
        parts={name: mean(step.parts[name] for step in steps) for name in steps[0].parts
               if all(name in step.parts for step in steps)},
        steps=total, real_tokens=real, padding_tokens=padding, evaluation=_evaluation(run), checkpoint=_checkpoint(run),
        recompilations=recompilations, recompile_s=recompile_s * total / done,
        exchange_s=shared.communication_share * step_s, waiting_s=shared.waiting_share * step_s)
    if (planned := _planned(run)) is None:
        return found
    facts, plan = planned
    hardware = facts.hardware
    # the measured peaks are those of one process, and so is the work that is held against them
    work = step_work(facts, plan, real / processes, padding / processes) | {
        "real_tokens": real, "padding_tokens": padding} if real else {}
    return replace(
        found, **work, passes=passes_of(facts, plan) / processes, cores=hardware.cores,
        peak_flops_per_s=hardware.peak_flops_per_s, bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s,
        threads=run.techniques.get("threads", {}).get("threads"))


def _planned(run: RunRecord) -> tuple[Facts, Plan] | None:
    """Return facts and plan as values, if the files exist in this version's form."""
    if not run.facts or not run.plan:
        return None
    try:
        return facts_from_json(run.facts), planner.from_json(run.plan)
    except (UnknownFact, WrongUse, KeyError, TypeError):     # a plan of an older version may lack what this one asks for
        return None


def _without_compilations(run: RunRecord) -> tuple[list[Step], float, int]:
    """Return the timed steps without those that compiled again, the seconds of compiling, and their number."""
    steps = run.steady_steps
    if "torch_compile" not in run.techniques or len(steps) < LEAST_STEPS:
        return steps, 0.0, 0
    usual = median(step.seconds for step in steps)
    compiling = [step for step in steps if step.seconds > COMPILED * usual]
    return ([step for step in steps if step.seconds <= COMPILED * usual],
            sum(step.seconds - usual for step in compiling), len(compiling))


def _evaluation(run: RunRecord) -> Between | None:
    """Return the average evaluation during the run, with the sample after it."""
    during = [happened for happened in run.history.of(Evaluated) if not happened.event.final]
    if not during or not (every := in_steps(run.recipe.eval_steps, run.steps_per_epoch or 1)):
        return None
    places = {happened.after_step for happened in during}
    after = [happened for happened in run.history.of(Sample) if happened.after_step in places]
    seconds = sum(one.event.seconds for one in during) + sum(one.event.seconds for one in after)
    return Between("eval_steps", seconds / len(during), every)


def _checkpoint(run: RunRecord) -> Between | None:
    seconds = [happened.event.seconds for happened in run.history.of(Saved) if happened.event.seconds]
    every = in_steps(run.recipe.save_steps, run.steps_per_epoch or 1)
    return Between("save_steps", mean(seconds), every) if seconds and every else None
