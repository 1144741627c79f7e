"""From the flat keys of Hugging Face's trainers to the sections of the shared vocabulary (subject.py).

TrainingArguments, SFTConfig and ModelConfig are one flat list of keys on a command line or in JSON; LLaMA-Factory, Axolotl
and the five documents use most of them too. What a key is about decides its section; where it has two names, the one that
transformers 5 uses is the vocabulary's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# transformers 4 and older TRL -> transformers 5 and TRL 1
NEWER: Mapping[str, str] = {
    "gradient_checkpointing": "activation_checkpointing", "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "evaluation_strategy": "eval_strategy", "warmup_ratio": "warmup_steps", "max_seq_length": "max_length",
    "torch_dtype": "dtype", "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size", "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant", "use_nested_quant": "bnb_4bit_use_double_quant",
}

_LORA = {
    "lora_r": "r", "lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_bias": "bias",
    "lora_target_modules": "target_modules", "target_modules": "target_modules", "lora_target": "target_modules",
    "lora_modules_to_save": "modules_to_save", "modules_to_save": "modules_to_save", "additional_target": "modules_to_save",
    "lora_target_parameters": "target_parameters", "lora_task_type": "task_type", "use_rslora": "use_rslora",
    "use_dora": "use_dora", "init_lora_weights": "init_lora_weights", "layers_to_transform": "layers_to_transform",
    "lora_layers_to_transform": "layers_to_transform", "loraplus_lr_ratio": "loraplus_lr_ratio",
}
_QUANTISATION = {key: key for key in (
    "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage")}
_MODEL = {
    "model_name_or_path": "path", "model_name": "path", "model_id": "path", "model_revision": "revision", "dtype": "dtype",
    "attn_implementation": "attn_implementation", "trust_remote_code": "trust_remote_code", "device_map": "device_map",
    "use_cache": "use_cache", "low_cpu_mem_usage": "low_cpu_mem_usage", "adapter_name_or_path": "adapter",
}
_TOKENIZER = {"pad_token": "pad_token", "eos_token": "eos_token", "chat_template_path": "chat_template"}
_DATA = {
    "dataset_name": "source", "dataset_path": "source", "dataset_train_split": "split", "dataset_test_split": "test_split",
    "dataset_config": "config", "dataset_text_field": "text_field", "dataset_streaming": "streaming",
}
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "lora": _LORA, "quantisation": _QUANTISATION, "model": _MODEL, "tokenizer": _TOKENIZER, "data": _DATA}


def in_section(key: str) -> str:
    """A flat key of Hugging Face's trainers under the vocabulary's name: `lora_r` is lora.r, `bf16` training.bf16."""
    key = NEWER.get(key, key)
    for section, names in SECTIONS.items():
        if key in names:
            return f"{section}.{names[key]}"
    return f"training.{key}"


def strategy(value: Any) -> Any:
    """Sampling of transformers 5, from the switch of transformers 4."""
    return {True: "group_by_length", False: "random"}.get(value, value)
