"""For each rule on settings, machine and data a subject in which it fires, and a near miss in which it must not.

A case is (framework, settings, circumstances); settings are those of `audit_subjects.script`, or of `config` for frameworks
that have no scripts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audit_subjects import UNKNOWN, blocks, config, cpu, examples, gpu, here, model, script, software

from powertrain.audit.subject import Circumstances, Framework, Subject

SCRIPTS = ("trl", "transformers", "pytorch", "accelerate")
TURING = gpu("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11)
H100 = here(gpu())
DATA, MODEL = examples(), model()
LARGE = model(layers=32, width=4096)
ON_H100 = here(gpu(), DATA)
FOUR_BIT = {"quantisation__load_in_4bit": True, "lora__r": 16}
LORA = {"lora__r": 16, "lora__lora_alpha": 32}


@dataclass(frozen=True)
class Case:
    framework: Framework = "trl"
    where: Circumstances = UNKNOWN
    settings: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def subject(self, folder: Path) -> Subject:
        if self.framework in SCRIPTS:
            return script(folder / "train.py", self.framework, **self.extra, **self.settings)
        return config(folder / "config.yaml", self.framework, **self.extra, **self.settings)


def case(framework: Framework = "trl", where: Circumstances = UNKNOWN, extra: dict[str, Any] | None = None,
         **settings: Any) -> Case:
    return Case(framework, where, settings, extra or {})


PASS, TIMES = "training__per_device_train_batch_size", "training__gradient_accumulation_steps"

SETTING_CASES: dict[str, tuple[Case, Case]] = {
    "adapters_with_spilled_optimizer": (case(training__optim="paged_adamw_32bit", **LORA),
                                        case("transformers", training__optim="paged_adamw_32bit", model__path="x")),
    "attention_eager": (case(model__attn_implementation="eager"), case(model__attn_implementation="sdpa")),
    "batch_arithmetic": (
        case(extra={"comments": {TIMES.replace("__", "."): "keeps the effective batch size = 8"}}, **{PASS: 3, TIMES: 3}),
        case(extra={"comments": {TIMES.replace("__", "."): "effective batch size = 4 x 2 = 8"}}, **{PASS: 4, TIMES: 2})),
    "batch_beyond_data": (case("transformers", here(gpu(), examples(100)), **{PASS: 64, TIMES: 2}),
                          case("transformers", here(gpu(), examples(128)), **{PASS: 64, TIMES: 2})),
    "batch_found_by_failing": (case(training__auto_find_batch_size=True), case(training__auto_find_batch_size=False)),
    "best_checkpoint_intervals": (
        case(training__load_best_model_at_end=True, training__eval_strategy="steps", training__eval_steps=30,
             training__save_steps=100),
        case(training__load_best_model_at_end=True, training__eval_strategy="steps", training__eval_steps=50,
             training__save_steps=100)),
    "bf16_without_hardware": (case(where=here(TURING), training__bf16=True), case(where=H100, training__bf16=True)),
    "both_half_precisions": (case(training__bf16=True, training__fp16=True), case(training__bf16=True, training__fp16=False)),
    "cache_emptied": (case(training__torch_empty_cache_steps=10), case(training__torch_empty_cache_steps=None)),
    "cache_while_training": (case(model__use_cache=True), case(model__use_cache=False)),
    "checkpointing_needless": (case(where=ON_H100, **{PASS: 4}),
                               case(where=ON_H100, training__activation_checkpointing=False, **{PASS: 4})),
    "checkpointing_reentrant": (
        case(training__activation_checkpointing_kwargs={"use_reentrant": True}),
        case(training__activation_checkpointing_kwargs={"use_reentrant": False})),
    "clipping_off": (case(training__max_grad_norm=0.0), case(training__max_grad_norm=0.3)),
    "columns_kept": (case(training__remove_unused_columns=False), case(training__remove_unused_columns=True)),
    "compile_changing_lengths": (
        case(training__torch_compile=True),
        case(training__torch_compile=True, training__packing=True, training__packing_strategy="wrapped"),
    ),
    "compile_quantised": (case(training__torch_compile=True, **FOUR_BIT), case(training__torch_compile=False, **FOUR_BIT)),
    "decay_of_adapters": (case(training__weight_decay=0.1, **LORA), case(training__weight_decay=0.01, **LORA)),
    "determinism_forced": (case(training__full_determinism=True), case(training__full_determinism=False)),
    "double_quantisation_off": (case(**FOUR_BIT), case(quantisation__bnb_4bit_use_double_quant=True, **FOUR_BIT)),
    "flash_attention_unfit": (
        case(where=here(TURING), model__attn_implementation="flash_attention_2"),
        case(where=here(gpu("NVIDIA L40S", (8, 9), 48)), model__attn_implementation="flash_attention_2")),
    "four_bit_compute_type": (case(**FOUR_BIT), case(quantisation__bnb_4bit_compute_dtype="bfloat16", **FOUR_BIT)),
    "four_bit_needless": (
        case(where=here(gpu(), DATA, model(method="qlora", frozen_dtype="nf4")), **FOUR_BIT),
        case(where=here(gpu("NVIDIA RTX 4070", (8, 9), 12), DATA, model(method="qlora", frozen_dtype="nf4", layers=32,
             width=4096)), **FOUR_BIT),
    ),
    "four_bit_type": (case(**FOUR_BIT), case(quantisation__bnb_4bit_quant_type="nf4", **FOUR_BIT)),
    "fp16_on_bf16_hardware": (
        case(where=H100, training__fp16=True, training__bf16=False),
        case(where=here(TURING), training__fp16=True),
    ),
    "fp16_weights_unscaled": (case("transformers", training__fp16=True, model__path="x", model__dtype="float16"),
                              case("transformers", training__fp16=True, model__path="x", model__dtype="float32")),
    "fp16_without_tensor_cores": (case(where=here(gpu("NVIDIA GTX 1080", (6, 1), 8)), training__fp16=True),
                                  case(where=here(TURING), training__fp16=True)),
    "fp32_on_half_hardware": (case("transformers", H100, training__learning_rate=5e-5),
                              case("transformers", here(cpu(has_bf16=False)), training__learning_rate=5e-5)),
    "good_batch": (case(**{PASS: 4, TIMES: 8}), case(**{PASS: 1, TIMES: 2})),
    "good_checkpointing": (case(where=here(gpu("NVIDIA RTX 4070", (8, 9), 12), DATA, LARGE), **{PASS: 4}),
                           case(where=ON_H100, **{PASS: 4})),
    "good_four_bit": (
        case(where=here(gpu("NVIDIA RTX 4070", (8, 9), 12), DATA, model(method="qlora", frozen_dtype="nf4", layers=32,
             width=4096)), **FOUR_BIT),
        case(where=here(gpu(), DATA, model(method="qlora", frozen_dtype="nf4")), **FOUR_BIT),
    ),
    "good_packing": (case(training__packing=True), case(training__packing=False)),
    "good_precision": (case(where=H100, training__bf16=True), case(where=here(TURING), training__bf16=True)),
    "half_weights_trained": (
        case(model__path="x", model__dtype="bfloat16"),
        case(model__path="x", model__dtype="bfloat16", **LORA),
    ),
    "intervals_cost": (
        case(where=here(gpu(), DATA, MODEL), training__eval_strategy="steps", training__eval_steps=5, **{PASS: 8, TIMES: 1}),
        case(where=here(gpu(), DATA, MODEL), training__eval_strategy="steps", training__eval_steps=500, **{PASS: 8, TIMES: 8})),
    "intervals_never_fire": (case(training__max_steps=50, training__logging_steps=100),
                             case(training__max_steps=50, training__logging_steps=50)),
    "label_smoothing_cost": (
        case(training__label_smoothing_factor=0.1),
        case("transformers", training__label_smoothing_factor=0.1),
    ),
    "learning_rate_unfit": (case(training__learning_rate=2e-5, **LORA), case(training__learning_rate=2e-4, **LORA)),
    "length_grouping_without_effect": (
        case(training__train_sampling_strategy="group_by_length", training__packing=True),
        case(training__train_sampling_strategy="group_by_length", training__packing=False)),
    "loader_needs_workers": (case(training__dataloader_num_workers=0, training__dataloader_prefetch_factor=2),
                             case(training__dataloader_num_workers=2, training__dataloader_prefetch_factor=2)),
    "logging_each_step": (case(training__logging_steps=1), case(training__logging_steps=1, training__max_steps=60)),
    "lora_dropout_cost": (case(lora__lora_dropout=0.05, **LORA), case(lora__lora_dropout=0.0, **LORA)),
    "lora_on_attention_only": (case(lora__target_modules=["q_proj", "v_proj"], **LORA),
                               case(lora__target_modules=["q_proj", "v_proj", "gate_proj"], **LORA)),
    "lora_scaling": (
        case(lora__r=64, training__learning_rate=2e-4),
        case(lora__r=64, lora__lora_alpha=64, lora__use_rslora=True),
    ),
    "max_length_cuts": (case(where=ON_H100, training__max_length=256), case(where=ON_H100, training__max_length=1024)),
    "micro_batch_small": (case("transformers", where=ON_H100, **{PASS: 1, TIMES: 16}),
                          case("transformers", here(gpu("NVIDIA RTX 2060", (7, 5), 6), DATA, LARGE), **{PASS: 1, TIMES: 16})),
    "offload_that_is_none": (case(training__gradient_accumulation_kwargs={"use_cpu_offload": True}),
                             case(training__accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}})),
    "one_checkpoint_kept": (case(training__save_total_limit=1), case(training__save_total_limit=2)),
    "optimizer_not_fused": (case(training__optim="adamw_torch"), case(training__optim="adamw_torch_fused")),
    "optimizer_removed": (
        case(training__optim="adamw_hf"),
        case(where=here(gpu(), software_=software("4.57.3")), training__optim="adamw_hf"),
    ),
    "packing_leaks": (case(training__packing=True, training__packing_strategy="wrapped"),
                      case(training__packing=True, training__packing_strategy="bfd")),
    "packing_off": (case(where=ON_H100, **{PASS: 8}), case(where=here(gpu(), blocks()), **{PASS: 8})),
    "padding_free_unbounded": (case(training__padding_free=True), case(training__padding_free=True, training__max_length=None)),
    "padding_to_max_length": (
        case("transformers", ON_H100, data__padding="max_length", training__max_length=2048),
        case("transformers", here(gpu(), blocks()), data__padding="max_length", training__max_length=256),
    ),
    "pinned_memory": (
        case(where=here(cpu()), training__dataloader_pin_memory=True),
        case(where=H100, training__dataloader_pin_memory=True),
    ),
    "quantised_without_adapters": (case(quantisation__load_in_4bit=True), case(**FOUR_BIT)),
    "reduce_overhead_without_gpu": (
        case("transformers", here(cpu()), training__torch_compile=True, training__torch_compile_mode="reduce-overhead"),
        case("transformers", H100, training__torch_compile=True, training__torch_compile_mode="reduce-overhead")),
    "removed_names": (
        case(training__warmup_steps=0.03, extra={"spelled": {"training.warmup_steps": "warmup_ratio"}}),
        case(training__activation_checkpointing=True,
             extra={"spelled": {"training.activation_checkpointing": "gradient_checkpointing"}}),
    ),
    "reporting_everywhere": (case(training__report_to="all"), case(training__report_to="wandb")),
    "sharding_one_device": (case("accelerate", accelerate__num_processes=1, deepspeed__zero_optimization_stage=2,
                                 training__deepspeed="ds_config_zero2.json"),
                            case("accelerate", accelerate__num_processes=4, training__deepspeed="ds_config_zero2.json")),
    "streaming_without_workers": (case(data__streaming=True), case(data__streaming=True, training__dataloader_num_workers=2)),
    "tf32_without_effect": (case(where=H100, training__tf32=True), case("transformers", H100, training__tf32=True)),
    "threads_fixed": (
        case(where=here(cpu(2)), environment__OMP_NUM_THREADS="8"),
        case(where=here(cpu(8)), environment__OMP_NUM_THREADS="8"),
    ),
    "tokenizers_parallelism": (case(environment__TOKENIZERS_PARALLELISM="true", training__dataloader_num_workers=4),
                               case(environment__TOKENIZERS_PARALLELISM="true", training__dataloader_num_workers=0)),
    "qlora_of_eight_bits": (
        case("axolotl", quantisation__load_in_4bit=True, quantisation__load_in_8bit=True),
        case("axolotl", quantisation__load_in_4bit=True, quantisation__load_in_8bit=False)),
    "unknown_keys": (
        case("modelforge", extra={"unknown": {"use_flash": True}}, training__bf16=True),
        case("modelforge", training__bf16=True),
    ),
    "unused_parameters_searched": (
        case(training__ddp_find_unused_parameters=True),
        case(training__ddp_find_unused_parameters=False),
    ),
    "warmup_beyond_run": (
        case(training__warmup_steps=500, training__max_steps=200),
        case(training__warmup_steps=6, training__max_steps=200),
    ),
    "workers_beyond_cores": (case(where=here(cpu(2)), training__dataloader_num_workers=4),
                             case(where=here(cpu(4)), training__dataloader_num_workers=4)),
    "workers_for_ready_data": (
        case(training__dataloader_num_workers=4),
        case("transformers", training__dataloader_num_workers=4),
    ),
    "workers_start_each_epoch": (
        case("transformers", training__dataloader_num_workers=4, training__num_train_epochs=3),
        case("transformers", training__dataloader_num_workers=4, training__num_train_epochs=3,
             training__dataloader_persistent_workers=True)),
}
