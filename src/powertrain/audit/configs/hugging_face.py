"""TrainingArguments as JSON (or YAML), with the keys of SFTConfig and TRL's command line in the same flat table."""

from __future__ import annotations

from typing import Any

from powertrain.audit.configs.format import Format, Read, Told, names
from powertrain.audit.configs.known_hugging_face import SFT, TRAINING_ARGUMENTS, TRAINING_ARGUMENTS_4, TRL_SCRIPT
from powertrain.audit.configs.vocabulary import strategy


def sampling(value: Any) -> Told:
    return "training.train_sampling_strategy", strategy(value)


READ: dict[str, Read] = {"group_by_length": sampling}
TABLES = {"deepspeed": "deepspeed", "fsdp_config": "fsdp"}       # where they are written out, and not a file's name
WHOLE = names("""gradient_checkpointing_kwargs activation_checkpointing_kwargs lr_scheduler_kwargs
                 accelerator_config liger_kernel_config model_init_kwargs dataset_kwargs parallelism_config optim_args
                 generation_config""")

TRANSFORMERS = Format(
    name="Hugging Face TrainingArguments", framework="transformers",
    own=names("per_device_train_batch_size num_train_epochs lr_scheduler_type optim eval_strategy evaluation_strategy"),
    known=TRAINING_ARGUMENTS | TRAINING_ARGUMENTS_4 | names("deepspeed.* fsdp_config.*"), read=READ, whole=WHOLE, tables=TABLES)
TRL = Format(
    name="TRL's SFTConfig", framework="trl", own=TRANSFORMERS.own | names("""completion_only_loss assistant_only_loss use_peft
        packing_strategy dataset_text_field dataset_name lora_target_modules load_in_4bit max_seq_length max_length
        model_init_kwargs chat_template_path padding_free"""),
    known=TRANSFORMERS.known | SFT | TRL_SCRIPT, read=READ, whole=WHOLE, tables=TABLES)
