"""The keys of LLaMA-Factory besides transformers' own, as of August 2026: a fact of its schema, as a list of names."""

from __future__ import annotations

from powertrain.audit.configs.format import names

# model, data, method, export, profiling
LLAMA_FACTORY = names("""
    template dataset eval_dataset dataset_dir media_dir cutoff_len train_on_prompt mask_history streaming buffer_size
    mix_strategy interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers max_samples
    eval_num_beams ignore_pad_token_for_loss val_size eval_on_each_dataset packing neat_packing tool_format default_system
    enable_thinking preserve_thinking tokenized_path data_shared_file_system freeze_trainable_layers
    freeze_trainable_modules freeze_extra_modules additional_target lora_alpha lora_dropout lora_rank lora_target
    loraplus_lr_ratio loraplus_lr_embedding use_rslora use_dora pissa_init pissa_iter pissa_convert create_new_adapter
    module_dropout oft_rank oft_block_size oft_target pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing
    kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
    ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model reward_model_adapters
    reward_model_quantization_bit reward_model_type ld_alpha use_galore galore_target galore_rank galore_update_interval
    galore_scale galore_proj_type galore_layerwise use_apollo apollo_target apollo_rank apollo_update_interval
    apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front use_badam badam_mode
    badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose use_swanlab
    swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir
    swanlab_lark_webhook_url swanlab_lark_secret pure_bf16 stage finetuning_type use_llama_pro use_adam_mini use_mca
    use_megatron_bridge megatron_bridge_args use_hyper_parallel hyper_parallel_args hyper_parallel_cp_size use_muon
    use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha freeze_vision_tower freeze_multi_modal_projector
    freeze_language_model compute_accuracy disable_shuffling early_stopping_steps plot_loss
    include_effective_tokens_per_second model_name_or_path adapter_name_or_path adapter_folder cache_dir
    use_fast_tokenizer resize_vocab split_special_tokens add_tokens add_special_tokens new_special_tokens_config
    init_special_tokens model_revision low_cpu_mem_usage rope_scaling flash_attn shift_attn mixture_of_depths use_unsloth
    use_unsloth_gc enable_liger_kernel moe_aux_loss_coef disable_gradient_checkpointing use_reentrant_gc upcast_layernorm
    upcast_lmhead_output train_from_scratch infer_backend offload_folder use_kv_cache use_v1_kernels infer_dtype
    hf_hub_token ms_hub_token om_hub_token print_param_status trust_remote_code quantization_method quantization_bit
    quantization_type double_quantization quantization_device_map image_max_pixels image_min_pixels image_do_pan_and_scan
    crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate
    export_dir export_size export_device export_quantization_bit export_quantization_dataset export_quantization_nsamples
    export_quantization_maxlen export_legacy_format export_hub_model_id compute_dtype device_map model_max_length
    block_diag_attn ray_num_workers ray_init_kwargs master_addr master_port enable_torch_profiler profiler_output_dir
    profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes
    profiler_profile_memory profiler_with_stack profile_modules fp8 fp8_backend fp8_enable_fsdp_float8_all_gather
    overwrite_output_dir do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty
    length_penalty skip_special_tokens
""")
