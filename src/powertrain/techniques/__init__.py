"""The catalogue, in the order in which techniques are considered and applied. Add a file, add a line."""

from powertrain.techniques.activation_checkpointing import ActivationCheckpointing
from powertrain.techniques.allocator import Allocator
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.base import Technique
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.techniques.context_parallel import ContextParallel
from powertrain.techniques.cuda_graph import CudaGraph
from powertrain.techniques.data_parallel import DataParallel
from powertrain.techniques.dequantised_cache import DequantisedCache
from powertrain.techniques.eight_bit_adamw import EightBitAdamW
from powertrain.techniques.flat_parameters import FlatParameters
from powertrain.techniques.four_bit_base import FourBitBase
from powertrain.techniques.fp8_base import Fp8Base
from powertrain.techniques.fp16 import Fp16
from powertrain.techniques.frozen_backward import FrozenBackward
from powertrain.techniques.frozen_base import FrozenBase
from powertrain.techniques.fused_adamw import FusedAdamW
from powertrain.techniques.fused_blocks import FusedBlocks
from powertrain.techniques.int8_base import Int8Base
from powertrain.techniques.length_grouping import LengthGrouping
from powertrain.techniques.loader import Loader
from powertrain.techniques.micro_batch import MicroBatch
from powertrain.techniques.packing import Packing
from powertrain.techniques.paged_adamw import PagedAdamW
from powertrain.techniques.pipeline_parallel import PipelineParallel
from powertrain.techniques.saved_activations import SavedActivations
from powertrain.techniques.sharding import Sharding
from powertrain.techniques.shared_prompt import SharedPrompt
from powertrain.techniques.stored_reference import StoredReference
from powertrain.techniques.tensor_parallel import TensorParallel
from powertrain.techniques.tf32 import Tf32
from powertrain.techniques.threads import Threads
from powertrain.techniques.torch_compile import TorchCompile
from powertrain.techniques.whole_pass import WholePass

CATALOGUE: tuple[type[Technique], ...] = (
    Threads, Allocator, Bf16, Fp16, Tf32, FourBitBase, Int8Base, Fp8Base, DequantisedCache, FrozenBase, FusedAdamW,
    EightBitAdamW, PagedAdamW, AttentionKernel, ChunkedCrossEntropy, StoredReference, SharedPrompt, Packing, MicroBatch,
    LengthGrouping, FusedBlocks, WholePass, FlatParameters, SavedActivations, FrozenBackward, TorchCompile,
    ActivationCheckpointing, CudaGraph, Loader, Sharding, TensorParallel, PipelineParallel, ContextParallel, DataParallel)

__all__ = ["CATALOGUE", "Technique"]
