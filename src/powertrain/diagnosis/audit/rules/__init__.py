"""The rules of the audit, one file each, in the order in which they are asked."""

from __future__ import annotations

from powertrain.diagnosis.audit.rules.adapters_with_spilled_optimizer import AdaptersWithSpilledOptimizer
from powertrain.diagnosis.audit.rules.attention_eager import AttentionEager
from powertrain.diagnosis.audit.rules.base import Circumstances, Rule
from powertrain.diagnosis.audit.rules.batch_arithmetic import BatchArithmetic
from powertrain.diagnosis.audit.rules.batch_beyond_data import BatchBeyondData
from powertrain.diagnosis.audit.rules.batch_found_by_failing import BatchFoundByFailing
from powertrain.diagnosis.audit.rules.best_checkpoint_intervals import BestCheckpointIntervals
from powertrain.diagnosis.audit.rules.bf16_without_hardware import Bf16WithoutHardware
from powertrain.diagnosis.audit.rules.both_half_precisions import BothHalfPrecisions
from powertrain.diagnosis.audit.rules.cache_emptied import CacheEmptied
from powertrain.diagnosis.audit.rules.cache_while_training import CacheWhileTraining
from powertrain.diagnosis.audit.rules.checkpointing_needless import CheckpointingNeedless
from powertrain.diagnosis.audit.rules.checkpointing_reentrant import CheckpointingReentrant
from powertrain.diagnosis.audit.rules.clipping_off import ClippingOff
from powertrain.diagnosis.audit.rules.columns_kept import ColumnsKept
from powertrain.diagnosis.audit.rules.compile_changing_lengths import CompileChangingLengths
from powertrain.diagnosis.audit.rules.compile_quantised import CompileQuantised
from powertrain.diagnosis.audit.rules.decay_of_adapters import DecayOfAdapters
from powertrain.diagnosis.audit.rules.determinism_forced import DeterminismForced
from powertrain.diagnosis.audit.rules.double_quantisation_off import DoubleQuantisationOff
from powertrain.diagnosis.audit.rules.flash_attention_unfit import FlashAttentionUnfit
from powertrain.diagnosis.audit.rules.four_bit_compute_type import FourBitComputeType
from powertrain.diagnosis.audit.rules.four_bit_needless import FourBitNeedless
from powertrain.diagnosis.audit.rules.four_bit_type import FourBitType
from powertrain.diagnosis.audit.rules.fp16_on_bf16_hardware import Fp16OnBf16Hardware
from powertrain.diagnosis.audit.rules.fp16_weights_unscaled import Fp16WeightsUnscaled
from powertrain.diagnosis.audit.rules.fp32_on_half_hardware import Fp32OnHalfHardware
from powertrain.diagnosis.audit.rules.good_batch import GoodBatch
from powertrain.diagnosis.audit.rules.good_checkpointing import GoodCheckpointing
from powertrain.diagnosis.audit.rules.good_four_bit import GoodFourBit
from powertrain.diagnosis.audit.rules.good_packing import GoodPacking
from powertrain.diagnosis.audit.rules.good_precision import GoodPrecision
from powertrain.diagnosis.audit.rules.half_weights_trained import HalfWeightsTrained
from powertrain.diagnosis.audit.rules.intervals_cost import IntervalsCost
from powertrain.diagnosis.audit.rules.intervals_never_fire import IntervalsNeverFire
from powertrain.diagnosis.audit.rules.label_smoothing_cost import LabelSmoothingCost
from powertrain.diagnosis.audit.rules.learning_rate_unfit import LearningRateUnfit
from powertrain.diagnosis.audit.rules.length_grouping_without_effect import LengthGroupingWithoutEffect
from powertrain.diagnosis.audit.rules.loader_needs_workers import LoaderNeedsWorkers
from powertrain.diagnosis.audit.rules.logging_each_step import LoggingEachStep
from powertrain.diagnosis.audit.rules.lora_dropout_cost import LoraDropoutCost
from powertrain.diagnosis.audit.rules.lora_on_attention_only import LoraOnAttentionOnly
from powertrain.diagnosis.audit.rules.lora_scaling import LoraScaling
from powertrain.diagnosis.audit.rules.max_length_cuts import MaxLengthCuts
from powertrain.diagnosis.audit.rules.micro_batch_small import MicroBatchSmall
from powertrain.diagnosis.audit.rules.offload_that_is_none import OffloadThatIsNone
from powertrain.diagnosis.audit.rules.one_checkpoint_kept import OneCheckpointKept
from powertrain.diagnosis.audit.rules.optimizer_not_fused import OptimizerNotFused
from powertrain.diagnosis.audit.rules.optimizer_removed import OptimizerRemoved
from powertrain.diagnosis.audit.rules.packing_leaks import PackingLeaks
from powertrain.diagnosis.audit.rules.packing_off import PackingOff
from powertrain.diagnosis.audit.rules.padding_free_unbounded import PaddingFreeUnbounded
from powertrain.diagnosis.audit.rules.padding_to_max_length import PaddingToMaxLength
from powertrain.diagnosis.audit.rules.pinned_memory import PinnedMemory
from powertrain.diagnosis.audit.rules.reduce_overhead_without_gpu import ReduceOverheadWithoutGpu
from powertrain.diagnosis.audit.rules.removed_names import RemovedNames
from powertrain.diagnosis.audit.rules.reporting_everywhere import ReportingEverywhere
from powertrain.diagnosis.audit.rules.sharding_one_device import ShardingOneDevice
from powertrain.diagnosis.audit.rules.streaming_without_workers import StreamingWithoutWorkers
from powertrain.diagnosis.audit.rules.tf32_without_effect import Tf32WithoutEffect
from powertrain.diagnosis.audit.rules.threads_fixed import ThreadsFixed
from powertrain.diagnosis.audit.rules.tokenizers_parallelism import TokenizersParallelism
from powertrain.diagnosis.audit.rules.unknown_keys import UnknownKeys
from powertrain.diagnosis.audit.rules.unused_parameters_searched import UnusedParametersSearched
from powertrain.diagnosis.audit.rules.warmup_beyond_run import WarmupBeyondRun
from powertrain.diagnosis.audit.rules.workers_beyond_cores import WorkersBeyondCores
from powertrain.diagnosis.audit.rules.workers_for_ready_data import WorkersForReadyData
from powertrain.diagnosis.audit.rules.workers_start_each_epoch import WorkersStartEachEpoch

RULES: tuple[type[Rule], ...] = (
    AdaptersWithSpilledOptimizer,
    AttentionEager,
    BatchArithmetic,
    BatchBeyondData,
    BatchFoundByFailing,
    BestCheckpointIntervals,
    Bf16WithoutHardware,
    BothHalfPrecisions,
    CacheEmptied,
    CacheWhileTraining,
    CheckpointingNeedless,
    CheckpointingReentrant,
    ClippingOff,
    ColumnsKept,
    CompileChangingLengths,
    CompileQuantised,
    DecayOfAdapters,
    DeterminismForced,
    DoubleQuantisationOff,
    FlashAttentionUnfit,
    FourBitComputeType,
    FourBitNeedless,
    FourBitType,
    Fp16OnBf16Hardware,
    Fp16WeightsUnscaled,
    Fp32OnHalfHardware,
    GoodBatch,
    GoodCheckpointing,
    GoodFourBit,
    GoodPacking,
    GoodPrecision,
    HalfWeightsTrained,
    IntervalsCost,
    IntervalsNeverFire,
    LabelSmoothingCost,
    LearningRateUnfit,
    LengthGroupingWithoutEffect,
    LoaderNeedsWorkers,
    LoggingEachStep,
    LoraDropoutCost,
    LoraOnAttentionOnly,
    LoraScaling,
    MaxLengthCuts,
    MicroBatchSmall,
    OffloadThatIsNone,
    OneCheckpointKept,
    OptimizerNotFused,
    OptimizerRemoved,
    PackingLeaks,
    PackingOff,
    PaddingFreeUnbounded,
    PaddingToMaxLength,
    PinnedMemory,
    ReduceOverheadWithoutGpu,
    RemovedNames,
    ReportingEverywhere,
    ShardingOneDevice,
    StreamingWithoutWorkers,
    Tf32WithoutEffect,
    ThreadsFixed,
    TokenizersParallelism,
    UnknownKeys,
    UnusedParametersSearched,
    WarmupBeyondRun,
    WorkersBeyondCores,
    WorkersForReadyData,
    WorkersStartEachEpoch,
)

__all__ = ["RULES", "Circumstances", "Rule"]
