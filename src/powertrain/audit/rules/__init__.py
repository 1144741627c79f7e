"""The rules of the audit, one file each, in the order in which they are asked."""

from __future__ import annotations

from powertrain.audit.rules.accumulation_not_divided import AccumulationNotDivided
from powertrain.audit.rules.adapters_with_spilled_optimizer import AdaptersWithSpilledOptimizer
from powertrain.audit.rules.anomaly_detection_on import AnomalyDetectionOn
from powertrain.audit.rules.attention_eager import AttentionEager
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.rules.batch_arithmetic import BatchArithmetic
from powertrain.audit.rules.batch_beyond_data import BatchBeyondData
from powertrain.audit.rules.batch_found_by_failing import BatchFoundByFailing
from powertrain.audit.rules.best_checkpoint_intervals import BestCheckpointIntervals
from powertrain.audit.rules.bf16_without_hardware import Bf16WithoutHardware
from powertrain.audit.rules.both_half_precisions import BothHalfPrecisions
from powertrain.audit.rules.cache_emptied import CacheEmptied
from powertrain.audit.rules.cache_emptied_in_loop import CacheEmptiedInLoop
from powertrain.audit.rules.cache_while_training import CacheWhileTraining
from powertrain.audit.rules.checkpoint_cannot_resume import CheckpointCannotResume
from powertrain.audit.rules.checkpointing_needless import CheckpointingNeedless
from powertrain.audit.rules.checkpointing_reentrant import CheckpointingReentrant
from powertrain.audit.rules.clip_before_unscale import ClipBeforeUnscale
from powertrain.audit.rules.clip_without_effect import ClipWithoutEffect
from powertrain.audit.rules.clipping_off import ClippingOff
from powertrain.audit.rules.columns_kept import ColumnsKept
from powertrain.audit.rules.compile_changing_lengths import CompileChangingLengths
from powertrain.audit.rules.compile_quantised import CompileQuantised
from powertrain.audit.rules.compiled_names_saved import CompiledNamesSaved
from powertrain.audit.rules.cudnn_benchmark import CudnnBenchmark
from powertrain.audit.rules.data_parallel import DataParallelUsed
from powertrain.audit.rules.decay_of_adapters import DecayOfAdapters
from powertrain.audit.rules.determinism_forced import DeterminismForced
from powertrain.audit.rules.device_map_auto import DeviceMapAuto
from powertrain.audit.rules.documents_concatenated import DocumentsConcatenated
from powertrain.audit.rules.double_quantisation_off import DoubleQuantisationOff
from powertrain.audit.rules.evaluation_keeps_gradients import EvaluationKeepsGradients
from powertrain.audit.rules.evaluation_mode_left_on import EvaluationModeLeftOn
from powertrain.audit.rules.flash_attention_unfit import FlashAttentionUnfit
from powertrain.audit.rules.four_bit_compute_type import FourBitComputeType
from powertrain.audit.rules.four_bit_needless import FourBitNeedless
from powertrain.audit.rules.four_bit_type import FourBitType
from powertrain.audit.rules.fp16_on_bf16_hardware import Fp16OnBf16Hardware
from powertrain.audit.rules.fp16_weights_unscaled import Fp16WeightsUnscaled
from powertrain.audit.rules.fp16_without_scaler import Fp16WithoutScaler
from powertrain.audit.rules.fp16_without_tensor_cores import Fp16WithoutTensorCores
from powertrain.audit.rules.fp32_on_half_hardware import Fp32OnHalfHardware
from powertrain.audit.rules.good_batch import GoodBatch
from powertrain.audit.rules.good_checkpointing import GoodCheckpointing
from powertrain.audit.rules.good_four_bit import GoodFourBit
from powertrain.audit.rules.good_packing import GoodPacking
from powertrain.audit.rules.good_precision import GoodPrecision
from powertrain.audit.rules.gradients_cleared_early import GradientsClearedEarly
from powertrain.audit.rules.gradients_not_zeroed import GradientsNotZeroed
from powertrain.audit.rules.half_weights_trained import HalfWeightsTrained
from powertrain.audit.rules.intervals_cost import IntervalsCost
from powertrain.audit.rules.intervals_never_fire import IntervalsNeverFire
from powertrain.audit.rules.item_each_step import ItemEachStep
from powertrain.audit.rules.label_smoothing_cost import LabelSmoothingCost
from powertrain.audit.rules.labels_shifted_twice import LabelsShiftedTwice
from powertrain.audit.rules.learning_rate_unfit import LearningRateUnfit
from powertrain.audit.rules.length_grouping_without_effect import LengthGroupingWithoutEffect
from powertrain.audit.rules.loader_needs_workers import LoaderNeedsWorkers
from powertrain.audit.rules.loader_not_shuffled import LoaderNotShuffled
from powertrain.audit.rules.logging_each_step import LoggingEachStep
from powertrain.audit.rules.lora_dropout_cost import LoraDropoutCost
from powertrain.audit.rules.lora_on_attention_only import LoraOnAttentionOnly
from powertrain.audit.rules.lora_scaling import LoraScaling
from powertrain.audit.rules.losses_kept_with_graph import LossesKeptWithGraph
from powertrain.audit.rules.max_length_cuts import MaxLengthCuts
from powertrain.audit.rules.mean_of_means import MeanOfMeans
from powertrain.audit.rules.micro_batch_small import MicroBatchSmall
from powertrain.audit.rules.micro_batches_synchronised import MicroBatchesSynchronised
from powertrain.audit.rules.offload_that_is_none import OffloadThatIsNone
from powertrain.audit.rules.one_checkpoint_kept import OneCheckpointKept
from powertrain.audit.rules.optimizer_not_fused import OptimizerNotFused
from powertrain.audit.rules.optimizer_removed import OptimizerRemoved
from powertrain.audit.rules.outside_the_epoch_loop import OutsideTheEpochLoop
from powertrain.audit.rules.packing_leaks import PackingLeaks
from powertrain.audit.rules.packing_off import PackingOff
from powertrain.audit.rules.pad_is_end import PadIsEnd
from powertrain.audit.rules.padding_free_unbounded import PaddingFreeUnbounded
from powertrain.audit.rules.padding_to_max_length import PaddingToMaxLength
from powertrain.audit.rules.padding_trained import PaddingTrained
from powertrain.audit.rules.pickle_loaded import PickleLoaded
from powertrain.audit.rules.pinned_memory import PinnedMemory
from powertrain.audit.rules.prompts_trained import PromptsTrained
from powertrain.audit.rules.quantised_without_adapters import QuantisedWithoutAdapters
from powertrain.audit.rules.reduce_overhead_without_gpu import ReduceOverheadWithoutGpu
from powertrain.audit.rules.removed_names import RemovedNames
from powertrain.audit.rules.reporting_everywhere import ReportingEverywhere
from powertrain.audit.rules.sampler_without_epoch import SamplerWithoutEpoch
from powertrain.audit.rules.saved_by_every_process import SavedByEveryProcess
from powertrain.audit.rules.scaler_half_used import ScalerHalfUsed
from powertrain.audit.rules.scheduler_each_micro_batch import SchedulerEachMicroBatch
from powertrain.audit.rules.scheduler_each_process import SchedulerEachProcess
from powertrain.audit.rules.sharding_one_device import ShardingOneDevice
from powertrain.audit.rules.streaming_without_workers import StreamingWithoutWorkers
from powertrain.audit.rules.synchronised_each_step import SynchronisedEachStep
from powertrain.audit.rules.tf32_without_effect import Tf32WithoutEffect
from powertrain.audit.rules.threads_fixed import ThreadsFixed
from powertrain.audit.rules.tokenised_each_epoch import TokenisedEachEpoch
from powertrain.audit.rules.tokenizers_parallelism import TokenizersParallelism
from powertrain.audit.rules.unknown_keys import UnknownKeys
from powertrain.audit.rules.unused_parameters_searched import UnusedParametersSearched
from powertrain.audit.rules.warmup_beyond_run import WarmupBeyondRun
from powertrain.audit.rules.workers_beyond_cores import WorkersBeyondCores
from powertrain.audit.rules.workers_for_ready_data import WorkersForReadyData
from powertrain.audit.rules.workers_start_each_epoch import WorkersStartEachEpoch

RULES: tuple[type[Rule], ...] = (
    AccumulationNotDivided,
    AdaptersWithSpilledOptimizer,
    AnomalyDetectionOn,
    AttentionEager,
    BatchArithmetic,
    BatchBeyondData,
    BatchFoundByFailing,
    BestCheckpointIntervals,
    Bf16WithoutHardware,
    BothHalfPrecisions,
    CacheEmptied,
    CacheEmptiedInLoop,
    CacheWhileTraining,
    CheckpointCannotResume,
    CheckpointingNeedless,
    CheckpointingReentrant,
    ClipBeforeUnscale,
    ClipWithoutEffect,
    ClippingOff,
    ColumnsKept,
    CompileChangingLengths,
    CompileQuantised,
    CompiledNamesSaved,
    CudnnBenchmark,
    DataParallelUsed,
    DecayOfAdapters,
    DeterminismForced,
    DeviceMapAuto,
    DocumentsConcatenated,
    DoubleQuantisationOff,
    EvaluationKeepsGradients,
    EvaluationModeLeftOn,
    FlashAttentionUnfit,
    FourBitComputeType,
    FourBitNeedless,
    FourBitType,
    Fp16OnBf16Hardware,
    Fp16WeightsUnscaled,
    Fp16WithoutScaler,
    Fp16WithoutTensorCores,
    Fp32OnHalfHardware,
    GoodBatch,
    GoodCheckpointing,
    GoodFourBit,
    GoodPacking,
    GoodPrecision,
    GradientsClearedEarly,
    GradientsNotZeroed,
    HalfWeightsTrained,
    IntervalsCost,
    IntervalsNeverFire,
    ItemEachStep,
    LabelSmoothingCost,
    LabelsShiftedTwice,
    LearningRateUnfit,
    LengthGroupingWithoutEffect,
    LoaderNeedsWorkers,
    LoaderNotShuffled,
    LoggingEachStep,
    LoraDropoutCost,
    LoraOnAttentionOnly,
    LoraScaling,
    LossesKeptWithGraph,
    MaxLengthCuts,
    MeanOfMeans,
    MicroBatchSmall,
    MicroBatchesSynchronised,
    OffloadThatIsNone,
    OneCheckpointKept,
    OptimizerNotFused,
    OptimizerRemoved,
    OutsideTheEpochLoop,
    PackingLeaks,
    PackingOff,
    PadIsEnd,
    PaddingFreeUnbounded,
    PaddingToMaxLength,
    PaddingTrained,
    PickleLoaded,
    PinnedMemory,
    PromptsTrained,
    QuantisedWithoutAdapters,
    ReduceOverheadWithoutGpu,
    RemovedNames,
    ReportingEverywhere,
    SamplerWithoutEpoch,
    SavedByEveryProcess,
    ScalerHalfUsed,
    SchedulerEachMicroBatch,
    SchedulerEachProcess,
    ShardingOneDevice,
    StreamingWithoutWorkers,
    SynchronisedEachStep,
    Tf32WithoutEffect,
    ThreadsFixed,
    TokenisedEachEpoch,
    TokenizersParallelism,
    UnknownKeys,
    UnusedParametersSearched,
    WarmupBeyondRun,
    WorkersBeyondCores,
    WorkersForReadyData,
    WorkersStartEachEpoch,
)

__all__ = ["RULES", "Circumstances", "Rule"]
