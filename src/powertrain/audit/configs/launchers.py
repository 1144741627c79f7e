"""What launches or spreads a training: Accelerate's config YAML and DeepSpeed's config JSON. Their keys stay as they are."""

from __future__ import annotations

from powertrain.audit.configs.format import Format, names

_ACCELERATE = names("""compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank
     num_machines gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function
     enable_cpu_affinity fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config
     downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config
     dynamo_backend ipex_config mpi_config fp8_config ec2_instance_type iam_role_name image_uri profile region base_job_name
     pytorch_version transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args
     gradient_accumulation_steps deepspeed_hostfile deepspeed_multinode_launcher""")
_TABLES = names("""deepspeed_config.* fsdp_config.* parallelism_config.* megatron_lm_config.* mpirun_config.*
     dynamo_config.* fp8_config.* ipex_config.* additional_args.*""")
_DEEPSPEED = names("""train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print
     gradient_clipping prescale_gradients gradient_predivide_factor sparse_gradients zero_optimization fp16 bf16 amp
     optimizer scheduler wall_clock_breakdown dump_state activation_checkpointing aio flops_profiler tensorboard wandb
     csv_monitor comet communication_data_type zero_allow_untested_optimizer zero_force_ds_cpu_optimizer data_types
     autotuning elasticity curriculum_learning data_efficiency checkpoint sparse_attention comms_logger monitor_config
     compression_training disable_allgather seq_parallel_communication_data_type memory_breakdown load_universal_checkpoint
     use_node_local_storage pipeline dataloader_drop_last torch_autocast compile tensor_parallel sequence_parallel_size
     eigenvalue progressive_layer_drop hybrid_engine nebula train_steps""")

ACCELERATE = Format(
    name="an Accelerate config YAML", framework="accelerate",
    own=names("""compute_environment distributed_type machine_rank main_training_function num_processes num_machines
         rdzv_backend same_network downcast_bf16 dynamo_config deepspeed_config megatron_lm_config tpu_use_cluster
         enable_cpu_affinity"""),
    known=_ACCELERATE | _TABLES, section="accelerate")
DEEPSPEED = Format(
    name="a DeepSpeed config JSON", framework="deepspeed",
    own=names("""zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer wall_clock_breakdown
         steps_per_print gradient_clipping prescale_gradients communication_data_type aio flops_profiler"""),
    known=_DEEPSPEED | frozenset(f"{key}.*" for key in _DEEPSPEED), section="deepspeed")
