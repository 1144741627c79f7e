"""What fits the memory: how many examples a pass can have, and what would make a run fit that does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload, longest_of
from powertrain.records import DataFacts, Hardware, ModelFacts

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


# ------------------------------------------------------------------------------------------------ the size of a pass

CPU_TOKENS = 4096            # 2048 to 4096 were fastest on the CPUs measured
GPU_TOKENS = 32768           # large enough for full-speed products; memory usually decides first
ROOM = 0.5                   # share of the free memory that a pass may count on; what is free may be taken by others
PLANNED_SHARE = 0.8          # of the free memory: what a plan may count on for a whole step
COMPARED = 9                 # examples of the larger pass that memory is compared with


def planned_room_bytes(hardware: Hardware) -> int:
    """Memory of the device that a plan may count on for a whole step."""
    return int(PLANNED_SHARE * hardware.free_memory_bytes)


def wanted_tokens(hardware: Hardware) -> int:
    """The tokens of a pass that this kind of device likes best."""
    return CPU_TOKENS if hardware.device == "cpu" else GPU_TOKENS


def longest_example(data: DataFacts) -> int:
    """Tokens of the longest example."""
    return max(data.max_length, data.block)


def memory_of_examples(model: ModelFacts, tokens: int) -> tuple[int, int]:
    """Peak bytes of a step whose passes have one example of `tokens`, and what each further example of a pass adds.

    In fp32, with attention that keeps no scores.
    """
    # a batch of several passes either way, so that the difference is that of the passes alone
    one = Workload(2 * COMPARED, tokens, micro_batch=1, attention_saves_scores=False)
    several = Workload(2 * COMPARED, tokens, micro_batch=COMPARED, attention_saves_scores=False)
    first_bytes, several_bytes = (sum(peak_memory(model, workload).values()) for workload in (one, several))
    return first_bytes, max(1, (several_bytes - first_bytes) // (COMPARED - 1))


def fitting_tokens(model: ModelFacts, hardware: Hardware, example_tokens: int) -> int:
    """How many tokens of examples that have `example_tokens` each fit in one pass."""
    first_bytes, example_bytes = memory_of_examples(model, example_tokens)
    return max(0, int(ROOM * hardware.free_memory_bytes) - first_bytes) // example_bytes * example_tokens


def padded_examples(model: ModelFacts, data: DataFacts, hardware: Hardware) -> int:
    """How many examples suit a padded pass: in memory each may be the longest there is; in time, as a pass usually comes."""
    longest, target = longest_example(data), wanted_tokens(hardware)
    fit = fitting_tokens(model, hardware, longest) // longest
    if data.kind == "blocks" or not data.length_quantiles:
        return max(1, min(target // data.block, fit))
    suit = max((count for count in range(1, data.train_batch_size + 1)
                if count * longest_of(data.length_quantiles, count) <= target), default=1)
    return max(1, min(suit, fit))
