"""Other trainers' names for keys, as tables: what is renamed, what is a technique, and what has no effect here and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powertrain.recipe import foreign_keys

# tables of other trainers' files whose keys stand at our top level
SECTIONS = ("training", "train", "trainer", "logging")

SAME_VALUE: Mapping[str, str] = {
    "effective_batch_size": "train_batch_size", "global_batch_size": "train_batch_size",
    "lr": "learning_rate",
    "min_lr_ratio": "min_lr_rate", "cosine_min_lr_ratio": "min_lr_rate",
    "epochs": "num_train_epochs", "num_epochs": "num_train_epochs",
    "max_iters": "max_steps", "num_training_steps": "max_steps", "num_steps": "max_steps",
    "gradient_clip": "max_grad_norm", "grad_clip": "max_grad_norm", "gradient_clipping": "max_grad_norm",
    "clip": "max_grad_norm", "wd": "weight_decay", "beta1": "adam_beta1", "beta2": "adam_beta2",
    "eps": "adam_epsilon", "epsilon": "adam_epsilon",
    "log_interval": "logging_steps", "log_steps": "logging_steps",
    "keep_last": "save_total_limit", "random_seed": "seed", "run_name": "name",
    "max_eval_blocks": "max_eval_samples", "output": "output_dir", "out_dir": "output_dir",
    "n_layer": "model.layers", "num_layers": "model.layers", "num_hidden_layers": "model.layers",
    "n_embd": "model.width", "hidden_size": "model.width", "d_model": "model.width",
    "n_head": "model.heads", "num_heads": "model.heads", "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads", "intermediate_size": "model.mlp_width",
    "context_length": "model.context", "max_position_embeddings": "model.context", "vocab_size": "model.vocabulary",
    "dropout": "model.dropout",
    "model_name_or_path": "model.path", "model_id": "model.path", "base_model": "model.path", "model_name": "model.path",
    "pretrained_model_name_or_path": "model.path", "base_model_name_or_path": "model.path",
    "revision": "model.revision", "model_revision": "model.revision", "revision_of_model": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "adapter_name_or_path": "model.adapter", "adapter_path": "model.adapter", "lora_model_dir": "model.adapter",
    "block_size": "data.block",
    "dataset_path": "data.source", "dataset_name": "data.source", "train_file": "data.source", "data_path": "data.source",
    "local_dataset": "data.source", "train_dataset": "data.source", "dataset.path": "data.source",
    "validation_file": "data.validation_source", "eval_dataset": "data.validation_source",
    "val_dataset": "data.validation_source", "eval_file": "data.validation_source",
    "dataset_train_split": "data.split", "dataset_split": "data.split", "train_split": "data.split",
    "max_samples": "data.max_examples", "max_train_samples": "data.max_examples",
    "max_chars": "data.max_chars", "text_column": "data.text_field", "dataset_text_field": "data.text_field",
    "eos_token": "data.end_token", "special_tokens.eos_token": "data.end_token",
    "lora_r": "lora.r", "lora_rank": "lora.r", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout",
    "use_rslora": "lora.use_rslora", "peft_use_rslora": "lora.use_rslora", "lora_use_rslora": "lora.use_rslora",
    "use_dora": "lora.use_dora", "peft_use_dora": "lora.use_dora", "lora_use_dora": "lora.use_dora",
    "init_sigma": "lora.sigma",
    "bnb_4bit_quant_type": "quantisation.type", "quantization_type": "quantisation.type",
    "bnb_4bit_use_double_quant": "quantisation.double", "use_nested_quant": "quantisation.double",
    "double_quantization": "quantisation.double", "use_double_quant": "quantisation.double",
    "use_bnb_nested_quant": "quantisation.double",
}

# key -> (technique, setting): the value is that setting of the technique
TECHNIQUE_SETTING: Mapping[str, tuple[str, str]] = {
    "dataloader_num_workers": ("loader", "workers"), "num_workers": ("loader", "workers"),
    "dataloader_pin_memory": ("loader", "pinned"), "pin_memory": ("loader", "pinned"),
    "dataloader_prefetch_factor": ("loader", "ahead"), "prefetch_factor": ("loader", "ahead"),
    "omp_num_threads": ("threads", "threads"),
}

# key -> technique: true pins it on, false off, auto leaves it to the plan
TECHNIQUE_SWITCH: Mapping[str, str] = {
    "bf16": "bf16", "fp16": "fp16", "tf32": "tf32",
    "use_compile": "torch_compile", "compile": "torch_compile", "compile_model": "torch_compile",
    "torch_compile": "torch_compile",
    "gradient_checkpointing": "activation_checkpointing", "activation_checkpointing": "activation_checkpointing",
}

# meaning -> the keys that say it; what they mean together is found when all are known (together_spellings.py)
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "batch": ("batch_size", "per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps"),
    "method": ("adapter", "finetuning_type", "training_type", "tuner_type", "train_type", "strategy", "use_peft", "use_lora",
               "use_qlora", "load_in_4bit", "use_4bit", "quantization_bit", "quant_bits", "load_in_8bit", "use_8bit"),
    "length": ("max_seq_length", "max_length", "sequence_length", "sequence_len", "cutoff_len", "max_seq_len",
               "model_max_length"),
    "masking": ("train_on_inputs", "train_on_prompt", "completion_only_loss", "assistant_only_loss", "train_on_completions",
                "train_on_responses_only"),
    "packing": ("packing", "sample_packing", "neat_packing", "padding_free"),
    "grouping": ("group_by_length", "train_sampling_strategy"),
    "evaluation": ("eval_strategy", "evaluation_strategy", "evals_per_epoch"),
    "saving": ("save_strategy", "saves_per_epoch"),
}

_LOADER = "the data is tokenised once, in parallel, and reused as long as its content is the same"
_TRACKER = "a run reports to its own folder: events.jsonl"
_ONE_DEVICE = "a run is one process on one device"
_ATTENTION = "the plan chooses the attention kernel; pin it with techniques.attention_kernel"
_KERNELS = "the plan chooses the kernels; `powertrain plan` lists them with their reasons"
_GENERATION = "making data with chat services is not part of training"
_FOUND = "it is read off the model's config.json"

NO_EFFECT: Mapping[str, str] = {
    "drop_last": "every optimizer step has a full batch: epochs run into each other, and no example is dropped",
    "dataloader_drop_last": "every optimizer step has a full batch: epochs run into each other, and no example is dropped",
    "cudnn_benchmark": "it chooses convolution algorithms, and a transformer has no convolution",
    "persistent_workers": "loader threads live as long as the run",
    "dataloader_persistent_workers": "loader threads live as long as the run",
    "torch_empty_cache_steps": "emptying the allocator's cache frees nothing that training could use, and costs time",
    "use_flash_attention": _ATTENTION, "use_flash_attention_2": _ATTENTION, "flash_attn": _ATTENTION,
    "flash_attention": _ATTENTION, "attn_implementation": _ATTENTION, "attn_impl": _ATTENTION, "sdp_attention": _ATTENTION,
    "xformers_attention": _ATTENTION,
    "use_liger_kernel": _KERNELS, "enable_liger_kernel": _KERNELS, "use_liger": _KERNELS,
    "checkpoint_compression": "weights hardly compress; checkpoints are written plain",
    "use_cache": "training keeps no key/value cache",
    "low_cpu_mem_usage": "a model built here exists once in memory",
    "remove_unused_columns": "only what the format names is read",
    "bnb_4bit_compute_dtype": "the plan chooses what 4-bit weights are multiplied in: bf16 where the hardware has it",
    "dtype": "frozen weights stay as the files have them, trained ones are fp32, and the plan chooses the products' type",
    "torch_dtype": "frozen weights stay as the files have them, trained ones are fp32, and the plan chooses the products' type",
    "compute_specs": "the plan looks at the machine itself; the profiles ship as recipes low-end, mid-range and high-end",
    "device": "the accelerator is used where there is one", "device_map": _ONE_DEVICE,
    "model_type": _FOUND, "tokenizer_type": "it is read off the tokenizer's own files", "is_llama_derived_model": _FOUND,
    "gradient_checkpointing_kwargs": "blocks are computed again by torch's non-reentrant checkpoint, the only one used here",
    "gradient_accumulation_kwargs": "no trainer has such an argument: nothing is offloaded by it",
    "pad_to_sequence_len": "padding trains nothing; how much there is follows from the batching that the plan chooses",
    "pad_to_max_length": "padding trains nothing; how much there is follows from the batching that the plan chooses",
    "eval_packing": "evaluation passes are made as the training passes are",
    "eval_sample_packing": "evaluation passes are made as the training passes are",
    "per_device_eval_batch_size": "evaluation passes are made as the training passes are",
    "eval_batch_size": "evaluation passes are made as the training passes are",
    "length_column_name": "the lengths are counted when the data is tokenised",
    "response_template": "which tokens are the answer's is known from the messages",
    "instruction_template": "which tokens are the answer's is known from the messages",
    "use_chat_template": "conversations always go through a chat template; data.chat_template=raw joins the words alone",
    "dataset_dir": "data.source names the files themselves, and no dataset_info.json is read",
    "overwrite_cache": _LOADER, "preprocessing_num_workers": _LOADER, "dataset_num_proc": _LOADER,
    "dataset_prepared_path": _LOADER, "dataset_processes": _LOADER, "tokenized_path": _LOADER, "dataset_kwargs": _LOADER,
    "streaming": _LOADER,
    "shuffle_dataset": "each epoch visits every example once, in an order drawn from the seed",
    "shuffle_merged_datasets": "each epoch visits every example once, in an order drawn from the seed",
    "data_seed": "the order of the examples follows from the seed, as everything that is drawn does",
    "pad_token": "nothing reads padding, and it is never confused with the end token",
    "special_tokens.pad_token": "nothing reads padding, and it is never confused with the end token",
    "do_train": "`powertrain train` trains", "do_eval": "held-out examples are evaluated whenever there are some",
    "plot_loss": _TRACKER, "report_to": _TRACKER, "logging_dir": _TRACKER, "use_wandb": _TRACKER, "enable_wandb": _TRACKER,
    "enable_tensorboard": _TRACKER, "logging_strategy": _TRACKER, "logging_first_step": _TRACKER,
    "overwrite_output_dir": "a run never writes into another one's folder",
    "save_only_model": "a checkpoint holds all that resuming to the bit takes",
    "save_safetensors": "weights are always written as safetensors",
    "metric_for_best_model": "the best checkpoint is the one with the lowest held-out loss",
    "greater_is_better": "the best checkpoint is the one with the lowest held-out loss",
    "push_to_hub": "nothing is uploaded; the run's model/ folder is what a hub takes",
    "hf_token": "no credentials belong in a recipe", "token": "no credentials belong in a recipe",
    "local_rank": _ONE_DEVICE, "deepspeed": f"{_ONE_DEVICE}, so there is no optimizer state to spread",
    "fsdp": f"{_ONE_DEVICE}, so there are no weights to spread", "strict": "recipes are always strict",
    "api_models": _GENERATION,
    **{f"dataset.{key}": _GENERATION for key in (
        "batch_size", "max_tokens", "temperature", "top_p", "output_dir", "random_seed", "output_format", "prompt_template",
        "base_topics", "n_topic_variants")},
    "lora_fan_in_fan_out": "which way round a weight is stored is read off the model",
    "fan_in_fan_out": "which way round a weight is stored is read off the model",
    **foreign_keys.NO_EFFECT,
}

# the same for all keys that begin so
NO_EFFECT_BEGINNING: Mapping[str, str] = {
    "hub_": NO_EFFECT["push_to_hub"], "wandb_": _TRACKER, "mlflow_": _TRACKER, "comet_": _TRACKER, "swanlab_": _TRACKER,
    "trackio_": _TRACKER, "ddp_": _ONE_DEVICE, "fsdp_": _ONE_DEVICE, "liger_": _KERNELS,
    "inference.": "`powertrain chat` and `generate` take these as options",
    "paths.": "a run's folder is output_dir, and the cache is chosen on the command line",
    **foreign_keys.NO_EFFECT_BEGINNING,
}

_SELECTIVE = "it would train some of the model's own weights and not others, which is not available; use method=lora or full"
PREFERENCE = "training on preferences or rewards is not available; train on the chosen answers, or use another trainer"

# key -> why a value other than "off" is an error: going on without it would give another model
REFUSED: Mapping[str, str] = {
    "modules_to_save": _SELECTIVE, "lora_modules_to_save": _SELECTIVE, "additional_target": _SELECTIVE,
    "unfrozen_parameters": _SELECTIVE, "freeze_trainable_layers": _SELECTIVE, "freeze_ratio": _SELECTIVE,
    "layers_to_transform": _SELECTIVE, "peft_layers_to_transform": _SELECTIVE, "lora_layers_to_transform": _SELECTIVE,
    "rl": PREFERENCE, "rlhf_type": PREFERENCE,
    "neftune_noise_alpha": "noise on the embeddings is not available; leave it out",
    "loraplus_lr_ratio": "one learning rate serves all adapters; leave it out",
    "pissa_init": "adapters start at zero; leave it out", "use_galore": "the optimizer is AdamW; leave it out",
    "use_badam": "the optimizer is AdamW; leave it out", "label_smoothing_factor": "targets are not smoothed; leave it out",
    "mask_history": "every answer of a conversation is learned; leave it out",
    "early_stopping_patience": "a run ends at its last step, and the best checkpoint is kept; leave it out",
    "load_best_model_at_end": "model/ is the last step's, and the best checkpoint is kept beside it; leave it out",
    "resume_from_checkpoint": "a run goes on with `powertrain train --resume RUN`; leave it out",
    "gptq": "4-bit bases are bitsandbytes' (method=qlora); leave it out",
    **foreign_keys.REFUSED,
}
OFF: tuple[Any, ...] = (None, False, 0, "", "no", "none", "off", [])
