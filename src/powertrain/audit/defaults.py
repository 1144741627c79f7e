"""What each trainer does where a key is not set (defaults.yaml), and what is in force for a subject.

A recipe's defaults are others (TRL's and PEFT's recommendations), so a converted recipe writes its trainer's out. Sources: the
installed libraries, with the line; Axolotl's src/axolotl/utils/schemas and core/builders/base.py (2026-07); LLaMA-Factory's
src/llamafactory/hparams (2026-08); torchtune's recipes (2026-04) and nanoGPT's train.py; of the five systems, features.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from powertrain.audit.subject import Subject

# the keys that decide what is trained, in the order in which a recipe lists them
SEMANTIC = ("training.per_device_train_batch_size", "training.num_train_epochs", "training.max_steps", "training.learning_rate",
            "training.lr_scheduler_type", "training.min_lr", "training.warmup_steps", "training.weight_decay",
            "training.adam_beta1", "training.adam_beta2", "training.adam_epsilon", "training.max_grad_norm", "training.seed",
            "training.max_length", "training.excess_length_strategy", "data.validation_share", "data.validation_split",
            "training.assistant_only_loss", "training.eval_strategy", "tokenizer.path", "model.family",
            "model.num_hidden_layers", "model.num_attention_heads", "model.hidden_size", "model.dropout", "model.bias")
OF_LORA = ("lora.r", "lora.lora_alpha", "lora.lora_dropout", "lora.target_modules")
OF_FOUR_BITS = ("quantisation.bnb_4bit_quant_type", "quantisation.bnb_4bit_use_double_quant")
# trainers of pretrained models, and how they train them where the config does not say
METHODS: Mapping[str, str] = {"transformers": "full", "trl": "full", "axolotl": "full", "llama-factory": "lora",
                              "modelforge": "lora", "lora-trainer": "lora", "torchtune": "full"}


@dataclass(frozen=True)
class Default:
    value: Any
    source: str                              # "transformers 5.23, training_args.py:812"


_FILE: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (resources.files("powertrain") / "audit" / "defaults.yaml").read_text(encoding="utf-8"))


def _libraries(*beginnings: str) -> dict[str, Default]:
    """Return the defaults of the libraries whose source begins so; of two, the later one's."""
    return {key: Default(value, f"{source}:{line}") for begins in beginnings for source, rows in _FILE["libraries"].items()
            if source.startswith(begins) for key, (value, line) in rows.items()}


_ALWAYS = ("peft", "transformers 5.23, utils/quantization", "torch")
_LIBRARIES = _libraries(*_ALWAYS)
DEFAULTS: Mapping[str, Mapping[str, Default]] = {
    "transformers": _libraries(*_ALWAYS, "transformers 5.23, training_args"),
    "trl": _libraries(*_ALWAYS, "transformers 5.23, training_args", "TRL"), "accelerate": _libraries(*_ALWAYS, "Accelerate")}


def default_of(framework: str, key: str) -> Any:
    """Return the library's value for a key that is not set; None if it has none, or none is known.

    The libraries' own defaults hold for every framework, a trainer's only for its own arguments.
    """
    found = DEFAULTS.get(framework, _LIBRARIES).get(key)
    return None if found is None else found.value


def trainer_default(subject: Subject, key: str) -> Any:
    """Return what the subject's trainer does if `key` is not set; None if it does nothing, or it is not known."""
    framework = "trl-command" if subject.framework == "trl" and subject.script is None else subject.framework
    own = _FILE["trainers"].get(framework, {})
    if key in own:
        return own[key]
    if framework == "character-transformer" and key == "training.max_length":
        return subject.value("model.max_position_embeddings") or 256
    if framework == "llama-factory" and key == "lora.lora_alpha":
        rank = subject.value("lora.r") or 8
        return 2 * rank if isinstance(rank, int) else None
    return default_of(str(own.get("base", framework)), key)


def in_force(subject: Subject, key: str) -> Any:
    """Return what the subject sets, or else its trainer's default."""
    found = subject.value(key)
    return trainer_default(subject, key) if found is None else found


def has_adapters(subject: Subject) -> bool:
    """Return whether adapters are trained. An `lora_r:` without a value, or beside `use_peft: false`, trains none."""
    said = subject.value("training.use_peft")
    if said is not None:
        return bool(said)
    if subject.script is None and subject.framework in METHODS:
        return METHODS[subject.framework] == "lora"
    set_up = (key for key, setting in subject.settings.items() if setting.value is not None)
    return any(key.startswith("lora.") for key in (*set_up, *subject.unread))
