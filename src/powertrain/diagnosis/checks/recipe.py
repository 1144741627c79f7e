"""Checks of the data (limits, size, cut examples, held-out text, overlap) and of the recipe.

The recipe's are batch, schedule, clipping, precision, quantisation, intervals, run length, keys without effect, and pins.
Pins of techniques are held against the plan; parts that are missing, and models that another library computes, are named.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from powertrain import planner
from powertrain.cost.precision import bf16_pays, gain_of, unit_of
from powertrain.diagnosis.checks.machine import Situation
from powertrain.diagnosis.run_record import usual_rate
from powertrain.diagnosis.verdict import AFFORDABLE, causes
from powertrain.diagnosis.wording import seconds, told
from powertrain.recipe import in_steps
from powertrain.records import Proposal, Refusal, several
from powertrain.records.findings import Expected, Finding, rule
from powertrain.records.plan import Why
from powertrain.records.sizes import digits
from powertrain.run.fits import needed_bytes, room_bytes
from powertrain.run.prepare import Prepared, schedule_of

FEW_EXAMPLES = 10            # fewer than these are an example of the format rather than a data set
MANY_EPOCHS = 10
FEW_CUT, MANY_CUT = 0.01, 0.1                # shares of the examples
FEW_HELD_OUT_TOKENS = 1000   # a loss over fewer tokens is mostly chance
MANY_VISITS = 8.0            # visits of each token in one epoch
FEW_STEPS = 20               # in a run of fewer, the learning rate hardly rises before it falls
LONG_WARMUP = 0.3            # share of the run
HIGH_RATE = 30.0             # times the method's default: far above that default training often diverges
COSTLY_SHARE = 0.2           # of the run's time: an interval that takes more is critical
DAY_S = 86400.0
OF_TEXT = ("block", "stride", "max_chars", "vocabulary", "validation_split")
OF_EXAMPLES = ("weights", "format", "columns", "split", "max_examples", "max_length", "long_examples", "train_on",
               "chat_template", "end_token", "validation_source")
OF_LSLORA = ("sigma", "regularisation")
OF_SAMPLES = ("sample.prompt", "sample.temperature", "sample.top_k")


@rule("fact: the size of the data, beside the recipe's limit")
def data_limits(where: Situation) -> Iterator[Finding]:
    """A limit of the recipe cuts the data off, or is larger than the data."""
    data, recipe = where.prepared.facts.data, where.prepared.recipe.data
    if data.kind == "blocks":
        key, limit, read, unit = "data.max_chars", recipe.max_chars, data.characters, "characters"
    else:
        key, read, unit = "data.max_examples", data.documents, "rows"
        limit = None if recipe.max_examples is None else len(recipe.sources) * recipe.max_examples
    if limit is not None:
        yield told("data_limits.cuts_off" if read >= limit else "data_limits.idle", key=key, limit=limit, read=read, unit=unit)


@rule("fact: the number of examples")
def data_size(where: Situation) -> Iterator[Finding]:
    """The data has fewer examples than a step or a run uses."""
    data, steps = where.prepared.facts.data, where.prepared.total_steps
    examples, size = data.examples, data.train_batch_size
    epochs = steps * size / examples
    seen = f"{examples:,} examples, {size} per step, {steps:,} steps: {epochs:.3g} epochs"
    if size > examples:
        yield told("data_size.less_than_a_step", seen, speed=(1.0, size / examples), examples=examples, train_batch_size=size,
                   epochs=epochs)
    elif examples < FEW_EXAMPLES:
        yield told("data_size.few", seen, examples=examples, train_batch_size=size, epochs=epochs)
    if epochs > MANY_EPOCHS:
        yield told("data_size.many_epochs", seen, examples=examples, train_batch_size=size, epochs=epochs)


@rule("fact: the examples, tokenised")
def truncation(where: Situation) -> Iterator[Finding]:
    """Examples are cut at the length limit, so the model does not learn their ends."""
    data = where.prepared.facts.data
    if data.kind != "blocks" and data.cut_examples:
        share = data.cut_examples / max(1, data.examples)
        yield told("truncation.cut", severity="critical" if share > MANY_CUT else "moderate" if share > FEW_CUT else "low",
                   cut_share=share, limit=where.prepared.recipe.data.max_length or data.max_length, cut=data.cut_examples,
                   examples=data.examples)


@rule("fact: only text that is not trained shows whether a model memorises")
def held_out(where: Situation) -> Iterator[Finding]:
    """No text is held out, or too little, so no evaluation shows whether the model learns or memorises."""
    tokens, share = where.prepared.facts.data.validation_tokens, where.prepared.recipe.data.validation_share
    if not len(where.prepared.material.held_out):
        yield told("held_out.nothing", tokens=tokens, share=share)
    elif tokens < FEW_HELD_OUT_TOKENS:
        yield told("held_out.little", tokens=tokens, share=share)


@rule("fact: a stride below the block repeats tokens within an epoch")
def redundancy(where: Situation) -> Iterator[Finding]:
    """Blocks overlap, so one epoch visits each token several times."""
    data, recipe = where.prepared.facts.data, where.prepared.recipe
    if data.kind == "blocks" and data.redundancy > 1:
        by_epochs = recipe.max_steps is None and recipe.train_time_s is None
        yield told("redundancy.overlap", severity="moderate" if by_epochs and data.redundancy >= MANY_VISITS else "low",
                   visits=data.redundancy, block=data.block, stride=data.stride)


@rule("fact: passes times accumulation must give the batch that was asked for")
def batch(where: Situation) -> Iterator[Finding]:
    """A step divides into uneven passes, an epoch into uneven steps, or the run has very few steps."""
    prepared, data = where.prepared, where.prepared.facts.data
    size, steps = data.train_batch_size, prepared.total_steps
    workload = planner.workload_of(prepared.facts, prepared.plan)
    passes, left = workload.micro_batches, size % workload.micro_batch
    seen = (f"{size} examples per step in {passes} pass{'es' if passes > 1 else ''}, {digits(prepared.steps_per_epoch)} steps "
            "per epoch")
    if left and workload.packed_tokens is None:
        even = max(count for count in range(1, workload.micro_batch + 1) if size % count == 0)
        yield told("batch.uneven_pass", seen, train_batch_size=size, passes=passes, steps=steps, left=left, even=even,
                   micro_batch=workload.micro_batch)
    if (over := data.examples % size) and prepared.steps_per_epoch >= 1 and prepared.recipe.max_steps is None:
        yield told("batch.shared_step", seen, over=over)
    if steps < FEW_STEPS:
        yield told("batch.few_steps", seen, train_batch_size=size, passes=passes, steps=steps,
                   smaller=max(1, size * steps // FEW_STEPS))


@rule("formula: training/schedule.py; fact: too high a learning rate diverges")
def schedule(where: Situation) -> Iterator[Finding]:
    """The warm-up takes most of the run, or the learning rate is far above the method's usual one."""
    recipe, steps = where.prepared.recipe, where.prepared.total_steps
    asked = round(recipe.warmup_ratio * steps) if recipe.warmup_steps is None else recipe.warmup_steps
    if asked > LONG_WARMUP * steps:
        yield told("schedule.all_warm_up" if asked >= steps else "schedule.long_warm_up", warmup_steps=asked, steps=steps,
                   rate=recipe.learning_rate, last_rate=schedule_of(recipe, steps).at(steps - 1), share=asked / steps,
                   twentieth=steps // 20)
    usual = usual_rate(recipe)
    if recipe.learning_rate > HIGH_RATE * usual:
        yield told("schedule.high_rate", learning_rate=recipe.learning_rate, usual=usual, times=recipe.learning_rate / usual,
                   method=recipe.method)


@rule("fact: without a limit one large gradient can move all weights far")
def stability(where: Situation) -> Iterator[Finding]:
    """No limit bounds the gradients."""
    limit = where.prepared.recipe.max_grad_norm
    dtype = planner.workload_of(where.prepared.facts, where.prepared.plan).dtype
    if limit == 0:
        yield told("stability.not_clipped", severity="moderate" if dtype == "fp16" else "low", dtype=dtype)
    elif dtype == "fp16":
        yield told("stability.fp16", limit=limit)


@rule("technique: bf16")
def precision(where: Situation) -> Iterator[Finding]:
    """The dtype of the matrix products is not the fastest that this device computes."""
    hardware = where.prepared.facts.hardware
    dtype = planner.workload_of(where.prepared.facts, where.prepared.plan).dtype
    gain, pays, unit = gain_of(hardware, "bf16"), bf16_pays(hardware), unit_of(hardware, "bf16")
    known = "" if gain is None else f"; bf16 products are {gain:.2g} times as fast as fp32 products, {hardware.basis}"
    seen = f"products in {dtype} on {hardware.name}{known}"
    if dtype == "bf16" and not pays:
        yield told("precision.no_gain" if unit else "precision.emulated", seen, bf16_gain=gain,
                   expected=_times_as_fast(gain and 1 / gain, hardware.basis))
    elif dtype == "fp32" and pays:
        yield told("precision.fp32", seen, bf16_gain=gain, unit=unit, expected=_times_as_fast(gain, hardware.basis))
    else:
        yield told("precision.fp16" if dtype == "fp16" and pays else "precision.fastest", seen, bf16_gain=gain, dtype=dtype)


def _times_as_fast(gain: float | None, basis: str) -> Expected:
    if gain is None or gain <= 1:
        return Expected("not measured here", "none")
    return Expected(f"at most {gain:.2g} times as fast, if a step were products alone", f"formula: the {basis} GEMM peaks",
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
        yield told("quantisation.needless", needed_bytes=needed, room_bytes=room)


@rule("fact: the seconds of each evaluation and checkpoint, beside those of the run")
def intervals(where: Situation) -> Iterator[Finding]:
    """An interval in steps is longer than the run, or so short that it takes more than 2 % of the run."""
    recipe, steps = where.prepared.recipe, where.prepared.total_steps
    for key, verb in (("eval_steps", "evaluates"), ("save_steps", "saves"), ("logging_steps", "logs")):
        every = in_steps(getattr(recipe, key), where.prepared.steps_per_epoch)
        if every > steps and not where.prepared.resolved.origin(key).is_default:
            yield told("intervals.longer_than_the_run", key=key, verb=verb, every=every, steps=steps,
                       value=str(getattr(recipe, key)), half=max(1, steps // 2))
    if where.observed is None:
        return
    between = where.observed.between
    for cause in causes(where.observed):
        if cause.name in between and cause.share > AFFORDABLE:
            part = between[cause.name]
            yield told("intervals.costly", severity="critical" if cause.share > COSTLY_SHARE else "moderate", cure=cause.cure,
                       speed=(1.0, cause.bound), name=cause.name, share=cause.share, affordable=AFFORDABLE, key=part.key,
                       seconds=part.seconds, every=part.every, predicted=cause.predicted)


@rule("fact: the recipe's keys that nothing reads in this run")
def no_effect(where: Situation) -> Iterator[Finding]:
    """Keys of the recipe have no effect on this run."""
    for key, why in idle_keys(where.prepared):
        yield told("no_effect.idle", key=key, because=why, origin=where.prepared.resolved.origins.get(key) or "the recipe")


@rule("formula: steps times the plan's seconds a step")
def run_length(where: Situation) -> Iterator[Finding]:
    """The plan cannot predict how long the run takes, or a run of days saves no checkpoint."""
    estimate = where.prepared.plan.estimate
    if estimate is None:
        yield told("run_length.unknown")
        return
    low_s, high_s = (estimate.steps * step_s for step_s in estimate.step_s)
    unsaved = low_s > DAY_S and not where.prepared.recipe.save_steps
    fast, slow = map(seconds, estimate.step_s)
    seen = (f"{several(estimate.steps, 'step')}, each of which takes {fast} to {slow} by the plan's estimate from "
            f"{estimate.peak_basis} peaks")
    yield told("run_length.nothing_saved" if unsaved else "run_length.predicted", seen, low_s=low_s, high_s=high_s,
               low_days=low_s / DAY_S, high_days=high_s / DAY_S, hours=(low_s + high_s) / 7200,
               every=max(1, estimate.steps // 100))


@rule("technique: each one's own answer")
def pins(where: Situation) -> Iterator[Finding]:
    """The recipe pins a technique against the plan's own choice, or pins one that cannot run here."""
    prepared = where.prepared
    for error in where.refused_pins:
        yield told("pins.impossible", error.keys[0], name=error.technique, because=str(error))
    for step in prepared.plan.steps:
        if step.against is not None:
            name = step.technique.name
            yield told("pins.on", name=name, because=step.against.because, pin=prepared.recipe.techniques[name])
    for name, pin in prepared.recipe.techniques.items():
        if pin == "off" and isinstance(answer := planner.ask_anew(name, prepared.facts, prepared.recipe), Proposal):
            fast, slow = answer.claim.step_time
            # a step that takes 0.8 to 0.9 of the time is 1.1 to 1.25 times as fast
            yield told("pins.off", severity="moderate" if slow < 1 else "low", speed=(1 / slow, 1 / fast), name=name,
                       because=answer.because, low=1 / slow, high=1 / fast, claim_basis=answer.claim.basis)


@rule("fact: the installed software")
def software(where: Situation) -> Iterator[Finding]:
    """A technique is off because a part that it needs is not installed."""
    missing, published = where.prepared.facts.software.missing, where.prepared.facts.hardware.basis != "measured"
    for refusal in () if published else where.prepared.plan.refused:         # what is installed there is not known
        if refusal.why is Why.PART_MISSING:
            yield told("software.missing", name=refusal.technique, part=refusal.part, because=refusal.because,
                       found=missing.get(refusal.part, "missing"))


@rule("fact: the model's config.json")
def provider(where: Situation) -> Iterator[Finding]:
    """Another library computes the model, so most techniques cannot act on it."""
    prepared = where.prepared
    if prepared.facts.model.provider == "native":
        return
    idle = [refusal.technique for refusal in prepared.plan.refused if refusal.why is Why.OTHER_PROVIDER]
    native = prepared.material.providers.get("native", "")       # why the native decoder cannot compute it; None: it can
    yield told("provider.by_choice" if native is None else "provider.by_need",
               str(prepared.resolved.origin("model.provider")) if native is None else str(native),
               provider=prepared.facts.model.provider, idle=len(idle), techniques=", ".join(idle))


# ------------------------------------------------------------------------------------------------ keys without effect


def idle_keys(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """Yield (dotted key that the user set, why it has no effect)."""
    reasons = {key: why for keys, why in _idle(prepared) for key in keys}        # of two reasons, the later one
    for key, why in reasons.items():
        if prepared.resolved.origin(key).is_users:
            yield key, why
    yield from _of_techniques(prepared)


def _idle(prepared: Prepared) -> Iterator[tuple[Iterable[str], str]]:
    """Yield keys that have no effect on this run, whoever set them, and the reason."""
    recipe, method, held_out = prepared.recipe, prepared.recipe.method, len(prepared.material.held_out)
    if method == "scratch":
        yield _within("data", OF_EXAMPLES), "the key is for examples, and training from scratch reads text in blocks"
    else:
        yield _within("data", OF_TEXT), "the key is for text in blocks, and a pretrained model is trained on examples"
    if method not in ("lora", "qlora"):
        yield _within("lora", type(recipe.lora).model_fields), f"method={method} has no adapters"
    elif recipe.lora.kind != "lslora":
        yield _within("lora", OF_LSLORA), f"only lora.kind=lslora reads it, and lora.kind is {recipe.lora.kind}"
    if method != "qlora":
        yield (_within("quantisation", type(recipe.quantisation).model_fields),
               f"only method=qlora quantises, and the method is {method}")
    if recipe.lr_scheduler_type == "constant":
        yield ["min_lr_rate"], "a constant learning rate does not fall"
    if recipe.warmup_steps is not None:
        yield ["warmup_ratio"], f"warmup_steps={recipe.warmup_steps} overrides it"
    for key in ("max_steps", "train_time_s"):
        if getattr(recipe, key) is not None:
            yield ["num_train_epochs"], f"{key}={getattr(recipe, key):g} sets the length of the run"
    if not held_out:
        yield ["eval_steps", "max_eval_samples"], "no data is held out for evaluation"
    elif recipe.max_eval_samples is not None and recipe.max_eval_samples > held_out:
        yield ["max_eval_samples"], f"only {held_out:,} examples are held out"
    if not recipe.sample.tokens:
        yield OF_SAMPLES, "sample.tokens=0 writes no sample"


def _within(section: str, leaves: Iterable[str]) -> list[str]:
    return [f"{section}.{leaf}" for leaf in leaves]


def _of_techniques(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """Yield pins that repeat the plan's own choice, or that another technique of the plan makes idle."""
    facts, recipe, in_force = prepared.facts, prepared.recipe, prepared.plan.names
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
