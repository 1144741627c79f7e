"""Checks of the recipe: batch, schedule, clipping, precision, quantisation, intervals, run length and keys without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from powertrain import planner
from powertrain.cost.precision import bf16_gain, bf16_pays, bf16_unit
from powertrain.diagnosis.situation import Situation
from powertrain.diagnosis.verdict import AFFORDABLE, causes
from powertrain.recipe import in_steps
from powertrain.records import Refusal
from powertrain.records.findings import Expected, Finding, Risk, finding, rule
from powertrain.run.fits import needed_bytes, room_bytes
from powertrain.run.prepare import Prepared, schedule_of

FEW_STEPS = 20               # in a run of fewer, the learning rate hardly rises before it falls
LONG_WARMUP = 0.3            # share of the run
# each method's default; far above it training often diverges ("documentation: 001, training is unstable")
USUAL_RATE = {"scratch": 1e-3, "full": 2e-5, "lora": 2e-4, "qlora": 2e-4}
HIGH_RATE = 30.0             # times that default
COSTLY_SHARE = 0.2           # of the run's time: an interval that takes more is critical
DAY_S = 86400.0
GIB = 2**30
OF_TEXT = ("block", "stride", "max_chars", "vocabulary", "validation_split")
OF_EXAMPLES = ("weights", "format", "columns", "split", "max_examples", "max_length", "long_examples", "train_on",
               "chat_template", "end_token", "validation_source")
OF_LSLORA = ("sigma", "regularisation")


@rule("documentation: passes times accumulation must give the batch that was asked for")
def batch(where: Situation) -> Iterator[Finding]:
    """A step divides into uneven passes, an epoch into uneven steps, or the run has very few steps."""
    prepared, data = where.prepared, where.prepared.facts.data
    size, steps = data.train_batch_size, prepared.total_steps
    workload = planner.workload_of(prepared.facts, prepared.plan)
    passes, left = workload.micro_batches, size % workload.micro_batch
    seen = (f"{size} examples per step in {passes} pass{'es' if passes > 1 else ''}, {prepared.steps_per_epoch:,.3g} steps per "
            "epoch")
    numbers = {"train_batch_size": size, "passes": passes, "steps": steps}
    if left and workload.packed_tokens is None:
        even = max(count for count in range(1, workload.micro_batch + 1) if size % count == 0)
        yield finding("low", f"the last pass of a step has {left} examples instead of {workload.micro_batch}",
                      "the update is the same, because the loss is divided by the tokens of the whole step; but the odd shape "
                      "runs at another speed, and compiled blocks run it uncompiled", seen, cure="split the batch evenly",
                      words=(f"techniques.micro_batch.examples={even}",), numbers=numbers)
    if (over := data.examples % size) and prepared.steps_per_epoch >= 1 and prepared.recipe.max_steps is None:
        yield finding("good", "every example is used", f"the {over} examples left after an epoch's whole steps share a step "
                      "with the next epoch", seen)
    if steps < FEW_STEPS:
        yield finding("moderate", f"the run has only {steps} steps", "each step updates the weights once, and so few updates "
                      "teach little", seen, cure="use a smaller batch or more epochs", numbers=numbers,
                      words=(f"train_batch_size={max(1, size * steps // FEW_STEPS)}",))


@rule("documentation: 001, learning rate and warm-up; formula: training/schedule.py")
def schedule(where: Situation) -> Iterator[Finding]:
    """The warm-up takes most of the run, or the learning rate is far above the method's usual one."""
    recipe, steps = where.prepared.recipe, where.prepared.total_steps
    asked = round(recipe.warmup_ratio * steps) if recipe.warmup_steps is None else recipe.warmup_steps
    seen, numbers = f"{asked:,} steps of warm-up in a run of {steps:,}", {"warmup_steps": asked, "steps": steps}
    words = (f"warmup_steps={steps // 20}",)
    if asked >= steps:
        yield finding("critical", "the warm-up is longer than the run", "the learning rate never reaches "
                      f"{recipe.learning_rate:g}; the last step has {schedule_of(recipe, steps).at(steps - 1):.3g}", seen,
                      cure="warm up for a twentieth of the run", words=words, numbers=numbers,
                      expected=Expected("the run trains at the learning rate of the recipe", "formula: the schedule"))
    elif asked > LONG_WARMUP * steps:
        yield finding("moderate", f"{asked / steps:.0%} of the run is warm-up", "most of these steps train below the learning "
                      "rate of the recipe", seen, cure="warm up for a twentieth of the run", words=words, numbers=numbers)
    usual = USUAL_RATE[recipe.method]
    if recipe.learning_rate > HIGH_RATE * usual:
        yield finding("moderate", "the learning rate is unusually high", f"{recipe.learning_rate:g} is "
                      f"{recipe.learning_rate / usual:,.0f} times the usual rate of method={recipe.method}; the loss may rise "
                      "or become not finite", f"learning_rate={recipe.learning_rate:g}", cure="start lower",
                      words=(f"learning_rate={usual:g}",), risk=Risk(accuracy="low"),
                      numbers={"learning_rate": recipe.learning_rate, "usual": usual})


@rule("documentation: 001, gradient overflow; 004, training instability")
def stability(where: Situation) -> Iterator[Finding]:
    """No limit bounds the gradients."""
    recipe = where.prepared.recipe
    dtype = planner.workload_of(where.prepared.facts, where.prepared.plan).dtype
    if recipe.max_grad_norm == 0:
        yield finding("moderate" if dtype == "fp16" else "low", "gradients are not clipped", "one bad batch can undo the "
                      "progress of many steps", f"max_grad_norm=0, products in {dtype}",
                      cure="clip gradients at the usual norm", words=("max_grad_norm=1.0",))
    elif dtype == "fp16":
        yield finding("good", "fp16 training scales its loss and clips its gradients", "loss scaling keeps small gradients "
                      "from vanishing, and steps whose gradients overflow are skipped",
                      f"max_grad_norm={recipe.max_grad_norm:g}")


@rule("technique: bf16")
def precision(where: Situation) -> Iterator[Finding]:
    """The dtype of the matrix products is not the fastest that this device computes."""
    hardware = where.prepared.facts.hardware
    dtype, gain = planner.workload_of(where.prepared.facts, where.prepared.plan).dtype, bf16_gain(hardware)
    measured = "" if gain is None else f"; bf16 products were measured {gain:.2g} times as fast as fp32 products"
    seen, numbers = f"products in {dtype} on {hardware.name}{measured}", {} if gain is None else {"bf16_gain": gain}
    if dtype == "bf16" and not bf16_pays(hardware):
        why = "this device only emulates bf16" if bf16_unit(hardware) is None else "bf16 products are no faster on this device"
        yield finding("moderate", "bf16 is pinned on and brings no speed here", why, seen, cure="compute in fp32",
                      words=("techniques.bf16=off",), numbers=numbers,
                      expected=_times_as_fast(None if gain is None else 1 / gain))
    elif dtype == "fp32" and bf16_pays(hardware):
        yield finding("moderate", "products are computed in fp32 where bf16 is faster", f"{bf16_unit(hardware)}", seen,
                      cure="compute products in bf16", words=("techniques.bf16=on",), expected=_times_as_fast(gain),
                      numbers=numbers)
    elif dtype == "fp16" and bf16_pays(hardware):
        yield finding("low", "fp16 is used where bf16 is as fast", "fp16 overflows and needs loss scaling; bf16 has the range "
                      "of fp32 at the same speed", seen, cure="compute products in bf16",
                      words=("techniques.fp16=off", "techniques.bf16=on"), numbers=numbers)
    else:
        yield finding("good", f"products are computed in {dtype}", "no other dtype is known to be faster here", seen)


def _times_as_fast(gain: float | None) -> Expected:
    if gain is None or gain <= 1:
        return Expected("not measured here", "none")
    return Expected(f"at most {gain:.2g} times as fast, if a step were products alone", "formula: the measured GEMM peaks",
                    (1.0, gain))


@rule("technique: four_bit_base")
def quantisation(where: Situation) -> Iterator[Finding]:
    """The base model is quantised to 4 bits although the unquantised base fits the memory."""
    facts, plan = where.prepared.facts, where.prepared.plan
    if facts.model.method != "qlora" or facts.model.provider != "native":
        return
    whole = replace(facts.model, method="lora", frozen_dtype=facts.model.unquantised_dtype or "fp32", unquantised_dtype="")
    steps = tuple(step for step in plan.steps if step.technique.name != "four_bit_base")
    needed, room = needed_bytes(replace(facts, model=whole), replace(plan, steps=steps)), room_bytes(facts)
    if needed <= room:
        yield finding("moderate", "the base fits the memory unquantised", "every product unpacks the 4-bit weights, which "
                      "takes time, and the memory it saves is not needed",
                      f"{needed / GIB:.2f} GiB would be needed, and {room / GIB:.2f} GiB are free",
                      cure="train adapters on the unquantised base", words=("method=lora",),
                      numbers={"needed_bytes": needed, "room_bytes": room},
                      expected=Expected("faster, and nearer to the base", "none"))


@rule("documentation: intervals of evaluation and saving are often guessed")
def intervals(where: Situation) -> Iterator[Finding]:
    """An interval in steps is longer than the run, or so short that it takes more than 2 % of the run."""
    recipe, steps = where.prepared.recipe, where.prepared.total_steps
    for key, verb in (("eval_steps", "evaluates"), ("save_steps", "saves"), ("logging_steps", "logs")):
        every = in_steps(getattr(recipe, key), where.prepared.steps_per_epoch)
        if every > steps and not where.prepared.resolved.origin(key).is_default:
            yield finding("low", f"{key} is longer than the run", f"the run ends at step {steps:,}, and {verb} only then",
                          f"{key}={getattr(recipe, key)}, {steps:,} steps", cure="do it twice in the run",
                          words=(f"{key}={max(1, steps // 2)}",), numbers={"every": every, "steps": steps})
    if where.observed is None:
        return
    for cause in causes(where.observed):
        if cause.name in where.observed.between and cause.share > AFFORDABLE:
            part = where.observed.between[cause.name]
            yield finding("critical" if cause.share > COSTLY_SHARE else "moderate",
                          f"{cause.name} takes {cause.share:.0%} of the run", f"it should take at most {AFFORDABLE:.0%}",
                          f"{part.seconds:.3g} s every {part.every:,} steps ({part.key}={part.every})", cure=cause.cure,
                          keys=(part.key,), numbers={"share": cause.share, "seconds": part.seconds},
                          expected=Expected(f"{cause.predicted:.2f} times as fast", "measured: the probe",
                                            (1.0, cause.bound)))


@rule("documentation: a setting without effect must be said")
def no_effect(where: Situation) -> Iterator[Finding]:
    """Keys of the recipe have no effect on this run."""
    for key, why in idle_keys(where.prepared):
        origin = where.prepared.resolved.origins.get(key) or "the recipe"
        yield finding("low", f"{key} has no effect here", why, f"{key}, set by {origin}", cure="remove the key", keys=(key,))


@rule("documentation: 003's diagnose tool, training time estimate")
def run_length(where: Situation) -> Iterator[Finding]:
    """The plan cannot predict how long the run takes, or a run of days saves no checkpoint."""
    estimate, recipe = where.prepared.plan.estimate, where.prepared.recipe
    if estimate is None:
        yield finding("low", "the plan cannot predict the time of a step", "the speed of this machine is not measured, or "
                      "the FLOPs of this model are not counted", "no estimate", cure="run `powertrain facts --measure`")
        return
    low_s, high_s = (estimate.steps * step_s for step_s in estimate.step_s)
    seen = f"{estimate.steps:,} steps of {estimate.step_s[0]:.3g} to {estimate.step_s[1]:.3g} s, by the plan's estimate"
    if low_s > DAY_S and not recipe.save_steps:
        yield finding("critical", "a run of days saves no checkpoint", f"{low_s / DAY_S:.1f} to {high_s / DAY_S:.1f} days of "
                      "work could be lost", f"{seen}; save_steps=0", cure="save checkpoints during the run",
                      words=(f"save_steps={max(1, estimate.steps // 100)}",), numbers={"low_s": low_s, "high_s": high_s})
    else:
        yield finding("good", "the plan predicts the time of the run", f"about {(low_s + high_s) / 7200:.2g} hours of training",
                      seen)


# ------------------------------------------------------------------------------------------------ keys without effect


def idle_keys(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """Yield (dotted key that the user set, why it has no effect)."""
    for key, why in {**_of_method(prepared), **_of_schedule(prepared), **_of_pauses(prepared)}.items():
        if prepared.resolved.origin(key).is_users:
            yield key, why
    yield from _of_techniques(prepared)


def _of_method(prepared: Prepared) -> dict[str, str]:
    recipe = prepared.recipe
    scratch = recipe.method == "scratch"
    others, why = (OF_EXAMPLES, "the key is for examples, and training from scratch reads text in blocks") if scratch else \
        (OF_TEXT, "the key is for text in blocks, and a pretrained model is trained on examples")
    idle = {f"data.{leaf}": why for leaf in others}
    if recipe.method not in ("lora", "qlora"):
        idle |= {f"lora.{leaf}": f"method={recipe.method} has no adapters" for leaf in type(recipe.lora).model_fields}
    elif recipe.lora.kind != "lslora":
        idle |= {f"lora.{leaf}": f"only lora.kind=lslora reads it, and lora.kind is {recipe.lora.kind}" for leaf in OF_LSLORA}
    if recipe.method != "qlora":
        idle |= {f"quantisation.{leaf}": f"only method=qlora quantises, and the method is {recipe.method}"
                 for leaf in type(recipe.quantisation).model_fields}
    return idle


def _of_schedule(prepared: Prepared) -> dict[str, str]:
    recipe = prepared.recipe
    idle: dict[str, str] = {}
    if recipe.lr_scheduler_type == "constant":
        idle["min_lr_rate"] = "a constant learning rate does not fall"
    if recipe.warmup_steps is not None:
        idle["warmup_ratio"] = f"warmup_steps={recipe.warmup_steps} overrides it"
    for key in ("max_steps", "train_time_s"):
        if getattr(recipe, key) is not None:
            idle["num_train_epochs"] = f"{key}={getattr(recipe, key):g} sets the length of the run"
    return idle


def _of_pauses(prepared: Prepared) -> dict[str, str]:
    recipe, held_out = prepared.recipe, len(prepared.material.held_out)
    idle: dict[str, str] = {}
    if not held_out:
        idle |= dict.fromkeys(("eval_steps", "max_eval_samples"), "no data is held out for evaluation")
    elif recipe.max_eval_samples is not None and recipe.max_eval_samples > held_out:
        idle["max_eval_samples"] = f"only {held_out:,} examples are held out"
    if not recipe.sample.tokens:
        idle |= dict.fromkeys(("sample.prompt", "sample.temperature", "sample.top_k"), "sample.tokens=0 writes no sample")
    return idle


def _of_techniques(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """Yield pins that repeat the plan's own choice, or that another technique of the plan makes idle."""
    facts, recipe = prepared.facts, prepared.recipe
    in_force = {step.technique.name for step in prepared.plan.steps}
    for name, pin in recipe.techniques.items():
        key = f"techniques.{name}"
        if pin == "off" and isinstance(answer := planner.ask_anew(name, facts, recipe), Refusal):
            yield key, f"the plan leaves it off anyway: {answer.because}"
        elif name == "tf32" and name in in_force and "bf16" in in_force:
            yield key, "tf32 changes fp32 products, and bf16 computes the products"
        elif (why := _idle_setting(name, pin, prepared)) is not None:
            yield key, why


def _idle_setting(name: str, pin: Any, prepared: Prepared) -> str | None:
    settings = pin if isinstance(pin, Mapping) else {}
    if name == "loader" and settings.get("pinned") and prepared.facts.hardware.device != "cuda":
        return "pinned memory speeds up copies to an NVIDIA GPU, and this machine has none"
    if name == "micro_batch" and settings.get("examples", 0) > prepared.recipe.train_batch_size:
        return f"a step has only {prepared.recipe.train_batch_size} examples"
    if name == "activation_checkpointing" and settings.get("keep_attention") and prepared.facts.model.dropout:
        return "with dropout, attention is always recomputed"
    return None
