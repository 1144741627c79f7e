"""Keys of other trainers that have no counterpart in a recipe, by the reason: what has no effect, and what cannot be had.

Facts of the schemas of transformers 5.23, TRL 1.16, Axolotl and LLaMA-Factory; the commoner keys are in spelling_tables.py.
"""

from __future__ import annotations

from collections.abc import Mapping


def _each(reasons: Mapping[str, str]) -> dict[str, str]:
    """{key: reason} of {reason: keys}."""
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


NO_EFFECT: Mapping[str, str] = _each({
    "a run is one process on one device":
        """average_tokens_across_devices accelerator_config parallelism_config dispatch_batches split_batches ddp ddp_backend
        world_size dp_shard_size dp_replicate_size tensor_parallel_size mp_parameters ray_scope use_ray ray_num_workers
        ray_run_name ray_init_kwargs resources_per_worker log_on_each_node save_on_each_node eval_use_gather_object
        qlora_sharded_model_loading master_addr master_port data_shared_file_system heads_k_stride ring_attn_func
        use_hyper_parallel hyper_parallel_args hyper_parallel_cp_size megatron_bridge_args lora_on_cpu max_memory
        gpu_memory_limit quantization_device_map offload_folder experimental_skip_move_to_device""",
    "the plan knows what the memory holds and makes passes of that size; nothing is tried until it fails":
        "auto_find_batch_size",
    "blocks are computed again by torch's non-reentrant checkpoint, the only one used here":
        "activation_checkpointing_kwargs use_reentrant_gc use_unsloth_gc selective_checkpointing",
    "the plan decides how activations fit the memory": "activation_offloading layer_offloading tiled_mlp tiled_mlp_num_shards "
        "tiled_mlp_use_original_mlp",
    "the plan chooses the kernels; `powertrain plan` lists them with their reasons":
        """torch_compile_backend torch_compile_mode torch_compile_options torchdynamo jit_mode_eval use_ipex deepcompile
        cut_cross_entropy chunked_cross_entropy chunked_cross_entropy_num_chunks lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        lora_embedding_kernel flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_rms_norm flash_attn_d512 fused_attn_kernel
        use_kernels liger_kernel_config use_v1_kernels experts_implementation sdpa_varlen large_head_attention
        flex_attn_compile_kwargs gemma4_hybrid_attn_impl""",
    "the plan chooses the attention kernel; pin it with techniques.attention_kernel":
        "flex_attention eager_attention sage_attention flash_optimum",
    "the plan chooses the type of the products; trained weights are fp32 either way":
        """bf16_full_eval fp16_full_eval fp16_backend fp16_opt_level half_precision_backend bfloat16 float16 float32 pure_bf16
        compute_dtype infer_dtype upcast_layernorm upcast_lmhead_output fp32_norms fp32_norm_classes embeddings_skip_upcast
        peft_autocast_adapter_dtype bnb_4bit_quant_storage""",
    "packed passes are filled anew at every optimizer step, from that step's examples":
        """sample_packing_group_size sample_packing_bin_size sample_packing_sequentially sample_packing_mp_start_method
        sample_packing_eff_est multipack_real_batches batch_flattening max_packed_sequence_len pad_to_multiple_of
        block_diag_attn""",
    "the data is tokenised once, in parallel, and reused as long as its content is the same":
        """dataset_keep_in_memory dataset_shard_num dataset_shard_idx num_dataset_shards_to_save skip_prepare_dataset
        is_preprocess preprocess_iterable preprocessing_batch_size dataset_batch_size dataset_streaming buffer_size
        pretrain_multipack_buffer_size streaming_multipack_buffer_size total_num_tokens total_supervised_tokens
        chars_per_token num_of_sequences use_fast_tokenizer tokenizer_use_fast tokenizer_legacy
        tokenizer_use_mistral_common cache_dir""",
    "the loader's threads take batches in order": "dataloader_in_order dataloader_multiprocessing_context",
    "evaluation passes are made as the training passes are, and give the loss":
        """eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start batch_eval_metrics prediction_loss_only
        include_for_metrics include_inputs_for_metrics label_names do_predict eval_sequence_len do_causal_lm_eval
        eval_causal_lm_metrics do_bench_eval bench_dataset bench_split eval_table_size eval_max_new_tokens compute_accuracy
        eval_on_each_dataset eval_num_beams predict_with_generate sortish_sampler""",
    "what is generated has no part in training; `powertrain chat` and `generate` take such options":
        """generate_samples num_generation_samples generation_config chat_template_kwargs do_sample max_new_tokens num_beams
        repetition_penalty length_penalty skip_special_tokens infer_backend use_kv_cache""",
    "a run reports to its own folder: events.jsonl":
        """disable_tqdm log_level log_level_replica logging_nan_inf_filter include_num_input_tokens_seen use_comet
        include_tokens_per_second include_tkps include_effective_tokens_per_second skip_memory_metrics use_mlflow
        hf_mlflow_log_artifacts use_trackio use_tensorboard use_swanlab print_param_status axolotl_config_path""",
    "a run writes down what each part of its steps took, and `powertrain ablate` measures what each technique does":
        "enable_torch_profiler profile_modules",
    "a run ends by itself where the loss is not finite":
        "loss_watchdog_threshold loss_watchdog_patience",
    "emptying the allocator's cache frees nothing that training could use, and costs time": "gc_steps gc_collect_steps",
    "a run goes on with `powertrain train --resume RUN`, at the step and the example where it stopped":
        "ignore_data_skip restore_callback_states_from_checkpoint auto_resume_from_checkpoints dynamic_checkpoint",
    "a checkpoint is written when a signal ends the run": "enable_jit_checkpoint save_first_step",
    "it is read off the model's config.json or the tokenizer's own files":
        """is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model type_of_model base_model_config
        cls_model_config processor_type processor_kwargs is_custom_model tokenizer_save_jinja_files""",
    "no credentials belong in a recipe":
        "hf_hub_token ms_hub_token om_hub_token hf_use_auth_token push_to_hub_token comet_api_key",
    "nothing is uploaded; the run's model/ folder is what a hub takes":
        "push_to_hub_model_id push_to_hub_organization push_dataset_to_hub",
    "merging comes after training: `powertrain export RUN --to merged`":
        "merge_lora merge_method create_new_adapter",
    "each example is padded, or not, by the batching that the plan chooses, and padding is never learned":
        "ignore_pad_token_for_loss",
    "the examples' order follows from the seed, and each epoch is shuffled anew": "shuffle_before_merging_datasets",
    "the model sees images or sound only in a trainer for them":
        """image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps
        video_maxlen use_audio_in_video audio_sampling_rate media_dir freeze_vision_tower freeze_multi_modal_projector
        freeze_mm_modules""",
    "it is a setting of training on preferences or rewards, which this is not":
        """precompute_ref_log_probs center_rewards_coefficient rl_beta ld_alpha ref_model ref_model_adapters
        ref_model_quantization_bit reward_model_adapters reward_model_quantization_bit reward_model_type max_prompt_len""",
    "it is a setting of an optimizer or adapter that this run does not use":
        """adam_beta3 adam_epsilon2 optim_target_modules torchdistx_path pissa_iter pissa_convert module_dropout
        loraplus_lr_embedding eaft_alpha eaft_k asft_alpha""",
    "a mixture of experts is trained as its config says": "router_aux_loss_coef moe_aux_loss_coef",
    "runs of a seed give the same bits on the same machine": "full_determinism",
    "distributed tiles of Mixture-of-Experts are not used": "quantize_moe_experts llama4_linearized_experts",
})

NO_EFFECT_BEGINNING: Mapping[str, str] = {
    **dict.fromkeys(("dpo_", "kto_", "ppo_", "pref_", "orpo_", "simpo_", "rpo_", "cpo_"),
                    "it is a setting of training on preferences or rewards, which this is not"),
    **dict.fromkeys(("galore_", "qgalore_", "apollo_", "badam_", "dion_", "oft_", "jagged_"),
                    "it is a setting of an optimizer or adapter that this run does not use"),
    **dict.fromkeys(("gradio_", "generation_", "export_"),
                    "it has no part in training; `powertrain chat` and `export` have theirs"),
    **dict.fromkeys(("profiler_",), "`ablate` and the report measure what a step's time goes to"),
    **dict.fromkeys(("tpu_",), "a run is one process on one device"),
}

_LOSS = "the loss is the cross-entropy of the next token; leave it out"
_OPTIMIZER = "the optimizer is AdamW; leave it out"
_POSITIONS = "the model's positions are as its config.json says; leave it out"
_VOCABULARY = "the vocabulary is the model's own; add tokens with another tool first"
_RATES = "one learning rate and one of the schedules cosine, linear and constant serve all weights; leave it out"
REFUSED: Mapping[str, str] = _each({
    _LOSS: "loss_type use_eaft use_eaft_loss use_dft_loss use_asft_loss scaling_softmax scaling_softmax_factor "
           "scaling_softmax_bias",
    _OPTIMIZER: "adafactor use_apollo use_muon use_adam_mini optim_args lisa_n_layers lisa_step_interval lisa_layers_attribute",
    _POSITIONS: "rope_scaling use_pose pose_max_context_len pose_num_chunks pose_split_on_token_ids shift_attn s2_attention "
                "overrides_of_model_config overrides_of_model_kwargs model_init_kwargs",
    _VOCABULARY: "tokens added_tokens_overrides add_tokens add_special_tokens new_special_tokens_config init_special_tokens "
                 "resize_vocab resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings split_special_tokens "
                 "fix_untrained_tokens",
    _RATES: """lr_scheduler_kwargs lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor lr_groups embedding_lr
        embedding_lr_scale""",
    "it would train other weights than adapters on linears, or all of them, which is not available":
        """lora_target_parameters freeze_trainable_modules freeze_extra_modules freeze_language_model use_llama_pro
        mixture_of_depths relora relora_prune_ratio relora_prune_method relora_cpu_offload reinit_weights
        peft_layer_replication peft_layers_pattern peft_trainable_token_indices peft_ensure_weight_tying lora_rank_pattern
        lora_alpha_pattern use_onebitllms""",
    "training on preferences or rewards is not available; train on the chosen answers, or use another trainer":
        "reward_model process_reward_model",
    "noise on the embeddings is not available; leave it out": "noisy_embedding_alpha",
    "quantised training beyond 4-bit bases of adapters is not available; use method: qlora":
        "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather qat model_quantization_config model_quantization_config_kwargs "
        "bnb_config_kwargs",
    "one run trains one model on one device: long texts are not split over several":
        "sequence_parallel_degree context_parallel_size",
    "a run ends at its last step, and the best checkpoint is kept; leave it out": "early_stopping_steps",
    "each epoch visits every example once, in an order drawn from the seed; leave it out":
        "curriculum_sampling disable_shuffling mix_strategy interleave_probs",
    "the trainer is Powertrain's own; leave it out": "trainer_cls use_mca use_megatron_bridge",
    "examples are as the data has them; take the doubles and the short ones out with `powertrain data check`":
        "dataset_exact_deduplication min_sample_len",
    "a system message comes from the data's own rows; write it there": "default_system default_system_message",
    "which tokens end a turn is what the tokenizer's template says; name another with data.end_token": "eot_tokens",
    "weights drawn anew are method: scratch with model.layers and the like": "train_from_scratch",
    "the accelerator is used where there is one; hide it with CUDA_VISIBLE_DEVICES= to train on the CPU":
        "use_cpu no_cuda use_mps_device",
    "pretraining data that is streamed without end is not available; name files with data.source": "pretraining_dataset",
    "tools in a chat template are not available; write them into the messages": "tool_format",
})
