"""What each trainer does of its own where its config does not say, as far as it decides what is trained.

A recipe's defaults are others (TRL's and PEFT's recommendations), so an equivalent recipe has to write these out. Those of
transformers, TRL and torch are in defaults.py; here are those of the config formats, from their schemas: Axolotl's
src/axolotl/utils/schemas and core/builders/base.py (2026-07), LLaMA-Factory's src/llamafactory/hparams (2026-08), PEFT 0.21's
LoraConfig, and of the five systems what features.md found in their code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powertrain.audit.defaults import default
from powertrain.audit.subject import Subject

# deciding what is trained, in the order in which a recipe lists them
SEMANTIC = ("training.per_device_train_batch_size", "training.num_train_epochs", "training.learning_rate",
            "training.lr_scheduler_type", "training.warmup_steps", "training.weight_decay", "training.adam_beta1",
            "training.adam_beta2", "training.adam_epsilon", "training.max_grad_norm", "training.seed", "training.max_length",
            "data.validation_share", "data.validation_split", "training.assistant_only_loss", "training.eval_strategy",
            "tokenizer.path", "model.family")
OF_LORA = ("lora.r", "lora.lora_alpha", "lora.lora_dropout", "lora.target_modules")
OF_FOUR_BITS = ("quantisation.bnb_4bit_quant_type", "quantisation.bnb_4bit_use_double_quant")

_PEFT = {"lora.r": 8, "lora.lora_alpha": 8, "lora.lora_dropout": 0.0}
_TRL_COMMAND = {"lora.r": 16, "lora.lora_alpha": 32, "lora.lora_dropout": 0.05}      # ModelConfig of its command line
_BITS = {"quantisation.bnb_4bit_quant_type": "fp4", "quantisation.bnb_4bit_use_double_quant": False}      # BitsAndBytesConfig
_WHOLE = {"data.validation_share": 0.0}      # nothing is held out unless it is asked for
_TRAINER = {"base": "transformers"}
_TRAINERS: Mapping[str, Mapping[str, Any]] = {
    "transformers": {**_PEFT, **_BITS, **_WHOLE, "training.assistant_only_loss": False},
    "trl": {**_PEFT, **_BITS, **_WHOLE},
    "axolotl": {
        **_TRAINER, **_WHOLE, "training.per_device_train_batch_size": 1, "training.num_train_epochs": 1.0,
        "training.lr_scheduler_type": "cosine", "training.warmup_steps": 0.03, "training.max_length": 512,
        "training.eval_strategy": "epoch",
        "training.assistant_only_loss": True, "lora.lora_dropout": 0.0, "training.optim": "adamw_torch_fused",
        "quantisation.bnb_4bit_quant_type": "nf4", "quantisation.bnb_4bit_use_double_quant": True},
    "llama-factory": {
        **_TRAINER, **_WHOLE, "training.max_length": 2048, "lora.r": 8, "lora.lora_dropout": 0.0,
        "lora.target_modules": "all-linear", "training.assistant_only_loss": True,
        "training.activation_checkpointing": True, "quantisation.bnb_4bit_quant_type": "nf4",
        "quantisation.bnb_4bit_use_double_quant": True},
    "modelforge": {
        **_TRAINER, "lora.r": 16, "lora.lora_alpha": 32, "lora.lora_dropout": 0.1, "quantisation.load_in_4bit": True,
        "quantisation.bnb_4bit_quant_type": "nf4", "quantisation.bnb_4bit_use_double_quant": False,
        "training.num_train_epochs": 1, "training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": 4,
        "training.activation_checkpointing": True, "training.max_grad_norm": 0.3, "training.learning_rate": 2e-4,
        "training.weight_decay": 0.001, "training.optim": "paged_adamw_32bit", "training.lr_scheduler_type": "cosine",
        "training.warmup_steps": 0.03, "training.train_sampling_strategy": "group_by_length", "training.packing": False,
        "training.eval_strategy": None, "data.validation_share": 0.2, "training.assistant_only_loss": False},
    "lora-trainer": {
        **_TRAINER, "model.path": "google/gemma-2-2b-it", "lora.r": 16, "lora.lora_alpha": 32, "lora.lora_dropout": 0.05,
        "quantisation.load_in_4bit": True, "quantisation.bnb_4bit_quant_type": "nf4",
        "quantisation.bnb_4bit_use_double_quant": True, "training.num_train_epochs": 2,
        "training.per_device_train_batch_size": 2, "training.gradient_accumulation_steps": 8, "training.learning_rate": 2e-4,
        "training.max_length": 2048, "training.lr_scheduler_type": "cosine", "training.warmup_steps": 0.03,
        "training.bf16": True, "training.activation_checkpointing": True, "training.optim": "adamw_torch_fused",
        "training.eval_strategy": None, "data.validation_share": 0.05, "training.assistant_only_loss": False},
    "character-transformer": {
        "training.per_device_train_batch_size": 128, "training.num_train_epochs": 25, "training.learning_rate": 1e-4,
        "training.lr_scheduler_type": "constant", "training.weight_decay": 0.01, "training.adam_beta1": 0.9,
        "training.adam_beta2": 0.999, "training.max_grad_norm": 1.0, "training.seed": 42, "data.validation_share": 0.1,
        "tokenizer.path": "char", "model.family": "gpt2", "data.validation_split": "tail"},
}
# trainers of pretrained models, and how they train them where the config does not say
METHODS: Mapping[str, str] = {"transformers": "full", "trl": "full", "axolotl": "full", "llama-factory": "lora",
                              "modelforge": "lora", "lora-trainer": "lora"}


def trainer_default(subject: Subject, key: str) -> Any:
    """What is in force where the subject does not set `key`; None where nothing is, or it is not known."""
    framework = subject.framework
    own = _TRAINERS.get(framework, {})
    if framework == "trl" and subject.script is None and key in _TRL_COMMAND:
        return _TRL_COMMAND[key]
    if key in own:
        return own[key]
    if framework == "character-transformer" and key == "training.max_length":
        return subject.value("model.max_position_embeddings") or 256
    if framework == "llama-factory" and key == "lora.lora_alpha":
        return 2 * (subject.value("lora.r") or 8)
    found = default(str(own.get("base", framework)), key)
    return None if found is None else found.value


def in_force(subject: Subject, key: str) -> Any:
    """What the subject sets, or else its trainer's default."""
    found = subject.value(key)
    return trainer_default(subject, key) if found is None else found
