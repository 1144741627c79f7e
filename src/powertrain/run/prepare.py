"""From a recipe to a setup with its plan in force: everything before the first step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from powertrain import planner
from powertrain.data.blocks import Blocks
from powertrain.data.collate import collate
from powertrain.data.store import TokenStore, open_store
from powertrain.facts.data import data_facts
from powertrain.facts.hardware import read_hardware
from powertrain.facts.model import model_facts
from powertrain.facts.software import read_software
from powertrain.models.config import ModelConfig, make_config
from powertrain.models.decoder import Decoder
from powertrain.recipe import Recipe, Resolved
from powertrain.records import Facts, Plan, WrongUse
from powertrain.training.loop import apply_plan, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup, plain_adamw, plain_setup

Say = Callable[[str], None]

PROBE_S = 4.0                # a run of a given time is measured this long before it is given its steps
PROBE_STEPS = (2, 12)        # warm-up steps left out, and the most that are timed


@dataclass(frozen=True)
class Prepared:
    """All that is decided before a run; `powertrain plan` prints it, `train` carries it out."""

    resolved: Resolved
    facts: Facts
    store: TokenStore
    config: ModelConfig
    plan: Plan
    total_steps: int

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @property
    def steps_per_epoch(self) -> float:
        return self.facts.data.examples / self.facts.data.train_batch_size


def prepare(resolved: Resolved, cache: Path, say: Say) -> Prepared:
    """Read machine, data and model, and make the plan. Raises WrongUse for whatever cannot be trained."""
    say("looking at the machine (measured once, then cached)")
    hardware, software = read_hardware(cache), read_software()
    recipe = resolved.recipe
    say(f"reading {recipe.data.source}")
    store = open_recipe_store(recipe, cache)
    _check_prompt(recipe, store)
    config, derived = _config(recipe, store)
    resolved = resolved.with_planned(derived)
    recipe = resolved.recipe
    block, stride = recipe.data.block, recipe.data.stride or recipe.data.block
    Blocks(store.train, block, stride)       # raises WrongUse where not one block fits
    facts = Facts(hardware, software, model_facts(config),
                  data_facts(store, block=block, stride=stride, train_batch_size=recipe.train_batch_size))
    total_steps = _total_steps(recipe, facts)
    plan = planner.make_plan(facts, recipe, total_steps)
    if recipe.train_time_s is not None and plan.estimate is not None:
        total_steps = max(1, round(recipe.train_time_s * 2 / sum(plan.estimate.step_s)))
        plan = planner.make_plan(facts, recipe, total_steps)
    return Prepared(resolved, facts, store, config, plan, total_steps)


def open_recipe_store(recipe: Recipe, cache: Path) -> TokenStore:
    data = recipe.data
    return open_store(data.source, tokenizer=data.tokenizer, vocabulary=data.vocabulary, text_field=data.text_field,
                      max_chars=data.max_chars, validation_share=data.validation_share,
                      validation_split=data.validation_split, seed=recipe.seed, cache=cache)


def build_setup(prepared: Prepared) -> Setup:
    """The model, seeded, and everything around it, with the plan applied and confirmed."""
    recipe, data = prepared.recipe, prepared.facts.data
    torch.manual_seed(recipe.seed)
    model = Decoder(prepared.config).to(prepared.facts.hardware.device)
    optimizer = plain_adamw(recipe.learning_rate, (recipe.adam_beta1, recipe.adam_beta2), recipe.adam_epsilon)
    setup = plain_setup(model, Blocks(prepared.store.train, data.block, data.stride), collate,
                        train_batch_size=recipe.train_batch_size, seed=recipe.seed, optimizer=optimizer)
    with torch.random.fork_rng():            # a confirmation may run the model, and dropout draws
        return apply_plan(setup, prepared.plan)


def with_measured_length(prepared: Prepared, setup: Setup, say: Say) -> Prepared:
    """`train_time_s` turned into `max_steps` by timing a few steps on a copy of the model."""
    seconds = prepared.recipe.train_time_s
    if seconds is None:
        return prepared
    say(f"timing a few steps, to fit the run into {seconds:g} s")
    step_s = _probe(setup, prepared)
    steps = max(1, round(seconds / step_s))
    resolved = prepared.resolved.with_planned({
        "train_time_s": (None, f"{seconds:g} s became max_steps"),
        "max_steps": (steps, f"{seconds:g} s at {step_s:.3g} s a step, timed here")})
    estimate = prepared.plan.estimate and replace(prepared.plan.estimate, steps=steps)
    return replace(prepared, resolved=resolved, total_steps=steps, plan=replace(prepared.plan, estimate=estimate))


def with_stored_plan(prepared: Prepared, plan: Mapping[str, Any]) -> Prepared:
    """The plan that the run was started with, for its continuation: another plan may round differently."""
    return replace(prepared, plan=planner.from_json(plan))


def schedule_of(recipe: Recipe, total_steps: int) -> Schedule:
    warmup_steps = round(recipe.warmup_ratio * total_steps) if recipe.warmup_steps is None else recipe.warmup_steps
    return Schedule(recipe.lr_scheduler_type, recipe.learning_rate, total_steps, min(warmup_steps, total_steps),
                    recipe.min_lr_rate)


def _config(recipe: Recipe, store: TokenStore) -> tuple[ModelConfig, dict[str, tuple[Any, str]]]:
    """The decoder's config, and the recipe's open values as derived: dotted key -> (value, reason)."""
    wanted, tokens = recipe.model, store.tokenizer.vocabulary
    if wanted.vocabulary is not None and wanted.vocabulary < tokens:
        raise WrongUse(f"model.vocabulary={wanted.vocabulary} is smaller than the tokenizer's {tokens} tokens; leave it "
                       f"out, or use {tokens} or more")
    if wanted.context is not None and wanted.context < recipe.data.block:
        raise WrongUse(f"model.context={wanted.context} is shorter than data.block={recipe.data.block}: the model could "
                       "not read an example; raise the one or lower the other")
    given = wanted.model_dump(exclude={"family", "vocabulary", "context"})
    config, reasons = make_config(wanted.family, vocabulary=wanted.vocabulary or tokens,
                                  context=wanted.context or recipe.data.block, **given)
    config = replace(config, end_of_text=store.tokenizer.end_of_text)
    reasons = {"vocabulary": "the tokenizer's tokens", "context": "data.block", **reasons}
    open_keys = [key for key in type(wanted).model_fields if getattr(wanted, key) is None and key in reasons]
    derived: dict[str, tuple[Any, str]] = {
        f"model.{key}": (getattr(config, key), reasons[key]) for key in open_keys if hasattr(config, key)}
    if recipe.data.stride is None:
        derived["data.stride"] = (recipe.data.block, "data.block: every token once an epoch")
    return config, derived


def _check_prompt(recipe: Recipe, store: TokenStore) -> None:
    """A prompt that the tokenizer cannot read fails now, not at the first evaluation."""
    try:
        store.tokenizer.encode(recipe.sample.prompt)
    except WrongUse as error:
        raise WrongUse(f"sample.prompt={recipe.sample.prompt!r} cannot be used: {error}") from None


def _total_steps(recipe: Recipe, facts: Facts) -> int:
    if recipe.max_steps is not None:
        return recipe.max_steps
    return max(1, int(recipe.num_train_epochs * facts.data.examples / recipe.train_batch_size))


def _probe(setup: Setup, prepared: Prepared) -> float:
    """Seconds of a step, the median of a few on a copy of the model."""
    warm_up, most = PROBE_STEPS
    trial = replace(setup, model=copy.deepcopy(setup.model))
    state = new_state(trial, prepared.recipe.weight_decay)
    schedule = Schedule("constant", prepared.recipe.learning_rate, warm_up + most)
    began, seconds = time.perf_counter(), []
    with torch.random.fork_rng():
        for result in train(trial, state, schedule, prepared.recipe.max_grad_norm):
            result.loss.item()               # wait for the device, so that the time is the step's
            seconds.append(result.seconds)
            if len(seconds) > warm_up and time.perf_counter() - began > PROBE_S:
                break
    timed = sorted(seconds[warm_up:] or seconds[-1:])
    return timed[len(timed) // 2]
