"""The rules of the audit, one file each, in the order in which they are asked."""

from __future__ import annotations

from powertrain.diagnosis.audit.rules.accumulation_not_divided import AccumulationNotDivided
from powertrain.diagnosis.audit.rules.adapters_with_spilled_optimizer import AdaptersWithSpilledOptimizer
from powertrain.diagnosis.audit.rules.anomaly_detection_on import AnomalyDetectionOn
from powertrain.diagnosis.audit.rules.attention_eager import AttentionEager
from powertrain.diagnosis.audit.rules.base import Circumstances, Rule
from powertrain.diagnosis.audit.rules.batch_arithmetic import BatchArithmetic
from powertrain.diagnosis.audit.rules.batch_beyond_data import BatchBeyondData
from powertrain.diagnosis.audit.rules.batch_found_by_failing import BatchFoundByFailing
from powertrain.diagnosis.audit.rules.best_checkpoint_intervals import BestCheckpointIntervals
from powertrain.diagnosis.audit.rules.bf16_without_hardware import Bf16WithoutHardware
from powertrain.diagnosis.audit.rules.both_half_precisions import BothHalfPrecisions
from powertrain.diagnosis.audit.rules.cache_emptied import CacheEmptied
from powertrain.diagnosis.audit.rules.cache_emptied_in_loop import CacheEmptiedInLoop
from powertrain.diagnosis.audit.rules.cache_while_training import CacheWhileTraining
from powertrain.diagnosis.audit.rules.checkpoint_cannot_resume import CheckpointCannotResume
from powertrain.diagnosis.audit.rules.checkpointing_needless import CheckpointingNeedless
from powertrain.diagnosis.audit.rules.checkpointing_reentrant import CheckpointingReentrant
from powertrain.diagnosis.audit.rules.clip_before_unscale import ClipBeforeUnscale
from powertrain.diagnosis.audit.rules.clip_without_effect import ClipWithoutEffect
from powertrain.diagnosis.audit.rules.clipping_off import ClippingOff
from powertrain.diagnosis.audit.rules.columns_kept import ColumnsKept
from powertrain.diagnosis.audit.rules.compile_changing_lengths import CompileChangingLengths
from powertrain.diagnosis.audit.rules.compile_quantised import CompileQuantised
from powertrain.diagnosis.audit.rules.compiled_names_saved import CompiledNamesSaved
from powertrain.diagnosis.audit.rules.cudnn_benchmark import CudnnBenchmark
from powertrain.diagnosis.audit.rules.data_parallel import DataParallelUsed
from powertrain.diagnosis.audit.rules.decay_of_adapters import DecayOfAdapters
from powertrain.diagnosis.audit.rules.determinism_forced import DeterminismForced
from powertrain.diagnosis.audit.rules.device_map_auto import DeviceMapAuto
from powertrain.diagnosis.audit.rules.documents_concatenated import DocumentsConcatenated
from powertrain.diagnosis.audit.rules.double_quantisation_off import DoubleQuantisationOff
from powertrain.diagnosis.audit.rules.evaluation_keeps_gradients import EvaluationKeepsGradients
from powertrain.diagnosis.audit.rules.evaluation_mode_left_on import EvaluationModeLeftOn
from powertrain.diagnosis.audit.rules.flash_attention_unfit import FlashAttentionUnfit
from powertrain.diagnosis.audit.rules.four_bit_compute_type import FourBitComputeType
from powertrain.diagnosis.audit.rules.four_bit_needless import FourBitNeedless
from powertrain.diagnosis.audit.rules.four_bit_type import FourBitType
from powertrain.diagnosis.audit.rules.fp16_on_bf16_hardware import Fp16OnBf16Hardware
from powertrain.diagnosis.audit.rules.fp16_weights_unscaled import Fp16WeightsUnscaled
from powertrain.diagnosis.audit.rules.fp16_without_scaler import Fp16WithoutScaler
from powertrain.diagnosis.audit.rules.fp16_without_tensor_cores import Fp16WithoutTensorCores
from powertrain.diagnosis.audit.rules.fp32_on_half_hardware import Fp32OnHalfHardware
from powertrain.diagnosis.audit.rules.good_batch import GoodBatch
from powertrain.diagnosis.audit.rules.good_checkpointing import GoodCheckpointing
from powertrain.diagnosis.audit.rules.good_four_bit import GoodFourBit
from powertrain.diagnosis.audit.rules.good_packing import GoodPacking
from powertrain.diagnosis.audit.rules.good_precision import GoodPrecision
from powertrain.diagnosis.audit.rules.gradients_cleared_early import GradientsClearedEarly
from powertrain.diagnosis.audit.rules.gradients_not_zeroed import GradientsNotZeroed
from powertrain.diagnosis.audit.rules.half_weights_trained import HalfWeightsTrained
from powertrain.diagnosis.audit.rules.intervals_cost import IntervalsCost
from powertrain.diagnosis.audit.rules.intervals_never_fire import IntervalsNeverFire
from powertrain.diagnosis.audit.rules.item_each_step import ItemEachStep
from powertrain.diagnosis.audit.rules.label_smoothing_cost import LabelSmoothingCost
from powertrain.diagnosis.audit.rules.labels_shifted_twice import LabelsShiftedTwice
from powertrain.diagnosis.audit.rules.learning_rate_unfit import LearningRateUnfit
from powertrain.diagnosis.audit.rules.length_grouping_without_effect import LengthGroupingWithoutEffect
from powertrain.diagnosis.audit.rules.loader_needs_workers import LoaderNeedsWorkers
from powertrain.diagnosis.audit.rules.loader_not_shuffled import LoaderNotShuffled
from powertrain.diagnosis.audit.rules.logging_each_step import LoggingEachStep
from powertrain.diagnosis.audit.rules.lora_dropout_cost import LoraDropoutCost
from powertrain.diagnosis.audit.rules.lora_on_attention_only import LoraOnAttentionOnly
from powertrain.diagnosis.audit.rules.lora_scaling import LoraScaling
from powertrain.diagnosis.audit.rules.losses_kept_with_graph import LossesKeptWithGraph
from powertrain.diagnosis.audit.rules.max_length_cuts import MaxLengthCuts
from powertrain.diagnosis.audit.rules.mean_of_means import MeanOfMeans
from powertrain.diagnosis.audit.rules.micro_batch_small import MicroBatchSmall
from powertrain.diagnosis.audit.rules.micro_batches_synchronised import MicroBatchesSynchronised
from powertrain.diagnosis.audit.rules.offload_that_is_none import OffloadThatIsNone
from powertrain.diagnosis.audit.rules.one_checkpoint_kept import OneCheckpointKept
from powertrain.diagnosis.audit.rules.optimizer_not_fused import OptimizerNotFused
from powertrain.diagnosis.audit.rules.optimizer_removed import OptimizerRemoved
from powertrain.diagnosis.audit.rules.outside_the_epoch_loop import OutsideTheEpochLoop
from powertrain.diagnosis.audit.rules.packing_leaks import PackingLeaks
from powertrain.diagnosis.audit.rules.packing_off import PackingOff
from powertrain.diagnosis.audit.rules.pad_is_end import PadIsEnd
from powertrain.diagnosis.audit.rules.padding_free_unbounded import PaddingFreeUnbounded
from powertrain.diagnosis.audit.rules.padding_to_max_length import PaddingToMaxLength
from powertrain.diagnosis.audit.rules.padding_trained import PaddingTrained
from powertrain.diagnosis.audit.rules.pickle_loaded import PickleLoaded
from powertrain.diagnosis.audit.rules.pinned_memory import PinnedMemory
from powertrain.diagnosis.audit.rules.prompts_trained import PromptsTrained
from powertrain.diagnosis.audit.rules.quantised_without_adapters import QuantisedWithoutAdapters
from powertrain.diagnosis.audit.rules.reduce_overhead_without_gpu import ReduceOverheadWithoutGpu
from powertrain.diagnosis.audit.rules.removed_names import RemovedNames
from powertrain.diagnosis.audit.rules.reporting_everywhere import ReportingEverywhere
from powertrain.diagnosis.audit.rules.sampler_without_epoch import SamplerWithoutEpoch
from powertrain.diagnosis.audit.rules.saved_by_every_process import SavedByEveryProcess
from powertrain.diagnosis.audit.rules.scaler_half_used import ScalerHalfUsed
from powertrain.diagnosis.audit.rules.scheduler_each_micro_batch import SchedulerEachMicroBatch
from powertrain.diagnosis.audit.rules.scheduler_each_process import SchedulerEachProcess
from powertrain.diagnosis.audit.rules.sharding_one_device import ShardingOneDevice
from powertrain.diagnosis.audit.rules.streaming_without_workers import StreamingWithoutWorkers
from powertrain.diagnosis.audit.rules.synchronised_each_step import SynchronisedEachStep
from powertrain.diagnosis.audit.rules.tf32_without_effect import Tf32WithoutEffect
from powertrain.diagnosis.audit.rules.threads_fixed import ThreadsFixed
from powertrain.diagnosis.audit.rules.tokenised_each_epoch import TokenisedEachEpoch
from powertrain.diagnosis.audit.rules.tokenizers_parallelism import TokenizersParallelism
from powertrain.diagnosis.audit.rules.unknown_keys import UnknownKeys
from powertrain.diagnosis.audit.rules.unused_parameters_searched import UnusedParametersSearched
from powertrain.diagnosis.audit.rules.warmup_beyond_run import WarmupBeyondRun
from powertrain.diagnosis.audit.rules.workers_beyond_cores import WorkersBeyondCores
from powertrain.diagnosis.audit.rules.workers_for_ready_data import WorkersForReadyData
from powertrain.diagnosis.audit.rules.workers_start_each_epoch import WorkersStartEachEpoch

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
