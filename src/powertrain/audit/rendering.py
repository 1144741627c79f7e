"""A subject's own way of computing a step, as pins of techniques: the plain arm that a converted recipe is compared with.

Model, data and batch are the same. Passes, precision, checkpointing, optimizer step and kernels are those of the file, or the
defaults of its trainer. What has no technique here, or does not work on this machine, is left out and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from powertrain import planner
from powertrain.audit.subject import Subject
from powertrain.recipe import Recipe
from powertrain.recipe.conversions import optimizer_word
from powertrain.recipe.vocabulary import values
from powertrain.records import Facts, Plan, WrongUse

Pin = Any                                    # "on", "off", or settings
# kernels of attention that lie behind Hugging Face's names; eager is what runs without the technique
ATTENTION = {"sdpa": "sdpa", "flash_attention_2": "varlen", "flash_attention_3": "varlen", "flex_attention": "sdpa",
             "xformers": "sdpa", "eager": None, None: "sdpa"}


@dataclass(frozen=True)
class Rendering:
    """The original's settings as a plan."""

    plan: Plan
    pins: Mapping[str, Pin]                  # that are in force
    left_out: tuple[str, ...]                # what of the original could not be rendered, and why


def render(subject: Subject, facts: Facts, recipe: Recipe, total_steps: int) -> Rendering:
    """Return the plan that does what the subject does. Raises WrongUse if not even the plan without any pin works."""
    # nothing that only makes it faster; 4-bit weights, and moments of 8 bits, are what is trained and stay
    off = {name: "off" for name, technique in planner.BY_NAME.items() if technique.exactness.name != "LOSSY"}

    def planned(pins: Mapping[str, Pin]) -> Plan:
        return planner.make_plan(facts, recipe.model_copy(update={"techniques": {**off, **pins}}), total_steps)

    pins: dict[str, Pin] = {}
    left_out: list[str] = []
    for name, pin in original_pins(subject, facts).items():
        try:
            planned({**pins, name: pin})
            pins[name] = pin
        except WrongUse as error:
            left_out.append(f"{name}: {error}")
    return Rendering(planned(pins), pins, tuple(left_out))


def original_pins(subject: Subject, facts: Facts) -> dict[str, Pin]:
    """Return technique -> its pin, for everything that the subject or its trainer switches on."""
    pins: dict[str, Pin] = {}
    for of_technique in (_precision, _optimizer, _passes, _checkpointing, _kernels, _loader):
        pins |= of_technique(subject, facts)
    return pins


def differences(subject: Subject) -> list[str]:
    """Return in what the original's arm differs from the original, because no technique does the same."""
    spread = any(key.startswith(("deepspeed.", "fsdp.")) or key in ("training.fsdp", "training.deepspeed")
                 for key, setting in subject.settings.items() if setting.value)
    found = {
        "padding to max_length: the arm pads to a pass's longest example": subject.value("data.padding") == "max_length",
        "emptying the allocator's cache: the arm does not": subject.on("training.torch_empty_cache_steps"),
        "spreading over devices: the arm is one process": spread,
        "a base of 8 bits: the arm has the base as its files do": subject.value("quantisation.load_in_8bit") is True,
        "offloading activations: the arm keeps them on the device": subject.on("training.activation_offloading"),
    }
    return [text for text, holds in found.items() if holds]


def _precision(subject: Subject, facts: Facts) -> dict[str, Pin]:
    mixed = subject.value("accelerate.mixed_precision")
    bf16, fp16 = subject.in_force("training.bf16"), subject.in_force("training.fp16")
    if mixed in ("bf16", "fp16"):
        return {mixed: "on"}
    if fp16 is True and not subject.on("training.bf16"):     # TRL's bf16 is on unless fp16 is asked for
        return {"fp16": "on"}
    if bf16 == "auto":                       # Axolotl: where the hardware has it
        return {"bf16": "on"} if facts.hardware.device == "cuda" else {}
    if bf16 is True:
        return {"bf16": "on"}
    return {"tf32": "on"} if subject.in_force("training.tf32") is True else {}


def _optimizer(subject: Subject, facts: Facts) -> dict[str, Pin]:
    name = optimizer_word(subject.value("optimizer.name") or subject.in_force("training.optim") or "")
    found = values()["optimizer"].get(name)
    ours = found.ours or {} if found else {}
    pins = {key.removeprefix("techniques."): "on" for key, value in ours.items() if value == "on"}
    return pins or ({"fused_adamw": "on"} if subject.value("optimizer.fused") is True else {})


def _passes(subject: Subject, facts: Facts) -> dict[str, Pin]:
    """Its micro-batch, padded to its longest example; or its packed rows."""
    micro = subject.in_force("training.per_device_train_batch_size") or subject.value("loader.batch_size")
    batch = facts.data.train_batch_size
    if not isinstance(micro, int):
        return {}
    if any(subject.in_force(key) is True for key in ("training.packing", "training.padding_free")):
        row = subject.in_force("training.max_length") or facts.data.max_length or facts.data.block
        return {"packing": {"tokens": micro * int(row), "multiple": 1}}
    pins: dict[str, Pin] = {"micro_batch": {"examples": micro}} if micro < batch else {}
    grouped = subject.in_force("training.train_sampling_strategy") == "group_by_length"
    return pins | ({"length_grouping": "on"} if grouped else {})


def _checkpointing(subject: Subject, facts: Facts) -> dict[str, Pin]:
    """Hugging Face's computes everything of a block again, attention too."""
    on = subject.in_force("training.activation_checkpointing")
    again = on is True or on in ("unsloth", "offload", "offload_disk")
    return {"activation_checkpointing": {"every": 1, "keep_attention": False}} if again else {}


def _kernels(subject: Subject, facts: Facts) -> dict[str, Pin]:
    pins: dict[str, Pin] = {}
    kernel = ATTENTION.get(subject.value("model.attn_implementation"), "sdpa")
    if kernel == "varlen" and facts.hardware.device != "cuda":
        kernel = "sdpa"
    if kernel is not None:
        pins["attention_kernel"] = {"kernel": kernel}
    if subject.in_force("training.use_liger_kernel") is True:
        pins["chunked_cross_entropy"] = "on"
    if subject.in_force("training.torch_compile") is True:
        pins["torch_compile"] = "on"
    return pins


def _loader(subject: Subject, facts: Facts) -> dict[str, Pin]:
    workers = subject.in_force("training.dataloader_num_workers") or subject.value("loader.num_workers")
    if not isinstance(workers, int) or workers < 1:
        return {}
    return {"loader": {"workers": workers, "pinned": facts.hardware.device == "cuda"}}
