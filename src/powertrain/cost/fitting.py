"""What fits the memory, and what would make a run fit: peak memory asked again with one thing changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts

WORTH_BYTES = 8 << 20        # a change that saves less is not worth naming ...
WORTH_SHARE = 0.02           # ... nor one that saves less of what is needed
# guess: what a process takes besides the tensors of a step, once torch is loaded: scratch of kernels, rounding, threads
PROCESS_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}


@dataclass(frozen=True)
class Change:
    """Words for the recipe, and what they make of model and workload."""

    words: str                               # "techniques.activation_checkpointing=on"
    model: ModelFacts
    workload: Workload


@dataclass(frozen=True)
class Saving:
    """What a change saves at the peak."""

    words: str
    bytes: int
    enough: bool                             # the run fits with this change alone


def total_bytes(model: ModelFacts, workload: Workload) -> int:
    """Peak memory of a step."""
    return sum(peak_memory(model, workload).values())


def own_bytes(device: str) -> int:
    """What the process takes besides the tensors that peak memory counts."""
    return PROCESS_BYTES.get(device, PROCESS_BYTES["cuda"])


def ways_to_save(model: ModelFacts, workload: Workload, memory_bytes: int, changes: Iterable[Change]) -> list[Saving]:
    """Those of the changes that make a difference, the largest first, for a run that has `memory_bytes` for its tensors."""
    needed = total_bytes(model, workload)
    left = ((change.words, total_bytes(change.model, change.workload)) for change in changes)
    savings = [Saving(words, needed - size, size <= memory_bytes) for words, size in left]
    worth = [saving for saving in savings if saving.bytes >= max(WORTH_BYTES, WORTH_SHARE * needed)]
    return sorted(worth, key=lambda saving: -saving.bytes)


def largest_micro_batch(model: ModelFacts, workload: Workload, memory_bytes: int) -> int:
    """The most examples of a pass with which a step takes at most `memory_bytes`; 0 where not even one fits."""
    def fits(examples: int) -> bool:
        return total_bytes(model, with_passes_of(workload, examples)) <= memory_bytes

    if fits(workload.examples):              # in one pass no gradients of earlier ones lie about
        return workload.examples
    fitting, beyond = 0, workload.examples
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
    return fitting


def largest_pass(model: ModelFacts, workload: Workload, memory_bytes: int) -> Mapping[str, int]:
    """`examples`, `tokens` and peak `bytes` of the largest pass that fits; without tokens and bytes where none does."""
    examples = largest_micro_batch(model, workload, memory_bytes)
    if not examples:
        return {"examples": 0}
    largest = with_passes_of(workload, examples)
    return {"examples": examples, "tokens": largest.fullest_pass_tokens, "bytes": total_bytes(model, largest)}


def with_passes_of(workload: Workload, examples: int) -> Workload:
    """The workload with so many examples in a pass, packed or padded as it is."""
    packed = None if workload.packed_tokens is None else examples * workload.block
    return replace(workload, micro_batch=examples, packed_tokens=packed, documents=())
