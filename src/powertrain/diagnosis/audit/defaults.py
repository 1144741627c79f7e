"""What the frameworks do where a key is not set (transformers 5.23, TRL 1.16, torch 2.13)."""

from __future__ import annotations

from typing import Any

_TRANSFORMERS: dict[str, Any] = {
    "training.per_device_train_batch_size": 8, "training.gradient_accumulation_steps": 1, "training.num_train_epochs": 3.0,
    "training.max_steps": -1, "training.learning_rate": 5e-5, "training.warmup_steps": 0, "training.optim": "adamw_torch_fused",
    "training.weight_decay": 0.0, "training.max_grad_norm": 1.0, "training.bf16": False, "training.fp16": False,
    "training.activation_checkpointing": False, "training.torch_compile": False, "training.logging_strategy": "steps",
    "training.logging_steps": 500, "training.eval_strategy": "no", "training.save_strategy": "steps",
    "training.save_steps": 500, "training.dataloader_num_workers": 0, "training.dataloader_pin_memory": True,
    "training.train_sampling_strategy": "random", "training.remove_unused_columns": True, "training.report_to": "none",
    "lora.r": 8, "lora.lora_alpha": 8, "lora.lora_dropout": 0.0, "quantisation.bnb_4bit_compute_dtype": "float32",
    "quantisation.bnb_4bit_quant_type": "fp4", "quantisation.bnb_4bit_use_double_quant": False,
    "loader.num_workers": 0, "loader.pin_memory": False, "loader.prefetch_factor": None, "loader.shuffle": False,
}
_TRL: dict[str, Any] = _TRANSFORMERS | {
    "training.learning_rate": 2e-5, "training.logging_steps": 10, "training.activation_checkpointing": True,
    "training.bf16": True, "training.packing": False, "training.packing_strategy": "bfd", "training.padding_free": False,
    "training.max_length": 1024,
}
_TORCH = {key: value for key, value in _TRANSFORMERS.items() if key.startswith(("loader.", "lora.", "quantisation."))}


def default_of(framework: str, key: str) -> Any:
    """What the framework takes for `key` where nothing is set; None where it is not known."""
    table = {"trl": _TRL, "transformers": _TRANSFORMERS}.get(framework, _TORCH)
    return table.get(key)
