"""The names that scripts of any age use for a setting, under the vocabulary of subject.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# sources: MIGRATION_GUIDE_V5 and training_args.py of transformers 5.23, sft_config.py of TRL 1.16
RENAMED: Mapping[str, str] = {
    "training.gradient_checkpointing": "training.activation_checkpointing",
    "training.gradient_checkpointing_kwargs": "training.activation_checkpointing_kwargs",
    "training.evaluation_strategy": "training.eval_strategy",
    "training.max_seq_length": "training.max_length",
    "training.per_gpu_train_batch_size": "training.per_device_train_batch_size",
    "training.warmup_ratio": "training.warmup_steps",
    "training.group_by_length": "training.train_sampling_strategy",
    "training.no_cuda": "training.use_cpu",
    "model.torch_dtype": "model.dtype",
    "model.use_flash_attention_2": "model.attn_implementation",
    "model.pretrained_model_name_or_path": "model.path",
    "tokenizer.pretrained_model_name_or_path": "tokenizer.path",
}
TURNED: Mapping[str, Callable[[Any], Any]] = {
    "training.group_by_length": lambda on: "group_by_length" if on else "random",
    "model.use_flash_attention_2": lambda on: "flash_attention_2" if on else "sdpa",
}


def vocabulary(key: str, value: Any) -> tuple[str, Any]:
    """The key of subject.py and its value, for a key as a script spells it."""
    turn = TURNED.get(key)
    return RENAMED.get(key, key), turn(value) if turn is not None else value
