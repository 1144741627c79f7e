"""Axolotl's YAML."""

from __future__ import annotations

from typing import Any

from powertrain.audit.configs.format import Format, Read, Told, names
from powertrain.audit.configs.hugging_face import TABLES as HUGGING_FACE_TABLES
from powertrain.audit.configs.hugging_face import sampling
from powertrain.audit.configs.known_axolotl import AXOLOTL

RENAMED = {
    "base_model": "model.path", "revision_of_model": "model.revision", "model_revision": "model.revision",
    "model_type": "model.type", "type_of_model": "model.type", "tokenizer_type": "tokenizer.type",
    "lora_model_dir": "model.adapter",
    "tokenizer_config": "tokenizer.path", "chat_template": "tokenizer.chat_template",
    "chat_template_jinja": "tokenizer.chat_template", "special_tokens.pad_token": "tokenizer.pad_token",
    "special_tokens.eos_token": "tokenizer.eos_token",
    "micro_batch_size": "training.per_device_train_batch_size", "batch_size": "training.train_batch_size",
    "eval_batch_size": "training.per_device_eval_batch_size", "num_epochs": "training.num_train_epochs",
    "optimizer": "training.optim", "lr_scheduler": "training.lr_scheduler_type", "sequence_len": "training.max_length",
    "cosine_min_lr_ratio": "training.min_lr_rate", "sample_packing": "training.packing",
    "eval_sample_packing": "training.eval_packing", "dataset_processes": "training.dataset_num_proc",
    "val_set_size": "data.validation_share", "peft_use_dora": "lora.use_dora", "peft_use_rslora": "lora.use_rslora",
    "peft_init_lora_weights": "lora.init_lora_weights", "peft_layers_to_transform": "lora.layers_to_transform",
}


def _adapter(value: Any) -> Told | list[Told]:
    """`lora`, `qlora`, or nothing for training in full."""
    if value == "qlora":
        return [("training.use_peft", True), ("quantisation.load_in_4bit", True)]
    return ("training.use_peft", bool(value)) if value in ("lora", None, "") else ("training.adapter", value)


def _linear(value: Any) -> Told:
    return ("lora.target_modules", "all-linear") if value is True else ("lora.target_linear", value)


def _attention(kernel: str, own: str) -> Read:
    return lambda value: ("model.attn_implementation", kernel) if value is True else (f"training.{own}", value)


def _answers_only(value: Any) -> Told:
    return "training.assistant_only_loss", None if value is None else not value


def _padding(value: Any) -> Told:
    return "data.padding", None if value is None else "max_length" if value else "longest"


def _whole_dtype(own: str) -> Read:
    """`bfloat16: true` has the whole model in that type, without autocast."""
    return lambda value: ("model.dtype", own) if value is True else (f"training.{own}", value)


def _plugins(value: Any) -> list[Told]:
    plugins = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
    foreign = [name for name in plugins if "liger" not in name.lower()]
    told: list[Told] = [("training.use_liger_kernel", True)] if len(foreign) < len(plugins) else []
    return told + ([("training.plugins", foreign)] if foreign or not told else [])


def _datasets(value: Any) -> list[Told]:
    """Several tables, each with a path; one table's values stand alone."""
    tables = [part if isinstance(part, dict) else {"path": part} for part in (value if isinstance(value, list) else [value])]
    tables = [table for table in tables if table.get("path") is not None]
    if not tables:
        return [("data.source", None)]
    told: list[Told] = []
    names = {"type": "format", "split": "split", "name": "config"}
    sources = [table.get("data_files") or table["path"] for table in tables]
    told.append(("data.source", sources[0] if len(sources) == 1 else sources))
    for key in dict.fromkeys(key for table in tables for key in table if key not in ("path", "data_files", "ds_type")):
        each = [table.get(key) for table in tables]
        told.append((f"data.{names.get(key, key)}", each[0] if len(set(map(str, each))) == 1 else each))
    return told


READ: dict[str, Read] = {
    "adapter": _adapter, "lora_target_linear": _linear, "flash_attention": _attention("flash_attention_2", "flash_attention"),
    "sdp_attention": _attention("sdpa", "sdp_attention"), "eager_attention": _attention("eager", "eager_attention"),
    "xformers_attention": _attention("xformers", "xformers_attention"), "train_on_inputs": _answers_only,
    "flex_attention": _attention("flex_attention", "flex_attention"), "pad_to_sequence_len": _padding,
    "bfloat16": _whole_dtype("bfloat16"), "float16": _whole_dtype("float16"), "plugins": _plugins, "datasets": _datasets,
    "group_by_length": sampling,
}
TABLES = names("""special_tokens.* trl.* vllm.* qat.* quantization.* chat_template_kwargs.* overrides_of_model_config.*
    overrides_of_model_kwargs.* model_quantization_config_kwargs.* dynamic_checkpoint.* peft.* ebft.* max_memory.*
    bnb_config_kwargs.* deepspeed.* fsdp_config.* model_type model_revision torch_compile_options.* added_tokens_overrides.*""")

AXOLOTL_YAML = Format(
    name="an Axolotl YAML", framework="axolotl",
    own=names("""base_model micro_batch_size sequence_len datasets adapter sample_packing lora_target_linear val_set_size
        dataset_prepared_path num_epochs special_tokens pad_to_sequence_len evals_per_epoch saves_per_epoch lora_model_dir
        lora_fan_in_fan_out tokenizer_type train_on_inputs flash_attention xformers_attention cosine_min_lr_ratio
        wandb_project"""),
    known=AXOLOTL | TABLES, renamed=RENAMED, read=READ,
    tables=HUGGING_FACE_TABLES,
    whole=names("""gradient_checkpointing_kwargs accelerator_config lr_scheduler_kwargs optim_args
        selective_checkpointing resources_per_worker"""),
    wants=lambda found: isinstance(found.value.get("datasets", []), list))
