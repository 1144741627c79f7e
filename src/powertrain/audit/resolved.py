"""What a subject's settings come to together: with the framework's defaults, as batches, steps, methods and types.

None wherever it cannot be told without running the file: a rule that meets None says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from powertrain.audit.defaults import METHODS, default_of, has_adapters
from powertrain.audit.subject import Circumstances, Setting, Subject
from powertrain.records.findings import Evidence, Place

TRAINERS = ("trl", "transformers")           # frameworks whose arguments are those of transformers' Trainer
PLAIN_LOOPS = ("pytorch", "character-transformer")           # frameworks that accumulate only where a file says so
OF_LIBRARIES = ("lora.", "quantisation.", "loader.")         # a trainer with configs has its own defaults for these
DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
          "fp32": "fp32", "float32": "fp32", "float": "fp32", "no": "fp32"}


def value(subject: Subject, key: str) -> Any:
    """What is in force for `key`: what is set, else the framework's default, else None."""
    if key in subject.settings:
        return subject.settings[key].value
    if subject.script is None and key.startswith(OF_LIBRARIES):
        return None
    return None if is_unread(subject, key) else default_of(subject.framework, key)


def is_unread(subject: Subject, key: str) -> bool:
    """Whether it may be set to something that only running the file would tell, itself or in a `**kwargs` of its section."""
    return key in subject.unread or f"{key.partition('.')[0]}.*" in subject.unread


def is_on(subject: Subject, key: str) -> bool:
    found = value(subject, key)
    return found not in (None, False, 0, "", "no", "none", "off", "false", "False", "auto")


def number(subject: Subject, key: str) -> float | None:
    """Return the number in force for `key`; None where it is none, or too large for anything."""
    found = value(subject, key)
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) < 1e18
    return float(found) if is_number else None


def seen(subject: Subject, key: str) -> Evidence:
    """The setting as evidence, or that it is left to the framework's default."""
    setting = subject.settings.get(key)
    name = key.partition(".")[2]
    standing = value(subject, key)
    rest = "" if standing is None else f"; the default is {standing!r}"
    default = Evidence(f"{name} is not set{rest}", Place(str(subject.path)))
    return setting.evidence if setting is not None else default


def first_set(subject: Subject, keys: Iterable[str]) -> Setting | None:
    return next((subject.settings[key] for key in keys if key in subject.settings), None)


def dtype_named(found: Any) -> str | None:
    """"bf16", "fp16" or "fp32" of a type as files write it: torch.bfloat16, "float16", "fp16"."""
    return DTYPES.get(str(found).rpartition(".")[2]) if found is not None else None


def products_dtype(subject: Subject) -> str | None:
    """The type that matrix products are computed in by autocast; None where it cannot be told."""
    for key, name in (("training.fp16", "fp16"), ("training.bf16", "bf16")):
        if (key not in subject.settings and is_unread(subject, key)) or value(subject, key) == "auto":
            return None
        if is_on(subject, key):
            return name
    mixed = dtype_named(value(subject, "accelerate.mixed_precision"))
    if mixed is not None:
        return mixed
    return "fp32" if subject.framework == "transformers" else None


def is_four_bit(subject: Subject) -> bool:
    return is_on(subject, "quantisation.load_in_4bit")


def method(subject: Subject) -> str | None:
    """Return "qlora", "lora" or "full"; None where nothing says that a trained model is tuned."""
    if has_adapters(subject):
        return "qlora" if is_four_bit(subject) else "lora"
    configured = subject.framework in METHODS and subject.script is None
    if (subject.framework in TRAINERS or configured) and subject.value("model.path") is not None and not is_four_bit(subject):
        return "full"
    return None


def processes(subject: Subject) -> int:
    """Data-parallel processes that the file itself asks for; 1 where it does not say."""
    found = number(subject, "accelerate.num_processes")
    return int(found) if found else 1


def examples_per_pass(subject: Subject) -> int | None:
    found = number(subject, "training.per_device_train_batch_size")
    return int(found) if found and found >= 1 else None


def accumulation(subject: Subject) -> int | None:
    key = "training.gradient_accumulation_steps"
    found = number(subject, key)
    if found is None and subject.framework in PLAIN_LOOPS and key not in subject.settings and not is_unread(subject, key):
        return 1
    return int(found) if found and found >= 1 else None


def examples_per_step(subject: Subject) -> int | None:
    each, times = examples_per_pass(subject), accumulation(subject)
    return each * times * processes(subject) if each and times else None


def run_steps(subject: Subject, where: Circumstances) -> int | None:
    """Optimizer steps of the whole run; from epochs only where the data is known."""
    asked = number(subject, "training.max_steps")
    if asked and asked > 0:
        return int(asked)
    if is_unread(subject, "training.max_steps"):
        return None
    epochs, batch, data = number(subject, "training.num_train_epochs"), examples_per_step(subject), where.data
    if not epochs or not batch or data is None or not data.examples or is_on(subject, "training.packing"):
        return None                          # packing makes fewer examples of them: how many is not known here
    return max(1, round(epochs * -(-data.examples // batch)))


def warmup_steps(subject: Subject, steps: int | None) -> float | None:
    """Steps of warm-up: a number below 1 is a share of the run, as transformers 5 reads it."""
    found = number(subject, "training.warmup_ratio") or number(subject, "training.warmup_steps")
    if found is None or found >= 1:
        return found
    return found * steps if steps is not None else None


def interval_steps(subject: Subject, what: str, steps: int | None) -> float | None:
    """Steps between two evaluations, checkpoints or log lines (`what`: "eval", "save", "logging"); None: not by steps."""
    strategy = value(subject, f"training.{what}_strategy")
    if strategy != "steps" and not (strategy is None and f"training.{what}_steps" in subject.settings):
        return None                          # a trainer that knows no strategies goes by steps
    found = number(subject, f"training.{what}_steps")
    if what == "eval" and not found:
        found = number(subject, "training.logging_steps")
    if found is None or found <= 0:
        return None
    if found >= 1:
        return found
    return None if steps is None else max(1.0, found * steps)


def changes_lengths(subject: Subject, where: Circumstances) -> bool | None:
    """Whether batches come in different shapes: padded to their longest example. None where it cannot be told."""
    if value(subject, "data.padding") == "max_length":
        return False
    if subject.framework == "trl":
        return value(subject, "training.packing_strategy") != "wrapped" or not is_on(subject, "training.packing")
    if value(subject, "data.padding") in ("longest", True):
        return True
    return None if where.data is None else where.data.kind != "blocks"


def compile_seen(subject: Subject) -> Evidence | None:
    """The setting or call by which the model is compiled, if any."""
    for key in ("training.torch_compile", "training.torch_compile_mode", "training.torch_compile_backend"):
        if subject.on(key):
            return subject.settings[key].evidence
    return None


def compile_mode(subject: Subject) -> Setting | None:
    return subject.settings.get("training.torch_compile_mode")
