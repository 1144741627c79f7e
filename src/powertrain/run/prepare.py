"""From a recipe to a setup with its plan in force: everything before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain import planner
from powertrain.facts.clusters import machine_and_software
from powertrain.facts.hardware import read_hardware, shared_by
from powertrain.facts.software import read_software
from powertrain.recipe import Recipe, Resolved, flat
from powertrain.records import Facts, Hardware, Plan, Software, WrongUse, to_plain
from powertrain.records.phases import LookingAtMachine, ReadingData, Tell, nobody
from powertrain.records.version import VERSION
from powertrain.run import ending
from powertrain.run.learned import read_tuned, with_speeds
from powertrain.run.links import with_links
from powertrain.run.material import Material, pretrained_material, scratch_material
from powertrain.run.reference import with_reference
from powertrain.training.objectives import objective_of
from powertrain.training.optimizers import open_values, optimizer_of, selection_of
from powertrain.training.schedule import Schedule

if TYPE_CHECKING:
    import torch

    from powertrain.training.ranks import Ranks
    from powertrain.training.setup import Setup

Say = Callable[[str], None]

PROBE_S = 4.0                # a run of a given time is measured this long before it is given its steps
PROBE_STEPS = (2, 12)        # warm-up steps left out, and the most that are timed


@dataclass(frozen=True)
class Prepared:
    """All that is decided before a run; `powertrain plan` prints it, `train` carries it out."""

    facts: Facts
    material: Material
    plan: Plan
    total_steps: int
    cache: Path | None = None                # where what a run teaches is kept; None: nowhere

    @property
    def resolved(self) -> Resolved:
        return self.material.resolved

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @property
    def steps_per_epoch(self) -> float:
        return self.facts.data.examples / self.facts.data.train_batch_size


def differences(before: Plan, after: Plan) -> list[str]:
    """Return a clause for each technique that one plan has otherwise than the other, such as "bf16 off"."""
    then, now = ({step.technique.name: step.technique for step in plan.steps} for plan in (before, after))
    return [f"{name} {'off' if name not in now else 'on' if name not in then else f'from {then[name]} to {now[name]}'}"
            for name in dict.fromkeys([*then, *now]) if then.get(name) != now.get(name)]


def is_like(hardware: Hardware, then: Mapping[str, Any]) -> bool:
    """Return whether a device is of the kind that a run's facts.json names: a CPU, a Mac's GPU, or a GPU of one generation."""
    now = to_plain(hardware)
    return all(now[field] == then.get(field, now[field]) for field in ("device", "compute_capability", "architecture"))


def with_stored_plan(prepared: Prepared, stored: Plan, then: Mapping[str, Any], say: Say) -> Prepared:
    """Return the run with the plan that it was started with, since another plan may round differently.

    On another kind of device than the one of `then` (the hardware in facts.json) it keeps the plan made here, and says what
    changes.
    """
    if is_like(prepared.facts.hardware, then):
        return replace(prepared, plan=stored)
    changes = "; ".join(differences(stored, prepared.plan)) or "nothing"
    say(f"this run began on {then.get('name', 'another device')}, and goes on on {prepared.facts.hardware.name} with a plan of "
        f"its own: the same training, rounded otherwise. What changes: {changes}")
    return prepared


def prepare(resolved: Resolved, cache: Path, tell: Tell, *, processes: int = 1, here: int | None = None,
            machine: str | None = None, warn: Say = lambda text: None) -> Prepared:
    """Read machine, data and model, and make the plan. Raises WrongUse for whatever cannot be trained.

    `processes` share the run, `here` of them on this machine (default: all). `machine` names another one: facts/clusters.py.
    `tell` hears of what takes time, `warn` of a GPU that stands idle.
    """
    if machine is None:
        check_batch(resolved.recipe, processes)
        tell(LookingAtMachine())
        hardware = with_speeds(with_links(shared_by(read_hardware(cache), processes, here or processes), cache), cache)
        if (idle := hardware.idle_gpu) is not None:
            warn(f"the run will use the CPU: {idle.because}; {idle.cure}")
        software = read_software(hardware)
    else:
        hardware, software = machine_and_software(machine, cache)
        hardware = shared_by(hardware, processes, here or processes) if processes > 1 else hardware
        check_batch(resolved.recipe, hardware.processes)
    material = material_of(resolved, software, cache, tell)
    return planned(replace(material, resolved=with_optimizer(material.resolved)), hardware, software, cache)


def planned(material: Material, hardware: Hardware, software: Software, cache: Path | None) -> Prepared:
    """Return the run as it is planned for a machine. Raises WrongUse where optimizer or objective cannot be used there."""
    recipe = material.resolved.recipe
    optimizer = optimizer_of(recipe)
    row = optimizer.row
    if (why := row.why_not(hardware, software)) is not None:
        raise WrongUse(f"optimizer={row.name} cannot be used: {why}", keys=("optimizer.name",), cure=("optimizer=adamw",))
    objective = objective_of(recipe)
    if (why := objective.why_not(material.model)) is not None:
        raise WrongUse(f"objective={recipe.objective.name} cannot be used: {why}", keys=("objective.name",))
    facts = Facts(hardware, software, material.model, material.data, optimizer.facts_on(hardware.device),
                  objective.has_terms, objective.has_reference)
    total_steps = recipe.steps(facts.data.examples)
    tuned = None if cache is None else read_tuned(cache, facts, recipe)
    plan = planner.make_plan(facts, recipe, total_steps, tuned)
    if recipe.train_time_s is not None and plan.estimate is not None:
        total_steps = max(1, round(recipe.train_time_s * 2 / sum(plan.estimate.step_s)))
        plan = planner.make_plan(facts, recipe, total_steps, tuned)
    ending.check(recipe, len(material.held_out), facts.data.examples / facts.data.train_batch_size, total_steps)
    return Prepared(facts, material, plan, total_steps, cache)


def material_of(resolved: Resolved, software: Software, cache: Path, tell: Tell) -> Material:
    """Return the run's data and model. Raises WrongUse where they are not here or cannot be read."""
    if resolved.recipe.method != "scratch":
        return pretrained_material(resolved, software, cache, tell)
    tell(ReadingData(source=", ".join(resolved.recipe.data.sources)))
    return scratch_material(resolved, cache)


def check_batch(recipe: Recipe, processes: int) -> None:
    """Raise WrongUse where some of the processes would have no example of a step."""
    if recipe.train_batch_size < processes:
        most = f"{recipe.train_batch_size} process{'es' * (recipe.train_batch_size > 1)}"
        raise WrongUse(f"train_batch_size={recipe.train_batch_size} cannot be shared by {processes:,} processes, because each "
                       f"needs an example; use at most {most}, or train_batch_size={processes} or more",
                       keys=("train_batch_size",))


def agreed(ranks: Ranks, prepared: Prepared) -> Prepared:
    """Return the run as the first process has prepared it. Raises WrongUse, in every process, where they have not the same."""
    told = {"version of powertrain": VERSION,
            **{f"version of {name}": version for name, version in prepared.facts.software.versions.items()},
            "data": prepared.facts.data.digest, **dict(flat(prepared.recipe.model_dump()))}
    first, *others = ranks.each(told)
    for name in {**first, **{name: None for other in others for name in other}}:
        if (rank := next((rank for rank, other in enumerate(others, 1) if other.get(name) != first.get(name)), None)):
            raise WrongUse(f"process 0 and process {rank} of this run do not have the same {name}: {first.get(name)} and "
                           f"{others[rank - 1].get(name)}; start all with the same software, recipe and data")
    return replace(prepared, plan=ranks.agree(prepared.plan), total_steps=ranks.agree(prepared.total_steps))


def with_optimizer(resolved: Resolved) -> Resolved:
    """Return the recipe with every setting of its optimizer. Raises WrongUse for an unknown optimizer or setting."""
    return resolved.with_planned(open_values(resolved.recipe, resolved.is_open))


def build_setup(prepared: Prepared, tell: Tell = nobody) -> Setup:
    """Return the model, seeded, and everything around it, with the plan applied and confirmed. A reference is scored now."""
    import torch

    from powertrain.models.groups import freeze
    from powertrain.training.loop import apply_plan
    from powertrain.training.setup import plain_setup

    recipe, material = prepared.recipe, prepared.material
    torch.manual_seed(recipe.seed)
    model = material.build().to(prepared.facts.hardware.device)
    freeze(model, selection_of(recipe))
    setup = plain_setup(model, material.training, material.collate, train_batch_size=recipe.train_batch_size,
                        seed=recipe.seed, optimizer=optimizer_of(recipe), objective=objective_of(recipe),
                        order=recipe.data.order, code=None if prepared.cache is None else prepared.cache / "code")
    with draws_taken_back(setup.device):     # a confirmation may run the model, and dropout draws
        setup = apply_plan(setup, prepared.plan)
        return with_reference(setup, material, prepared.facts, prepared.plan, prepared.cache, tell)


def with_measured_length(prepared: Prepared, setup: Setup, tell: Callable[[float], None]) -> Prepared:
    """Return the run with `train_time_s` turned into `max_steps`, by timing a few steps, which are then taken back."""
    seconds = prepared.recipe.train_time_s
    if seconds is None:
        return prepared
    tell(seconds)
    step_s = _timed_step_s(setup, prepared)
    steps = setup.ranks.agree(max(1, round(seconds / step_s)))
    resolved = prepared.resolved.with_planned({
        "train_time_s": (None, f"{seconds:g} s became max_steps"),
        "max_steps": (steps, f"{seconds:g} s at {step_s:.3g} s a step, timed here")})
    estimate = prepared.plan.estimate and replace(prepared.plan.estimate, steps=steps)
    return replace(prepared, material=replace(prepared.material, resolved=resolved), total_steps=steps,
                   plan=replace(prepared.plan, estimate=estimate))


def draws_taken_back(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which host and `device` draw as if nothing had been drawn inside; other GPUs are left alone."""
    import torch

    return torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type)


def schedule_of(recipe: Recipe, total_steps: int) -> Schedule:
    warmup_steps = round(recipe.warmup_ratio * total_steps) if recipe.warmup_steps is None else recipe.warmup_steps
    return Schedule(recipe.lr_scheduler_type, recipe.learning_rate, total_steps, min(warmup_steps, total_steps),
                    recipe.min_lr_rate)


def _timed_step_s(setup: Setup, prepared: Prepared) -> float:
    """Return the seconds of a step, the median of a few. The model is left as it was, also where memory runs out."""
    import torch

    from powertrain.training.loop import new_state, train

    warm_up, most = PROBE_STEPS
    trained = [parameter for parameter in setup.model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    state = new_state(setup, prepared.recipe.weight_decay)
    schedule = Schedule("constant", prepared.recipe.learning_rate, warm_up + most)
    began, seconds = time.perf_counter(), []
    try:
        with draws_taken_back(setup.device):
            for result in train(setup, state, schedule, prepared.recipe.max_grad_norm):
                result.loss.item()           # wait for the device, so that the time is the step's
                seconds.append(sum(result.laps.parts().values()))
                if setup.ranks.agree(len(seconds) > warm_up and time.perf_counter() - began > PROBE_S):
                    break
    finally:
        state.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, value in zip(trained, before, strict=True):
                parameter.copy_(value)
    timed = sorted(seconds[warm_up:] or seconds[-1:])
    return timed[len(timed) // 2]
