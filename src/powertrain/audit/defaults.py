"""What each framework does where a key is not set, with the line of its source that says so.

Transformers 5.23 (training_args.py), TRL 1.16 (trainer/base_config.py, trainer/sft_config.py), Accelerate 1.15 (accelerator.py)
and torch 2.13. A key that stands nowhere here has no default that is worth relying on, and asking for it gives None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Default:
    value: Any
    source: str                              # "transformers 5.23, training_args.py:812"


def _at(source: str, rows: Mapping[str, tuple[Any, int]]) -> dict[str, Default]:
    return {key: Default(value, f"{source}:{line}") for key, (value, line) in rows.items()}


_LIBRARIES = _at("peft 0.21, tuners/lora/config.py", {
    "lora.r": (8, 632), "lora.lora_alpha": (8, 652), "lora.lora_dropout": (0.0, 653), "lora.bias": ("none", 658),
    "lora.use_rslora": (False, 661), "lora.use_dora": (False, 832),
}) | _at("transformers 5.23, utils/quantization_config.py", {
    "quantisation.load_in_8bit": (False, 442), "quantisation.load_in_4bit": (False, 443),
    "quantisation.bnb_4bit_compute_dtype": ("float32", 469), "quantisation.bnb_4bit_quant_type": ("fp4", 449),
    "quantisation.bnb_4bit_use_double_quant": (False, 450),
}) | _at("torch 2.13, utils/data/dataloader.py", {
    "loader.batch_size": (1, 258), "loader.shuffle": (False, 259), "loader.num_workers": (0, 262),
    "loader.pin_memory": (False, 264), "loader.drop_last": (False, 265), "loader.persistent_workers": (False, 272),
}) | _at("torch 2.13, optim/adamw.py", {"optimizer.fused": (None, 34)})
# bf16, tf32 and eval_steps depend on other keys; that is said where the value here is None
_TRAINER = _LIBRARIES | _at("transformers 5.23, training_args.py", {
    "training.per_device_train_batch_size": (8, 777), "training.per_device_eval_batch_size": (8, 1128),
    "training.num_train_epochs": (3.0, 778), "training.max_steps": (-1, 779),
    "training.learning_rate": (5e-5, 787), "training.lr_scheduler_type": ("linear", 788), "training.warmup_steps": (0, 798),
    "training.optim": ("adamw_torch_fused", 812), "training.weight_decay": (0.0, 822), "training.adam_beta1": (0.9, 828),
    "training.adam_beta2": (0.999, 834), "training.adam_epsilon": (1e-8, 840),
    "training.gradient_accumulation_steps": (1, 849), "training.average_tokens_across_devices": (True, 858),
    "training.max_grad_norm": (1.0, 866), "training.label_smoothing_factor": (0.0, 869),
    "training.bf16": (False, 874), "training.fp16": (False, 880), "training.bf16_full_eval": (False, 886),
    "training.fp16_full_eval": (False, 892), "training.tf32": (None, 898),
    "training.activation_checkpointing": (False, 1545),
    "training.torch_compile": (False, 940), "training.torch_compile_mode": (None, 949),
    "training.use_liger_kernel": (False, 957), "training.use_cache": (False, 971),
    "training.neftune_noise_alpha": (None, 977), "training.torch_empty_cache_steps": (None, 983),
    "training.auto_find_batch_size": (False, 989),
    "training.logging_strategy": ("steps", 997), "training.logging_steps": (500, 1001), "training.report_to": ("none", 1059),
    "training.eval_strategy": ("no", 1106), "training.eval_steps": (None, 1110),
    "training.eval_accumulation_steps": (None, 1153),
    "training.prediction_loss_only": (False, 1131), "training.save_only_model": (False, 1171),
    "training.save_strategy": ("steps", 1177), "training.save_steps": (500, 1183), "training.save_total_limit": (None, 1201),
    "training.load_best_model_at_end": (False, 1254), "training.full_determinism": (False, 1284), "training.seed": (42, 1293),
    "training.dataloader_drop_last": (False, 1320), "training.dataloader_num_workers": (0, 1323),
    "training.dataloader_pin_memory": (True, 1332), "training.dataloader_persistent_workers": (False, 1335),
    "training.dataloader_prefetch_factor": (None, 1341), "training.remove_unused_columns": (True, 1373),
    "training.train_sampling_strategy": ("random", 1380), "training.ddp_find_unused_parameters": (None, 1395),
    "training.fsdp": (None, 1447), "training.deepspeed": (None, 1463),
})
_TRL = _TRAINER | _at("TRL 1.16, trainer/base_config.py", {
    "training.logging_steps": (10, 55), "training.activation_checkpointing": (True, 62), "training.bf16": (True, 108),
}) | _at("TRL 1.16, trainer/sft_config.py", {
    "training.learning_rate": (2e-5, 140), "training.max_length": (1024, 202), "training.packing": (False, 222),
    "training.packing_strategy": ("bfd", 229), "training.padding_free": (False, 238), "training.eval_packing": (None, 255),
    "training.completion_only_loss": (None, 261), "training.assistant_only_loss": (False, 273),
    "training.activation_offloading": (False, 291), "training.dataset_text_field": ("text", 180),
    "training.shuffle_dataset": (False, 218), "training.dataset_num_proc": (None, 192),
})
_ACCELERATE = _LIBRARIES | _at("Accelerate 1.15, accelerator.py", {
    "training.gradient_accumulation_steps": (1, 285), "accelerate.mixed_precision": (None, 284),
    "accelerate.step_scheduler_with_optimizer": (True, 297),
}) | _at("Accelerate 1.15, utils/dataclasses.py", {"accelerate.split_batches": (False, 859)})

DEFAULTS: Mapping[str, Mapping[str, Default]] = {
    "transformers": _TRAINER, "trl": _TRL, "accelerate": _ACCELERATE,
}


def default(framework: str, key: str) -> Default | None:
    """The libraries' own defaults hold for every framework; a trainer's only for its own arguments."""
    return DEFAULTS.get(framework, _LIBRARIES).get(key)


def default_of(framework: str, key: str) -> Any:
    """What is in force where `key` is not set; None where nothing is, or it is not known."""
    found = default(framework, key)
    return None if found is None else found.value
