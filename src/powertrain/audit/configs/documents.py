"""The configs of the source documents' systems: ModelForge, lora-trainer, the character transformer, ReFocused-AI."""

from __future__ import annotations

from typing import Any

from powertrain.audit.configs.format import Format, Read, Told, names
from powertrain.audit.configs.hugging_face import TRANSFORMERS, sampling
from powertrain.audit.configs.marked import Marked

# ------------------------------------------------------------------------------------------------ 001

MODELFORGE = Format(
    name="a ModelForge JSON (system 001)", framework="modelforge",
    own=names("provider compute_specs use_4bit use_8bit strategy task use_nested_quant eval_split use_chat_template"),
    known=names("""task model_name provider strategy dataset compute_specs device lora_r lora_alpha lora_dropout use_4bit
         use_8bit bnb_4bit_compute_dtype bnb_4bit_quant_type use_nested_quant fp16 bf16 num_train_epochs
         per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps gradient_checkpointing
         max_grad_norm learning_rate weight_decay optim lr_scheduler_type max_steps warmup_ratio group_by_length packing
         max_seq_length use_chat_template eval_split eval_steps logging_steps save_steps tf32 dataloader_pin_memory
         is_custom_model"""),
    renamed={"use_4bit": "quantisation.load_in_4bit", "use_8bit": "quantisation.load_in_8bit", "provider": "model.provider",
             "task": "model.task", "dataset": "data.source", "eval_split": "data.validation_share"},
    read={"group_by_length": sampling})

# ------------------------------------------------------------------------------------------------ 000

_LORA_KEYS = """model_id hf_token lora_r lora_alpha lora_dropout use_4bit target_modules num_epochs batch_size eval_batch_size
    gradient_accumulation_steps learning_rate max_seq_length logging_steps eval_steps save_steps save_total_limit
    lr_scheduler_type warmup_ratio output_dir dataset_path"""
# from its command line's code and from document 000: accepted where they stand in the file
_SHOWN = "fp16 bf16 gradient_checkpointing optim dataloader_num_workers dataloader_pin_memory group_by_length packing"
_LORA_NAMES = {
    "batch_size": "training.per_device_train_batch_size", "eval_batch_size": "training.per_device_eval_batch_size",
    "num_epochs": "training.num_train_epochs", "use_4bit": "quantisation.load_in_4bit", "hf_token": "model.token",
}


def _under_lora(table: dict[str, Any]) -> dict[str, Any]:
    """The same keys with and without the `lora:` table, under which the document leaves them out."""
    return {prefix + key: value for key, value in table.items() for prefix in ("", "lora.")}


def _is_lora_trainer(found: Marked) -> bool:
    return not isinstance(found.value.get("datasets"), dict) and "training" not in found.inner


LORA_TRAINER = Format(
    name="a lora-trainer YAML (document 000)", framework="lora-trainer",
    own=names("api_models lora inference model_id batch_size eval_batch_size use_4bit"),
    known=names(" ".join(_under_lora(dict.fromkeys((_LORA_KEYS + " " + _SHOWN).split()))) + """ dataset.* api_models inference.*
        paths.*"""),
    renamed=_under_lora(_LORA_NAMES) | {
        f"lora.{key}": name for key, name in {
            "model_id": "model.path", "dataset_path": "data.source", "lora_r": "lora.r", "lora_alpha": "lora.lora_alpha",
            "lora_dropout": "lora.lora_dropout", "target_modules": "lora.target_modules",
            "max_seq_length": "training.max_length",
            "gradient_checkpointing": "training.activation_checkpointing"}.items()} | {
        f"lora.{key}": f"training.{key}" for key in names("""gradient_accumulation_steps learning_rate logging_steps
             eval_steps save_steps save_total_limit lr_scheduler_type warmup_ratio output_dir fp16 bf16 optim
             dataloader_num_workers dataloader_pin_memory packing""")},
    read=_under_lora({"group_by_length": sampling}), wants=_is_lora_trainer)

# ------------------------------------------------------------------------------------------------ 003


def _datasets(value: Any) -> list[Told]:
    """The enabled ones of a table of datasets by name."""
    tables = [table for table in (value.values() if isinstance(value, dict) else []) if isinstance(table, dict)]
    on = [table for table in tables if table.get("enabled", True) and table.get("path")]
    if not on:
        return [("data.source", None)]
    told: list[Told] = [("data.source", on[0]["path"] if len(on) == 1 else [table["path"] for table in on])]
    limits = [table.get("max_chars") for table in on]
    return told + ([("data.max_chars", limits[0] if len(set(limits)) == 1 else limits)] if any(limits) else [])


def _is_character(found: Marked) -> bool:
    return all(isinstance(found.value.get(key, {}), dict) for key in ("training", "model", "datasets"))


_READ_003: dict[str, Read] = {"datasets": _datasets}
CHARACTER_TRANSFORMER = Format(
    name="the character transformer's YAML (document 003)", framework="character-transformer",
    own=names("training noise sampling datasets"),
    known=names("""device seed training.epochs training.batch_size training.lr training.learning_rate training.gradient_clip
         training.val_split training.eval_interval training.save_interval training.log_interval training.use_compile
         training.skip_completed model.n_layer model.n_head model.n_embd model.cond_dim model.dropout model.bias
         model.context_length noise.sigma_min noise.sigma_max sampling.steps sampling.temperature sampling.num_samples
         datasets datasets.* paths.*"""),
    renamed={
        "device": "environment.device", "training.batch_size": "training.per_device_train_batch_size",
        "training.epochs": "training.num_train_epochs", "training.lr": "training.learning_rate",
        "training.gradient_clip": "training.max_grad_norm", "training.val_split": "data.validation_share",
        "training.log_interval": "training.logging_steps", "training.use_compile": "training.torch_compile",
        "model.n_layer": "model.num_hidden_layers", "model.n_head": "model.num_attention_heads",
        "model.n_embd": "model.hidden_size", "model.context_length": "model.max_position_embeddings",
        **{key: key for key in names("""training.learning_rate training.eval_interval training.save_interval
             training.skip_completed model.cond_dim model.dropout model.bias noise.sigma_min noise.sigma_max sampling.steps
             sampling.temperature sampling.num_samples""")}},
    read=_READ_003, whole=names("datasets"), wants=_is_character)

# ------------------------------------------------------------------------------------------------ 004

REFOCUSED = Format(
    name="ReFocused-AI's TrainingConfig (document 004)", framework="accelerate",
    own=names("""bucket_name tokenized_file_pattern sequence_length max_files use_streaming compile_model background_upload
         checkpoint_compression bucket_path use_flash_attention"""),
    known=names("""bucket_name tokenized_file_pattern sequence_length max_files use_streaming learning_rate warmup_steps
         max_steps per_device_train_batch_size gradient_accumulation_steps weight_decay max_grad_norm dataloader_num_workers
         dataloader_pin_memory dataloader_drop_last drop_last pin_memory prefetch_factor num_workers bf16 fp16 compile_model
         use_flash_attention save_steps logging_steps checkpoint_compression background_upload output_dir logging_dir
         cache_dir bucket_path gradient_checkpointing seed mixed_precision adam_epsilon"""),
    renamed={
        "sequence_length": "training.max_length", "compile_model": "training.torch_compile", "max_files": "data.max_files",
        "num_workers": "loader.num_workers", "pin_memory": "loader.pin_memory", "prefetch_factor": "loader.prefetch_factor",
        "drop_last": "loader.drop_last", "bucket_name": "data.bucket_name", "bucket_path": "data.bucket_path",
        "tokenized_file_pattern": "data.tokenized_file_pattern", "use_streaming": "data.streaming"},
    read={"use_flash_attention": lambda value: ("model.attn_implementation", "flash_attention_2") if value is True else
          ("training.use_flash_attention", value)})
assert TRANSFORMERS.known & REFOCUSED.known
