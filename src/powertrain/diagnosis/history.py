"""The bounds of a run from its stored events.

A run's events hold the time of each part of a step, and nothing about other processes on the machine. So other processes and
heat are not found here; where steps became slower, the symptoms say when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean, median

from powertrain import planner
from powertrain.diagnosis.observed import Between, Observed, passes_of, step_work
from powertrain.diagnosis.remedies import remedies_of
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.verdict import Cause, causes
from powertrain.facts.model import facts_from_json
from powertrain.recipe import in_steps
from powertrain.records import Facts, Plan, UnknownFact, WrongUse
from powertrain.records.events import Evaluated, Sample, Saved, Step

LEAST_STEPS = 5              # timed: the parts of fewer are those of a warm-up
COMPILED = 5.0               # times the median step: where blocks are compiled, a step that long compiled again


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
             "machine": f"{hardware['name']} ({hardware['device']}), {hardware['cores']} cores" if "name" in hardware else "",
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
    found = Observed(
        step_s=(mean(step.seconds for step in steps),),       # how the time changed is reported by the symptom slow_down
        parts={name: mean(step.parts[name] for step in steps) for name in steps[0].parts
               if all(name in step.parts for step in steps)},
        steps=total, real_tokens=real, padding_tokens=padding, evaluation=_evaluation(run), checkpoint=_checkpoint(run),
        recompilations=recompilations, recompile_s=recompile_s * total / done)
    if (planned := _planned(run)) is None:
        return found
    facts, plan = planned
    hardware = facts.hardware
    return replace(
        found, **(step_work(facts, plan, real, padding) if real else {}), passes=passes_of(facts, plan), cores=hardware.cores,
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
