"""LLaMA-Factory's YAML: its own model, data and method keys beside those of TrainingArguments."""

from __future__ import annotations

from typing import Any

from powertrain.audit.configs.format import Format, Read, Told, names
from powertrain.audit.configs.hugging_face import READ as HUGGING_FACE
from powertrain.audit.configs.hugging_face import TABLES, TRANSFORMERS, WHOLE
from powertrain.audit.configs.known_llama_factory import LLAMA_FACTORY

RENAMED = {
    "cutoff_len": "training.max_length", "val_size": "data.validation_share", "max_samples": "data.max_examples",
    "eval_dataset": "data.validation_source", "dataset_dir": "data.dataset_dir", "template": "tokenizer.chat_template",
    "quantization_type": "quantisation.bnb_4bit_quant_type", "enable_liger_kernel": "training.use_liger_kernel",
    "double_quantization": "quantisation.bnb_4bit_use_double_quant", "hf_hub_token": "model.token",
    "preprocessing_num_workers": "training.dataset_num_proc", "pissa_init": "lora.pissa_init",
}
ATTENTION = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "disabled": "eager"}


def _method(value: Any) -> Told:
    return ("training.use_peft", value == "lora") if value in ("lora", "full") else ("training.finetuning_type", value)


def _bits(value: Any) -> Told:
    return (f"quantisation.load_in_{value}bit", True) if value in (4, 8) else ("quantisation.bits", value)


def _targets(value: Any) -> Told:
    if not isinstance(value, str) or value == "all":
        return "lora.target_modules", "all-linear" if value == "all" else value
    return "lora.target_modules", _split(value)


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _dataset(value: Any) -> Told:
    parts = _split(value) if isinstance(value, str) else value
    return "data.source", parts[0] if isinstance(parts, list) and len(parts) == 1 else parts


def _answers_only(value: Any) -> Told:
    return "training.assistant_only_loss", None if value is None else not value


def _attention(value: Any) -> Told:
    return "model.attn_implementation", ATTENTION.get(value, value)


def _no_checkpointing(value: Any) -> Told:
    return ("training.activation_checkpointing", False) if value is True else \
        ("training.disable_gradient_checkpointing", value)


READ: dict[str, Read] = {
    **HUGGING_FACE, "finetuning_type": _method, "quantization_bit": _bits, "lora_target": _targets, "dataset": _dataset,
    "train_on_prompt": _answers_only, "flash_attn": _attention, "disable_gradient_checkpointing": _no_checkpointing,
}
LLAMA_FACTORY_YAML = Format(
    name="a LLaMA-Factory YAML", framework="llama-factory",
    own=names("""stage finetuning_type cutoff_len template dataset_dir lora_target lora_rank quantization_bit
        preprocessing_num_workers val_size max_samples overwrite_cache plot_loss flash_attn enable_liger_kernel neat_packing
        train_on_prompt use_unsloth additional_target double_quantization quantization_method"""),
    known=TRANSFORMERS.known | LLAMA_FACTORY, renamed=RENAMED, read=READ,
    whole=WHOLE | names("rope_scaling ray_init_kwargs"), tables=TABLES)
