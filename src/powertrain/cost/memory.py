"""Peak memory of a training step, by component, from the model's shape and the workload: the step is replayed.

Trained weights and their gradients are fp32, and the optimizer's state stands beside them (optimizer.py): with AdamW 16
bytes per weight in all. Frozen weights have neither, and stay as they are stored (stored.py). Everything else comes and
goes: forward.py runs a step with sizes in place of tensors, operator by operator as the decoder and autograd do, and the
peak is where the sum of what is held is largest.
Nothing in it is fitted: a test holds it against torch's own record of allocations.

Not counted: the process itself (about 0.3 GB with torch loaded, more with CUDA), the data, and what a library's kernel
works in without torch's allocator knowing. A compiled step counts as if it were not, which is an upper bound. For a model
that another library computes it is what the decoder here would take, at that shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from powertrain.cost.forward import StepFacts
from powertrain.cost.optimizer import state_bytes
from powertrain.cost.replay import COPIES, Memory
from powertrain.cost.step import Step, Unit, kinds_of, units_of
from powertrain.cost.weights import as_decoder, as_held, frozen_bytes, has_frozen_base, left_wide_bytes
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts
from powertrain.shapes import DTYPE_BYTES, FOUR_BIT, FP32

INDEX_BYTES = 8                              # int64
TENSORS = 3                                  # of a batch: tokens, targets, positions
CUDA_ROUNDING = 512                          # bytes: what torch's CUDA allocator hands out is a multiple of it
OTHER_PASSES = 2                             # besides a step's first one, those that could be the fullest
REMEMBERED = 1024                            # steps whose peak is kept: the techniques of a plan ask for the same few


@dataclass(frozen=True)
class Asked:
    """A step whose peak is asked for. Equal are those that read the same: a mapping in them has no hash."""

    text: str
    model: ModelFacts = field(compare=False)
    workload: Workload = field(compare=False)


def peak_memory(model: ModelFacts, workload: Workload) -> Mapping[str, int]:
    """Component -> bytes at the fullest moment of a step after the first (the optimizer's state exists by then)."""
    return dict(_peak(Asked(repr((model, workload)), model, workload)))


@lru_cache(REMEMBERED)
def _peak(asked: Asked) -> Mapping[str, int]:
    return {name: nbytes for name, nbytes in replay(asked.model, asked.workload).at_the_peak().items() if nbytes}


def replay(model: ModelFacts, workload: Workload, *, leaves_out: bool = True) -> Memory:
    """One optimizer step. Without `leaves_out` every block is run; the result is the same."""
    model = as_held(as_decoder(model), workload.base_dtype)
    memory = Memory(_standing(model, workload), CUDA_ROUNDING if workload.device == "cuda" else 1)
    _run(model, workload, memory, leaves_out=leaves_out)
    return memory


def _run(model: ModelFacts, workload: Workload, memory: Memory, *, leaves_out: bool) -> None:
    kinds, period = kinds_of(model, workload.checkpoint_every, workload.saved_blocks), max(1, workload.checkpoint_every)
    units = units_of(kinds, period) if leaves_out else [Unit((kind,)) for kind in kinds]
    step = Step(StepFacts(model, workload), memory, units)
    for lengths in _passes(workload):
        step.run_pass(lengths)
    step.update()


def _standing(model: ModelFacts, workload: Workload) -> dict[str, int]:
    """What is there at every moment: the weights, the optimizer's state, the batch, a GPU library's workspace."""
    tokens = sum(map(sum, workload.passes))
    left_bytes = left_wide_bytes(model, workload.device, workload.dtype)
    return {"weights": FP32 * model.trainable + frozen_bytes(model) + left_bytes,
            "gradients": FP32 * model.trainable if workload.flat_parameters else 0,
            "optimizer": state_bytes(model, workload.optimizer), "batch": TENSORS * INDEX_BYTES * tokens,
            "workspace": workload.library_workspace_bytes, COPIES: whole_bytes(model, workload)}


def whole_bytes(model: ModelFacts, workload: Workload) -> int:
    """Of the blocks of a 4-bit base that are kept whole."""
    if model.frozen_dtype not in FOUR_BIT or not has_frozen_base(model):
        return 0
    share = min(workload.whole_blocks, model.layers) / model.layers
    return round(share * model.matmul_parameters * DTYPE_BYTES[workload.dtype])


def _passes(workload: Workload) -> list[tuple[int, ...]]:
    """The first pass, which finds no gradients, and of the others those with the most tokens and the most pairs of them."""
    first, *others = workload.passes
    different = list(dict.fromkeys(others))
    if len(different) > OTHER_PASSES:
        different = [max(different, key=sum), max(different, key=lambda lengths: sum(length * length for length in lengths))]
    return [first, *dict.fromkeys(different)]
