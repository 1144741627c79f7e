"""Peak memory of a training step, by component: one optimizer step is replayed with sizes in place of tensors.

Trained weights and their gradients are fp32, and the optimizer's state stands beside them: with AdamW 16 bytes a weight in all.
Frozen weights have neither, and stay as they are stored (weights.py). Everything else comes and goes, operator by operator as
in the decoder and in autograd (forward.py, fused.py). The peak is where the sum of all that is held is largest. Nothing is
fitted: a test holds the peak against torch's own record of allocations.

Where processes each have some blocks, every stage is replayed, and the fullest one counts. torch's schedule receives each pass,
and its gradients, into buffers that are there for all passes of a step.

Not counted: the process itself (about 0.3 GB with torch loaded, more with CUDA), the data, and the workspace of a library that
torch's allocator does not see. A compiled step counts as if it were not compiled, which is an upper bound. A model of another
library counts as the built-in decoder of the same shape.
"""

from collections.abc import Mapping
from functools import lru_cache

from powertrain.cost import weights
from powertrain.cost.forward import StepFacts
from powertrain.cost.pipeline import levelled, stage_facts
from powertrain.cost.replay import COPIES, Memory
from powertrain.cost.sharding import divided_state_bytes, parts_bytes
from powertrain.cost.step import INDEX_BYTES, RECEIVED, StageStep, Step
from powertrain.cost.weights import tensor_part
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts
from powertrain.shapes import DTYPE_BYTES, FOUR_BIT, FP32

REFERENCE = "reference"                      # a copy of the trained weights as they were at the beginning
TENSORS = 3                                  # of a batch: tokens, targets, positions
CUDA_ROUNDING = 512                          # bytes: what torch's CUDA allocator hands out is a multiple of it
MOST_AT_ONCE = 2                             # times the stages: more passes of a pipeline change nothing
OTHER_PASSES = 2                             # besides a step's first one, those that could be the fullest
REMEMBERED = 1024                            # steps whose peak is kept: the techniques of a plan ask for the same few

Held = Mapping[str, int]                     # component -> bytes


def peak_memory(model: ModelFacts, workload: Workload) -> Held:
    """Return component -> bytes at the fullest moment of a step after the first (the optimizer's state exists by then)."""
    return dict(_peak(model, workload))


@lru_cache(REMEMBERED)
def _peak(model: ModelFacts, workload: Workload) -> Held:
    if workload.stages > 1:
        stages = (replay_stage(model, workload, place).at_the_peak() for place in range(workload.stages))
        held = max(stages, key=lambda held: sum(held.values()))
    else:
        held = replay(tensor_part(model, workload.tensor_degree), workload).at_the_peak()
    return {name: nbytes for name, nbytes in held.items() if nbytes}


def replay(model: ModelFacts, workload: Workload, *, leaves_out: bool = True) -> Memory:
    """Replay one optimizer step. Without `leaves_out` every block is run; the result is the same."""
    model = weights.as_held(weights.as_decoder(model), workload.base_dtype)
    memory = Memory(_standing(model, workload), CUDA_ROUNDING if workload.device == "cuda" else 1)
    step = Step(StepFacts(model, workload), memory, leaves_out=leaves_out)
    passes = _passes(workload)
    for number, lengths in enumerate(passes, 1):
        step.run_pass(lengths, is_last=number == len(passes))
    step.sum_gradients()
    step.update()
    return memory


def replay_stage(model: ModelFacts, workload: Workload, place: int) -> Memory:
    """Replay one optimizer step of the process that has the stage `place`, from 0."""
    model = weights.as_held(weights.as_decoder(model), workload.base_dtype)
    stages, passes = workload.stages, levelled(workload.passes, workload.stages)
    part = stage_facts(model, stages, place)
    received = ((place > 0) + (place < stages - 1)) * len(passes) * sum(passes[0]) * model.width * FP32
    memory = Memory({**_standing(part, workload), RECEIVED: received}, CUDA_ROUNDING if workload.device == "cuda" else 1)
    step = StageStep(StepFacts(part, workload), memory, place, stages)
    step.run_passes(passes[:MOST_AT_ONCE * stages])
    memory.change(-received, RECEIVED)
    step.update()
    return memory


def _standing(model: ModelFacts, workload: Workload) -> dict[str, int]:
    """Return what is there at every moment: weights, the optimizer's state, the batch, a GPU library's workspace."""
    whole = min(workload.whole_blocks, model.layers) / model.layers  # of the blocks, if they are a 4-bit base
    is_four_bit = model.frozen_dtype in FOUR_BIT and weights.has_frozen_base(model)
    left_bytes = weights.left_wide_bytes(model, workload.device, workload.dtype)
    divided = {"weights": parts_bytes(model, workload.shards),
               "optimizer": divided_state_bytes(model, workload.optimizer, workload.shards)} if workload.shards > 1 else {}
    return {"weights": FP32 * model.trainable + weights.frozen_bytes(model) + left_bytes,
            REFERENCE: FP32 * model.trainable if workload.reference_in_step else 0,
            "gradients": FP32 * model.trainable if workload.flat_parameters else 0,
            "optimizer": weights.state_bytes(model, workload.optimizer),
            "batch": TENSORS * INDEX_BYTES * sum(map(sum, workload.passes)),
            "workspace": workload.library_workspace_bytes,
            COPIES: round(whole * model.matmul_parameters * DTYPE_BYTES[workload.dtype]) if is_four_bit else 0, **divided}


def _passes(workload: Workload) -> list[tuple[int, ...]]:
    """Return the first pass, which finds no gradients, and of the others those with the most tokens and the most pairs."""
    first, *others = workload.passes
    different = list(dict.fromkeys(others))
    if len(different) > OTHER_PASSES:
        different = [max(different, key=sum), max(different, key=lambda lengths: sum(length * length for length in lengths))]
    found = [first, *dict.fromkeys(different)]
    # where weights are divided, the last pass frees what those before it keep
    return found if workload.shards == 1 or len(found) == len(workload.passes) else [*found, found[-1]]
