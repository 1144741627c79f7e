"""The keys that each trainer has, so that those which it does not have are seen. Facts of their schemas, as lists of names.

transformers 5.23 and TRL 1.16 as installed; Axolotl and LLaMA-Factory as of August 2026.
"""

from __future__ import annotations

from powertrain.audit.configs.format import names

# transformers 5: TrainingArguments
TRAINING_ARGUMENTS = names("""
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
    warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
    gradient_accumulation_steps average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16
    bf16_full_eval fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
    liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy
    logging_steps logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
    save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub
    hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end
    metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed
    data_seed use_cpu accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp
    fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
""")

# transformers 4 besides: what version 5 renamed or dropped
TRAINING_ARGUMENTS_4 = names("""
    evaluation_strategy group_by_length warmup_ratio no_cuda use_mps_device per_gpu_train_batch_size
    per_gpu_eval_batch_size overwrite_output_dir save_safetensors logging_dir half_precision_backend fp16_opt_level
    fp16_backend adafactor jit_mode_eval use_ipex past_index push_to_hub_model_id push_to_hub_token
    push_to_hub_organization ray_scope torchdynamo tpu_num_cores tpu_metrics_debug include_inputs_for_metrics
    include_tokens_per_second dispatch_batches split_batches mp_parameters eval_packing fsdp_min_num_params
    fsdp_transformer_layer_cls_to_wrap predict_with_generate generation_max_length generation_num_beams generation_config
    sortish_sampler
""")

# TRL: SFTConfig besides TrainingArguments, and what older ones had
SFT = names("""
    model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path dataset_text_field dataset_kwargs
    dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy padding_free
    pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type activation_offloading pad_token
    max_seq_length dataset_batch_size num_of_sequences chars_per_token torch_dtype bnb_4bit_compute_dtype
    bnb_4bit_use_double_quant
""")

# TRL: ModelConfig and ScriptArguments, which its command line takes in the same file
TRL_SCRIPT = names("""
    model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha lora_dropout
    lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit
    load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage dataset_name dataset_config
    dataset_train_split dataset_test_split dataset_streaming datasets ignore_bias_buffers
""")
