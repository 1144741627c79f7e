"""Other trainers' names for the keys of a recipe, translated and noted.

The source documents, Hugging Face, nanoGPT, TRL and Axolotl call the same things by other names. Each is accepted,
turned into the recipe's own key, and said: nothing is renamed in silence, and a key that can have no effect here says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Renamed = dict[str, Any]                        # our dotted key -> value
SECTIONS = ("training", "train", "trainer")     # tables of other trainers' files whose keys stand at our top level

OUR_OWN = ("data.max_length",)                  # keys of the recipe that another trainer calls something else

SAME_VALUE: Mapping[str, str] = {
    "batch_size": "train_batch_size", "effective_batch_size": "train_batch_size",
    "lr": "learning_rate", "scheduler": "lr_scheduler_type", "lr_scheduler": "lr_scheduler_type",
    "epochs": "num_train_epochs", "num_epochs": "num_train_epochs",
    "max_iters": "max_steps", "num_training_steps": "max_steps", "num_steps": "max_steps",
    "warmup": "warmup_steps", "warmup_iters": "warmup_steps", "num_warmup_steps": "warmup_steps",
    "gradient_clip": "max_grad_norm", "grad_clip": "max_grad_norm", "gradient_clipping": "max_grad_norm",
    "clip": "max_grad_norm", "wd": "weight_decay", "beta1": "adam_beta1", "beta2": "adam_beta2",
    "eps": "adam_epsilon", "epsilon": "adam_epsilon",
    "log_interval": "logging_steps", "log_steps": "logging_steps",
    "keep_last": "save_total_limit", "random_seed": "seed",
    "max_eval_blocks": "max_eval_samples", "output": "output_dir", "out_dir": "output_dir",
    "n_layer": "model.layers", "num_layers": "model.layers", "num_hidden_layers": "model.layers",
    "n_embd": "model.width", "hidden_size": "model.width", "d_model": "model.width",
    "n_head": "model.heads", "num_heads": "model.heads", "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads", "intermediate_size": "model.mlp_width",
    "context_length": "model.context", "max_position_embeddings": "model.context", "vocab_size": "model.vocabulary",
    "dropout": "model.dropout",
    "block_size": "data.block", "sequence_length": "data.block", "sequence_len": "data.block",
    "max_seq_length": "data.block", "max_length": "data.block", "cutoff_len": "data.block",
    "dataset": "data.source", "dataset_path": "data.source", "train_file": "data.source",
    "max_chars": "data.max_chars", "text_column": "data.text_field",
    "val_split": "data.validation_share", "eval_split": "data.validation_share", "val_set_size": "data.validation_share",
}

# key -> (technique, setting): the value is that setting of the technique
TECHNIQUE_SETTING: Mapping[str, tuple[str, str]] = {
    "dataloader_num_workers": ("loader", "workers"), "num_workers": ("loader", "workers"),
    "dataloader_pin_memory": ("loader", "pinned"), "pin_memory": ("loader", "pinned"),
    "dataloader_prefetch_factor": ("loader", "ahead"), "prefetch_factor": ("loader", "ahead"),
    "omp_num_threads": ("threads", "threads"),
}

# key -> technique: true pins it on, false off
TECHNIQUE_SWITCH: Mapping[str, str] = {
    "bf16": "bf16", "fp16": "fp16", "tf32": "tf32",
    "use_compile": "torch_compile", "compile": "torch_compile", "compile_model": "torch_compile",
    "torch_compile": "torch_compile",
    "gradient_checkpointing": "activation_checkpointing", "activation_checkpointing": "activation_checkpointing",
}

NO_EFFECT: Mapping[str, str] = {
    "drop_last": "every optimizer step has a full batch: epochs run into each other, and no example is dropped",
    "dataloader_drop_last": "every optimizer step has a full batch: epochs run into each other, and no example is dropped",
    "cudnn_benchmark": "it chooses convolution algorithms, and a transformer has no convolution",
    "persistent_workers": "loader threads live as long as the run",
    "dataloader_persistent_workers": "loader threads live as long as the run",
    "torch_empty_cache_steps": "emptying the allocator's cache frees nothing that training could use, and costs time",
    "group_by_length": "all blocks have the same length, so there is nothing to group",
    "use_flash_attention": "the plan chooses the attention kernel; pin it with techniques.attention_kernel",
    "checkpoint_compression": "weights hardly compress; checkpoints are written plain",
    "use_cache": "training keeps no key/value cache",
    "low_cpu_mem_usage": "a model built here exists once in memory",
    "remove_unused_columns": "only the text is read",
}


def translate(values: Mapping[str, Any]) -> tuple[Renamed, list[str]]:
    """(dotted keys with our names, one note per translated key). Keys it does not know pass through unchanged.

    Raises ValueError where two spellings disagree about one key.
    """
    ours: Renamed = {}
    notes: list[str] = []
    for key, value in _without_sections(values).items():
        renamed, note = _translate_one(key, value)
        for name, item in renamed.items():
            _put(ours, name, item, key)
        if note:
            notes.append(note)
    _fold_accumulation(ours, notes)
    return ours, notes


def _without_sections(values: Mapping[str, Any]) -> Renamed:
    """`training.batch_size` of another trainer's file is `batch_size`."""
    flat: Renamed = {}
    for key, value in values.items():
        section, _, rest = key.partition(".")
        flat[rest if section in SECTIONS and rest else key] = value
    return flat


def _translate_one(key: str, value: Any) -> tuple[Renamed, str | None]:
    if key in OUR_OWN:
        return {key: value}, None
    plain = key.removeprefix("model.").removeprefix("data.")
    special = _SPECIAL.get(key)
    if special is not None:
        renamed = special(value)
        return renamed, f"{key}: {value} is written {_shown(renamed)} here"
    ours = SAME_VALUE.get(plain, key)
    if ours != key and (plain == key or ours.startswith(key.removesuffix(plain))):
        return {ours: value}, f"{key} is called {ours} here"
    if key in TECHNIQUE_SETTING:
        technique, setting = TECHNIQUE_SETTING[key]
        return {f"techniques.{technique}.{setting}": value}, f"{key} is techniques.{technique}.{setting} here"
    if key in TECHNIQUE_SWITCH and isinstance(value, bool):
        pin = {f"techniques.{TECHNIQUE_SWITCH[key]}": "on" if value else "off"}
        return pin, f"{key}: {str(value).lower()} is written {_shown(pin)} here"
    if key in NO_EFFECT:
        return {}, f"{key} has no effect here: {NO_EFFECT[key]}"
    return {key: value}, None


def _shown(values: Renamed) -> str:
    return ", ".join(f"{key}: {value}" for key, value in values.items()) or "nothing (it is the default)"


def _put(ours: Renamed, name: str, value: Any, spelled: str) -> None:
    if name in ours and ours[name] != value:
        raise ValueError(f"{spelled}={value} and an earlier {name}={ours[name]} are the same setting; keep one of them")
    ours[name] = value


def _fold_accumulation(ours: Renamed, notes: list[str]) -> None:
    """Micro-batch x accumulation steps is the batch; how it is split again is the planner's business."""
    micro = ours.pop("per_device_train_batch_size", None)
    accumulation = ours.pop("gradient_accumulation_steps", None)
    if micro is None and accumulation is None:
        return
    if micro is None:
        raise ValueError(f"gradient_accumulation_steps={accumulation} says how a batch is split, and there is no "
                         "per_device_train_batch_size to multiply; write train_batch_size, the examples per optimizer step")
    batch = micro * (1 if accumulation is None else accumulation)
    _put(ours, "train_batch_size", batch, "per_device_train_batch_size x gradient_accumulation_steps")
    shown = f"{micro}" if accumulation is None else f"{micro} x {accumulation}"
    notes.append(f"per_device_train_batch_size x gradient_accumulation_steps = {shown} is train_batch_size: {batch} here; "
                 "the plan splits it")


def _in_epochs(ours: str) -> Callable[[Any], Renamed]:
    """Document 003 counts these intervals in epochs."""
    return lambda value: {ours: f"{value} epochs" if isinstance(value, (int, float)) and value else value}


def _max_steps(value: Any) -> Renamed:
    return {"max_steps": None if value == -1 else value}


def _mixed_precision(value: Any) -> Renamed:
    if value in ("no", "fp32", False, None):
        return {"techniques.bf16": "off", "techniques.fp16": "off"}
    return {f"techniques.{value}": "on"}


def _optim(value: Any) -> Renamed:
    known = {"adamw_torch": "off", "adamw_torch_fused": "on"}
    if value not in known:
        raise ValueError(f"optim={value!r} is not available; the optimizer is AdamW, with or without one fused kernel "
                         f"(optim is one of {', '.join(known)})")
    return {"techniques.fused_adamw": known[value]}


_SPECIAL: Mapping[str, Callable[[Any], Renamed]] = {
    "eval_interval": _in_epochs("eval_steps"), "save_interval": _in_epochs("save_steps"),
    "mixed_precision": _mixed_precision, "optim": _optim, "optimizer": _optim,
}


def clean(values: Mapping[str, Any]) -> Renamed:
    """Values that Hugging Face writes with a sign for "not set": `max_steps: -1`."""
    return {key: _max_steps(value)["max_steps"] if key == "max_steps" else value for key, value in values.items()}
