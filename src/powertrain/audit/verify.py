"""A subject whose data and model lie on this machine: the facts of both, and its recipe measured beside the original.

Nothing is fetched and nothing of the subject is run. It is read as the recipe that it is equivalent to. `verify` measures that
recipe with its plan beside a plain arm that computes its steps as the original does: same model, data, batch and seed. Whether
both arms learn the same is looked at before how fast they are.

The plain arm is made of pins of techniques (`render`). Passes, precision, checkpointing, optimizer step and kernels are those
of the file, or the defaults of its trainer. What has no technique here, or does not work on this machine, is named instead.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain import planner
from powertrain.audit.conversion import Conversion, recipe_yaml
from powertrain.audit.convert import convert
from powertrain.audit.subject import Subject
from powertrain.evidence.clock import Arena
from powertrain.evidence.notebook import Notebook, key_of
from powertrain.facts.software import read_software
from powertrain.recipe import Recipe, resolve
from powertrain.recipe.conversions import optimizer_word
from powertrain.recipe.vocabulary import values
from powertrain.records import Facts, Hardware, Plan, RunFailed, UserError, WrongUse
from powertrain.records.evidence import Comparison, Parity
from powertrain.records.phases import in_words
from powertrain.run.prepare import material_of, prepare

Pin = Any                                    # "on", "off", or settings
# kernels of attention that lie behind Hugging Face's names; eager is what runs without the technique
ATTENTION = {"sdpa": "sdpa", "flash_attention_2": "varlen", "flash_attention_3": "varlen", "flex_attention": "sdpa",
             "xformers": "sdpa", "eager": None}
ORIGINAL, OURS = "as the file has it", "the recipe with its plan"


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
    on_gpu, checkpointing = facts.hardware.device == "cuda", subject.in_force("training.activation_checkpointing")
    kernel = ATTENTION.get(str(subject.value("model.attn_implementation")), "sdpa")
    workers = subject.in_force("training.dataloader_num_workers") or subject.value("loader.num_workers")
    pins: dict[str, Pin] = {**_precision(subject, facts), **_optimizer(subject), **_passes(subject, facts)}
    if checkpointing is True or checkpointing in ("unsloth", "offload", "offload_disk"):
        # Hugging Face's computes everything of a block again, attention too
        pins["activation_checkpointing"] = {"every": 1, "keep_attention": False}
    if kernel is not None:
        pins["attention_kernel"] = {"kernel": "sdpa" if kernel == "varlen" and not on_gpu else kernel}
    if subject.in_force("training.use_liger_kernel") is True:
        pins["chunked_cross_entropy"] = "on"
    if subject.in_force("training.torch_compile") is True:
        pins["torch_compile"] = "on"
    if isinstance(workers, int) and workers >= 1:
        pins["loader"] = {"workers": workers, "pinned": on_gpu}
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
    if bf16 is True or (bf16 == "auto" and facts.hardware.device == "cuda"):     # Axolotl: where the hardware has it
        return {"bf16": "on"}
    if bf16 == "auto":
        return {}
    return {"tf32": "on"} if subject.in_force("training.tf32") is True else {}


def _optimizer(subject: Subject) -> dict[str, Pin]:
    name = optimizer_word(subject.value("optimizer.name") or subject.in_force("training.optim") or "")
    found = values()["optimizer"].get(name)
    ours = found.ours or {} if found else {}
    pins = {key.removeprefix("techniques."): "on" for key, value in ours.items() if value == "on"}
    return pins or ({"fused_adamw": "on"} if subject.value("optimizer.fused") is True else {})


def _passes(subject: Subject, facts: Facts) -> dict[str, Pin]:
    """Return pins for the file's own passes: its micro-batch, padded to the longest example, or its packed rows."""
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


def facts_beside(subject: Subject, cache: Path, say: Callable[[str], None], other: Hardware | None = None) -> Facts | str:
    """Return the subject's facts on this machine, or one sentence that tells why there are none.

    With the hardware of another machine, this machine is not measured, and nothing is planned for it.
    """
    try:
        conversion = convert(subject)
        if conversion.missing:
            return conversion.missing[0]
        sources = conversion.values.get("data.source")
        for name in (*(sources if isinstance(sources, list) else [sources]), conversion.values.get("model.path")):
            if name is not None and not Path(str(name)).expanduser().exists():
                return f"{name} is not on this machine"
        with tempfile.TemporaryDirectory(prefix="powertrain-") as folder:
            recipe = Path(folder) / f"{subject.path.stem}.yaml"
            recipe.write_text(recipe_yaml(conversion), encoding="utf-8")
            resolved = resolve(str(recipe))
            if other is None:
                return prepare(resolved, cache, in_words(say), warn=say).facts
            material = material_of(resolved, software := read_software(), cache, in_words(say))
            return Facts(other, software, material.model, material.data)
    except UserError as error:
        return str(error)


@dataclass(frozen=True)
class Verified:
    """What was measured. `comparison` compares the recipe with its plan against the original's settings."""

    rendering: Rendering
    plan: Plan
    apart: tuple[str, ...]                   # how the plain arm differs from the original
    comparison: Comparison | None            # None: both do the same, and there is nothing to compare
    parity: Parity | None
    why_no_parity: str = ""

    def sentence(self) -> str:
        if self.comparison is None:
            return "the plan does what the original does: there is no difference to measure"
        if self.comparison.speed is None:
            return f"no speed: {self.comparison.because}"
        speed = self.comparison.speed
        return f"{speed.median:.2f} times as fast as the original's way ({speed.low:.2f} to {speed.high:.2f})"


def verify(conversion: Conversion, folder: Path, cache: Path, budget_s: float, say: Callable[[str], None]) -> Verified:
    """Measure both arms for about `budget_s` and return the result; the recipe is written to `folder`.

    Raises WrongUse if the model or the data are not on this machine.
    """
    began = time.monotonic()
    refuse_what_is_missing(conversion)
    file = folder / f"{conversion.subject.path.stem}.powertrain.yaml"
    file.write_text(recipe_yaml(conversion), encoding="utf-8")
    prepared = prepare(resolve(str(file)), cache, in_words(say), warn=say)
    rendering = render(conversion.subject, prepared.facts, prepared.recipe, prepared.total_steps)
    apart = (*differences(conversion.subject), *(f"{one}; the arm goes without" for one in rendering.left_out))
    if key_of(rendering.plan) == key_of(prepared.plan):
        return Verified(rendering, prepared.plan, apart, None, None)
    with Arena(cache) as arena:
        notebook = Notebook(arena, (str(file),), say, began + budget_s)
        original, ours = notebook.arm(rendering.plan, ORIGINAL), notebook.arm(prepared.plan, OURS)
        say("whether both learn the same")
        parity, why = notebook.parity("ROUNDING", [(rendering.plan, prepared.plan)], prepared.facts, prepared.recipe.seed)
        say("both side by side, in turns")
        index, says = notebook.attempt("both side by side", original, ours, max(1.0, notebook.left_s()))
        if index is None:
            raise RunFailed(f"the two arms could not be measured: {says}")
        return Verified(rendering, prepared.plan, apart, notebook.comparisons[index], parity, why)


def refuse_what_is_missing(conversion: Conversion) -> None:
    """Raise WrongUse with the first thing that the file does not say, or that is not on this machine."""
    subject = conversion.subject
    if conversion.missing:
        raise WrongUse(f"{subject.path} cannot be verified: {conversion.missing[0]}")
    sources, model = conversion.values.get("data.source"), conversion.values.get("model.path")
    data = sources if isinstance(sources, list) else [sources]
    for name, lacks, it in [*((name, f"data {name} are", "them") for name in data), (model, f"model {model} is", "it")]:
        if _is_a_path(name) and not Path(str(name)).expanduser().exists():
            raise WrongUse(f"{subject.path} cannot be verified: its {lacks} not here; run it beside {it}, or put {it} there")


def _is_a_path(name: Any) -> bool:
    """Return whether a name is surely that of a file: a hub id has one slash and no such beginning."""
    text = str(name or "")
    if any(sign in text for sign in "*?["):
        return False
    known = text.endswith((".jsonl", ".json", ".csv", ".parquet", ".txt", ".arrow"))
    return known or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1
