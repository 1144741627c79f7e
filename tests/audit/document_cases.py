"""What one expects of the five documents' own snippets and configurations, written down by hand before any was audited.

Each: the file, the machine of the document (or of those who follow it), the findings above `good` with their severities, and
those that are good. A code such as F7 or X9 numbers a statement of the documents; after it stands what is true of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from audit_subjects import examples, gpu, here, model, software

from powertrain.audit.subject import Circumstances

TURING = here(gpu("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11))
ADA = here(gpu("NVIDIA GeForce RTX 4080 SUPER", (8, 9), 16))
PASCAL = here(gpu("NVIDIA GeForce GTX 1080", (6, 1), 8))
H100 = here(gpu())
TWO_H100 = here(gpu(devices=2))
V100 = here(gpu("Tesla V100-SXM2-16GB", (7, 0), 16))
TWO_GPUS = here(gpu("NVIDIA L40S", (8, 9), 48, devices=2),
                software_=software("4.57.3", missing={"flash_attn": "not installed"}))
SMALL_DATA = here(gpu("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11), examples(171, train_batch_size=8),
                  model(layers=22, width=2048))


@dataclass(frozen=True)
class Expected:
    file: str
    where: Circumstances
    found: dict[str, str]                    # rule -> severity
    good: frozenset[str] = field(default_factory=frozenset)


EXPECTED = (
    # F7: no FlashAttention 2 on Turing. F18 and 4.4: bf16, which SFTConfig turns on by itself, on a Turing card. F1: an
    # offload that no trainer has. 4.3: group_by_length is gone. X9: shapes change under a compiled model. X3: the cache
    # emptied in the loop, at every tenth step only. F13: remove_unused_columns. ZeRO-2 on one device. Dropout on adapters;
    # one checkpoint. It does not pack.
    Expected("lora_trainer_000.py", TURING, {
        "bf16_without_hardware": "critical", "flash_attention_unfit": "critical", "offload_that_is_none": "critical",
        "removed_names": "critical", "adapter_never_saved": "low",
        "compile_changing_lengths": "moderate", "cache_emptied_in_loop": "low",
        "columns_kept": "low", "sharding_one_device": "low", "lora_dropout_cost": "low", "one_checkpoint_kept": "low",
        "packing_off": "low"}, frozenset({"good_batch"})),
    # X11: of 84 steps (171 examples, 4 epochs, 8 a step) none is the hundredth; reading 8 held-out examples every 20 steps
    # takes 2 to 3 %. Short examples, not packed (lengths are known)
    Expected("config_000.yaml", SMALL_DATA, {
        "intervals_never_fire": "low", "intervals_cost": "low", "one_checkpoint_kept": "low", "packing_off": "moderate"},
        frozenset({"good_batch"})),
    # F12: 3 x 3 is not 8. fp16 is right on Turing
    Expected("out_of_memory_000.yaml", TURING, {"batch_arithmetic": "moderate", "packing_off": "low"},
             frozenset({"good_precision"})),
    # F3: TF32 under autocast. X1: grouping packed examples. Paged AdamW for adapters
    Expected("ampere_001.json", ADA, {
        "tf32_without_effect": "low", "length_grouping_without_effect": "low", "adapters_with_spilled_optimizer": "low"},
        frozenset({"good_precision", "good_packing", "good_batch"})),
    # F22: fp16 arithmetic is very slow on a GTX 10. X7: passes of one example
    Expected("pascal_001.json", PASCAL, {"micro_batch_small": "low", "fp16_without_tensor_cores": "moderate"}),
    # F9: a compiled 4-bit model. X9 gives way to it. F21: threads in forked workers; 8 threads on 8 cores are right. 4-bit
    # weights without adapters, and examples without labels. 4-bit weights as FP4, multiplied in fp32, scales not quantised. F3
    Expected("preprocess_001.py", ADA, {
        "compile_quantised": "critical", "quantised_without_adapters": "critical", "labels_missing": "critical",
        "four_bit_compute_type": "low",
        "four_bit_type": "low", "double_quantisation_off": "low", "tokenizers_parallelism": "low", "tf32_without_effect": "low",
        "workers_start_each_epoch": "low"}, frozenset({"good_precision", "good_batch"})),
    # 1.2, found in the source: device_map="auto" split the model over two GPUs, which the document did not see. F29 does
    # not hold: SFTTrainer's own collator takes padding out of the loss by its place, not by its token. F4: not fused (small
    # for adapters). F10: it is padded to the batch's longest, not to 2048
    Expected("before_002.py", TWO_GPUS, {
        "device_map_auto": "moderate", "remote_code_unpinned": "moderate", "optimizer_not_fused": "low", "packing_off": "low"},
        frozenset({"good_precision", "good_batch"})),
    # F8 and 1.2: FlashAttention is not installed. F9: the 4-bit model is compiled. X2: workers for data that TRL has
    # tokenised
    Expected("after_002.py", TWO_GPUS, {
        "device_map_auto": "moderate", "flash_attention_unfit": "critical", "compile_quantised": "critical",
        "remote_code_unpinned": "moderate",
        "workers_for_ready_data": "low", "packing_off": "low"},
        frozenset({"good_precision", "good_batch"})),
    Expected("config_003.yaml", ADA, {}, frozenset({"good_batch"})),
    # X6: fp16 on a card with bf16. F3: TF32 under autocast. F15: cudnn.benchmark. 1.3: evaluation outside the epoch loop.
    # Section 5, weakness 3: `_orig_mod.` in the checkpoints' names
    Expected("train_003.py", ADA, {
        "fp16_on_bf16_hardware": "moderate", "tf32_without_effect": "low", "cudnn_benchmark": "low",
        "outside_the_epoch_loop": "critical", "compiled_names_saved": "low"}, frozenset({"good_batch"})),
    Expected("training_config_004.py", H100, {}, frozenset({"good_precision", "good_batch"})),
    # F18: a V100 has no bf16
    Expected("training_config_004.py", V100, {"bf16_without_hardware": "critical"}, frozenset({"good_batch"})),
    # F16: .item() at every step. F17: a prepared scheduler, stepped once a process. F15. AdamW without fused
    Expected("train_004.py", TWO_H100, {
        "item_each_step": "low", "norms_decayed": "low", "scheduler_each_process": "critical",
        "cudnn_benchmark": "low", "optimizer_not_fused": "low"},
        frozenset({"good_precision", "good_batch"})),
)
