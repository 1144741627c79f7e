"""Recipe keys that have no effect on a run, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from powertrain import planner
from powertrain.records import Refusal
from powertrain.run.prepare import Prepared

OF_TEXT = ("block", "stride", "max_chars", "vocabulary", "validation_split")
OF_EXAMPLES = ("weights", "format", "columns", "split", "max_examples", "max_length", "long_examples", "train_on",
               "chat_template", "end_token", "validation_source")
OF_LSLORA = ("sigma", "regularisation")


def idle_keys(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """Yield (dotted key that the user set, why it has no effect)."""
    origins = prepared.resolved.origins
    for key, why in {**_of_method(prepared), **_of_schedule(prepared), **_of_pauses(prepared)}.items():
        if is_set(key, origins):
            yield key, why
    yield from _of_techniques(prepared)


def is_set(key: str, origins: Mapping[str, str]) -> bool:
    """Return whether the user set the key: not a default, not derived, not from the embedded recipe."""
    origin = origins.get(key, "default")
    return not origin.startswith(("default", "planner: ")) and origin != "recipe default"


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
